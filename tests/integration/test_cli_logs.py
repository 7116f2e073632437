"""`paceline logs`: what it prints, where it prints it, and how it ends."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from paceline.commands.logs import Log, Printer
from paceline.node import logs as node_logs
from paceline.wire import State
from paceline_backend.insight import hangs
from paceline_backend.insight.hangs import Hang
from paceline_backend.requests import asking
from paceline_backend.server.stack import Stack
from paceline_backend.store import Store, nodes, schema
from support import groups
from support.answering import Node, node
from support.command_line import Main
from support.node import paceline, script
from support.records import add_run
from support.waiting import until

RUN = "r"
Logs = Callable[..., tuple[int, str, str]]


@pytest.fixture
def store(store: Store, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 3600.0)  # the machine may be busy,
    monkeypatch.setattr(asking, "ANSWER_S", 60.0)  # very busy
    add_run(store, RUN, node="here", state="running")
    return store


@pytest.fixture
def server(client: httpx.Client) -> httpx.Client:
    return client


@pytest.fixture
def here(store: Store, server: httpx.Client, bus_url: str, tmp_path: Path) -> Iterator[Node]:
    with node(store, bus_url, "here", tmp_path) as made:
        made.run(RUN)
        yield made


@pytest.fixture
def logs(main: Main, server: httpx.Client) -> Logs:
    return lambda *words: main("logs", RUN, *words, "--server", str(server.base_url))


def end(store: Store, state: str = "finished") -> None:
    with store.write() as connection:
        connection.execute(sa.update(schema.runs).values(state=state))


def test_all_ranks_with_their_numbers(logs: Logs, here: Node) -> None:
    for rank in (1, 0):
        here.log(RUN, rank, f"a{rank}\nb{rank}\nno end")
        here.log(RUN, rank, f"warning {rank}\n", 0, "stderr")
    code, out, err = logs()
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        *("[rank 0] a0", "[rank 0] b0", "[rank 0] warning 0"),
        *("[rank 1] a1", "[rank 1] b1", "[rank 1] warning 1"),
        *("[rank 0] no end", "[rank 1] no end"),
    ]
    _, out, _ = logs("-n", "1", "--output", "stderr")
    assert out == "[rank 0] warning 0\n[rank 1] warning 1\n"
    _, out, _ = logs("--rank", "1", "-n", "2", "--output", "stdout")
    assert out == "b1\nno end", "one log is printed as it is"
    _, out, _ = logs("--rank", "1", "-n", "1")
    assert out == "warning 1\nno end\n"


def test_a_whole_log_whatever_its_length(logs: Logs, here: Node) -> None:
    whole = "".join(f"line {number} é\n" for number in range(40_000))
    here.log(RUN, 0, whole)
    assert logs("-n", "0") == (0, whole, "")
    _, out, _ = logs("-n", "10000")
    assert out == whole[whole.index("line 30000") :]


def test_the_newest_attempt_or_another(logs: Logs, here: Node) -> None:
    here.log(RUN, 0, "first\n", 0)
    here.log(RUN, 0, "second\n", 3)
    assert logs()[1] == "second\n"
    assert logs("--attempt", "0")[1] == "first\n"
    code, out, err = logs("--attempt", "1")
    assert (code, out) == (2, "")
    assert err == (
        "paceline: run r has no such log: there are ranks 0 and attempts 0, 3; --list lists all\n"
    )


def test_what_is_asked_wrongly(logs: Logs, here: Node) -> None:
    code, _, err = logs()
    assert (code, "no rank has started" in err) == (2, True)
    for rank in (0, 1, 2, 7):
        here.log(RUN, rank, "x")
    code, _, err = logs("--rank", "1", "--rank", "5")
    assert (code, "no log of rank 5: there are ranks 0-2, 7 and attempts 0" in err) == (2, True)
    for words in (["--json"], ["-f", "--attempt", "0"], ["--rank", "-1"], ["-n", "10001"]):
        code, out, err = logs(*words)
        assert (code, out, bool(err)) == (2, "", True), words


def test_a_driver_has_one_log(logs: Logs, store: Store, here: Node) -> None:
    with store.write() as connection:
        connection.execute(sa.update(schema.runs).values(env=["PACELINE_DRIVER"]))
    here.log(RUN, 0, "worker 1 begins\n")
    assert logs() == (0, "worker 1 begins\n", "")
    for words in (["--rank", "1"], ["--attempt", "1"]):
        code, out, err = logs(*words)
        assert (code, out) == (2, ""), words
        assert "leave out --rank and --attempt: the log has the output of the script" in err


def test_a_hang_is_told_where_no_stacks_can_be_had(
    main: Main, server: httpx.Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.write() as connection:
        connection.execute(sa.update(schema.runs).values(env=["PACELINE_DRIVER"]))
    hang = Hang(True, 90.0, 0.5, 7, [], [0], [1], [], "It waits for rank 1.")
    monkeypatch.setattr(hangs, "look", lambda *_: hang)
    code, out, err = main("hang", RUN, "--stacks", "--server", str(server.base_url))
    assert (code, out) == (4, "It waits for rank 1.\n")
    assert "for Ray workers, run `ray stack` on their machine" in err


def test_which_logs_there_are(logs: Logs, here: Node) -> None:
    here.log(RUN, 3, "loss\n")
    (here.data / "runs" / RUN / "launcher.log").write_text("launched\n")
    code, out, _ = logs("--list", "--json")
    assert code == 0
    assert [(log["rank"], log["size"]) for log in json.loads(out)["logs"]] == [(None, 9), (3, 5)]
    assert "launcher" in logs("--list")[1]
    assert logs("--launcher") == (0, "launched\n", "")


def test_what_is_left_out_of_a_log_is_told(
    logs: Logs, here: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_logs, "KEPT_FIRST", 4096)
    monkeypatch.setattr(node_logs, "KEPT_LAST", 4096)
    here.log(RUN, 0, "".join(f"line {number:03}\n" for number in range(3_000)))
    node_logs.shorten(here.path(RUN, 0))
    code, out, err = logs("-n", "0")
    assert code == 0
    assert out.startswith("line 000\n")
    assert out.endswith("line 2999\n")
    gone = 9 * 1_000 + 10 * 2_000 - len(out)
    assert f"stdout of rank 0: {gone} bytes are missing here" in err


def test_a_node_that_does_not_answer(
    logs: Logs, here: Node, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "ANSWER_S", 0.3)
    here.log(RUN, 0, "x")
    here.deaf = True
    code, out, err = logs()
    assert (code, out, err.startswith("paceline: node here did not answer")) == (3, "", True)
    groups.answer(store, "here", left=True)
    code, out, err = logs("-f")
    assert (code, out, err.startswith("paceline: no agent answers on node here")) == (2, "", True)


class Following:
    """`paceline logs -f` as a process of its own."""

    def __init__(self, server: str, run: str, *words: str) -> None:
        self.out, self.err = "", ""
        self.process = paceline("logs", run, "-f", "--server", server, *words)
        self._readers = [
            threading.Thread(target=self._read, args=(stream, name))
            for name, stream in (("out", self.process.stdout), ("err", self.process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: io.TextIOWrapper, name: str) -> None:
        for line in stream:
            setattr(self, name, getattr(self, name) + line)

    def ends(self) -> int:
        """Its exit code."""
        code = self.process.wait(120)
        for reader in self._readers:
            reader.join()
        return code

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.ends()
        self.process.communicate()


def test_a_run_is_followed_to_its_end(server: httpx.Client, here: Node, store: Store) -> None:
    """Over attempts, and while a node is away."""
    here.log(RUN, 0, "zero\n" * 60)
    with Following(str(server.base_url), RUN) as seen:
        until(lambda: seen.out == "zero\n" * 50, "the last lines")
        here.log(RUN, 0, "more\n")
        here.log(RUN, 1, "one\n" * 60)
        until(lambda: seen.out.count("one\n") == 50, "a rank that prints later")
        groups.answer(store, "here", left=True)
        until(lambda: "no agent answers on node here" in seen.err, "the node's absence", 60)
        here.log(RUN, 0, "last of all\n")
        here.run(RUN, attempt=2)
        here.log(RUN, 0, "anew\n" * 60, 2)
        groups.answer(store, "here")
        until(lambda: seen.out.count("[rank 0] anew\n") == 60, "all of the next attempt")
        here.log(RUN, 0, "no end", 2)
        here.run(RUN, attempt=2, state=State.FINISHED)
        end(store)
        assert seen.ends() == 0
    assert seen.out.index("last of all") < seen.out.index("anew")
    assert seen.out.endswith("[rank 0] anew\n[rank 0] no end\n")
    assert "paceline: attempt 2 starts\n" in seen.err


def test_a_follower_is_interrupted(server: httpx.Client, here: Node) -> None:
    here.log(RUN, 0, "zero\n")
    with Following(str(server.base_url), RUN) as seen:
        until(lambda: seen.out, "a line")
        seen.process.send_signal(2)
        assert (seen.ends(), seen.err) == (130, "")


def test_a_terminal_gets_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    """A script may have printed any; colours and progress bars stay."""
    text = "\x1b[31mred\x1b[0m 10%\r20%\tdone\n\x1b]0;title\x07 \x9b2J \u202eevil\n"
    log = Log("here", 0, "stdout", 0)
    Printer(terminal=True).write(log, text)
    shown = capsys.readouterr().out
    assert shown == ("\x1b[31mred\x1b[0m 10%\r20%\tdone\n\\x1b]0;title\\x07 \\x9b2J \\u202eevil\n")
    Printer(terminal=False).write(log, text)
    assert capsys.readouterr().out == text


SCRIPT = """
    import os, sys, time
    from pathlib import Path
    rank, attempt = os.environ["RANK"], os.environ["PACELINE_ATTEMPT"]
    print("attempt", attempt, "of rank", rank, flush=True)
    print("sesame-4711", file=sys.stderr, flush=True)
    while not (Path(sys.argv[1]) / attempt).exists():
        time.sleep(0.05)
    print("attempt", attempt, "ends")
    sys.exit(7 * (attempt == "0" and rank == "1"))
"""


@pytest.mark.ranks
def test_ranks_of_a_real_run(stack: Stack, tmp_path: Path) -> None:
    """With server, bus, agent and launcher as a user has them."""
    path = script(tmp_path, SCRIPT)
    body = {"script": path, "args": [str(tmp_path)], "nproc": 2, "max_restarts": 1}
    run = str(stack.api("POST", "/runs", body)["id"])
    with Following(stack.url, run) as seen:
        until(lambda: seen.out.count("sesame-4711") == 2, "the first attempt", 120)
        (tmp_path / "0").touch()
        until(lambda: seen.out.count("sesame-4711") == 4, "the second attempt", 120)
        (tmp_path / "1").touch()
        assert seen.ends() == 0, seen.err
    for attempt in (0, 1):
        for rank in (0, 1):
            assert f"[rank {rank}] attempt {attempt} of rank {rank}\n" in seen.out
    assert seen.out.count("[rank 0] attempt 1 ends\n") == 1
    assert "[rank 1] attempt 0 ends\n" in seen.out
    for file in (stack.data / "bus").rglob("*"):
        if file.is_file():
            assert b"sesame-4711" not in file.read_bytes(), file


@pytest.mark.ranks
def test_a_run_in_the_foreground_beside_an_agent(stack: Stack, tmp_path: Path) -> None:
    """The agent uses the same data directory, as it does where nobody has chosen another."""
    where = ("--server", stack.url, "--data", str(stack.data))
    path = script(tmp_path, SCRIPT)
    foreground = paceline("run", *where, "--nproc", "2", path, str(tmp_path))
    try:
        run = until(lambda: [run["id"] for run in stack.api("GET", "/runs")["items"]], "it")[0]
        with Following(stack.url, run, "--rank", "1") as seen:
            until(lambda: "attempt 0 of rank 1\n" in seen.out, "what rank 1 prints", 120)
            (tmp_path / "0").touch()
            assert seen.ends() == 0
        assert foreground.wait(60) == 7
    finally:
        foreground.kill()
        foreground.communicate()
