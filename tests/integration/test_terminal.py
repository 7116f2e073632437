"""Progress and overview in a real terminal, of a real server."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from paceline.commands import runs
from paceline.wire import StepBatch
from paceline_backend.store import Store, nodes, telemetry
from support.command_line import Main
from support.node import _MAIN, paceline, script
from support.records import add_run, hello, record
from support.shown import slow_rank
from support.terminal import in_terminal
from support.waiting import DEADLINE_S, until
from support.web import ADMIN, serving

PACELINE = [sys.executable, "-c", _MAIN]


@pytest.fixture
def server(store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 3600)  # the machine may be busy
    with serving(store, bus_url) as client:
        yield client


def url(server: httpx.Client) -> str:
    return str(server.base_url).rstrip("/")


WAITS = """
    import pathlib, sys, time
    print("begin", flush=True)
    pathlib.Path(sys.argv[1] + ".begun").touch()
    print("half a ", end="", flush=True)
    while not pathlib.Path(sys.argv[1]).exists():
        time.sleep(0.05)
    print("line", flush=True)
"""


def trained(store: Store, run: str) -> None:
    """Tells of 20 steps of a run."""
    rows = [
        record(
            step,
            rank,
            compute_s=0.1 * (1 + 2 * rank),
            sync_s=0.02 + 0.2 * (1 - rank),
            step_s=0.34,
            ended_at=1_000.0 + 0.34 * step,
        )
        for step in range(20)
        for rank in (0, 1)
    ]
    begun = hello(global_batch=8, epochs=10)
    telemetry.write(store, [(run, begun), (run, StepBatch(rows))])


def the_run(server: httpx.Client) -> str:
    items = until(lambda: server.get("/api/v1/runs").json()["items"], "the run")
    return str(items[0]["id"])


@pytest.mark.ranks
def test_run_shows_its_progress_below_the_scripts_lines(
    store: Store, server: httpx.Client, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    options = ["run", "--server", url(server), "--data", str(tmp_path / "data")]
    command = [*PACELINE, *options, "--nproc", "2", script(tmp_path, WAITS), str(go)]
    with in_terminal(command) as session:
        session.wait_for("half a")
        trained(store, the_run(server))
        session.wait_for("step 20 of 40")
        visible = session.screen.visible
        assert "epoch 5/10" in visible and "loss 2" in visible and "ETA" in visible
        session.wait_for("Slowed down: rank 1 computes")
        go.touch()
        assert session.end() == 0, session.screen.text
    text = session.screen.text
    assert re.search(r"^begin\nhalf a line$", text, re.MULTILINE), text
    assert "step 20 of" not in text, "the progress goes when the run is over"
    assert not session.screen.hidden


@pytest.mark.ranks
def test_run_without_a_terminal_says_it_in_plain_lines(
    store: Store, server: httpx.Client, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    options = ["run", "--server", url(server), "--data", str(tmp_path / "data"), "--nproc", "2"]
    process = paceline(*options, script(tmp_path, WAITS), str(go))
    try:
        # A run that has reported would get no credentials any more.
        until(Path(f"{go}.begun").exists, "the script has begun")
        trained(store, the_run(server))
        said = ""
        assert process.stderr is not None
        while "Slowed down: rank 1 computes" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        go.touch()
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    assert out == "begin\nhalf a line\n"
    assert "paceline: epoch 5/10, step 20 of 40, 340 ms per step, loss 2" in said
    assert "\x1b" not in said + err and "\r" not in said + err


def test_watch_redraws_the_list_in_place(store: Store, server: httpx.Client) -> None:
    slow_rank(store)
    with in_terminal([*PACELINE, "runs", "--watch", "--server", url(server)]) as session:
        session.wait_for("3f9a1c07be52")
        add_run(store, "f" * 12, name="newcomer", state="queued")
        session.wait_for("newcomer")
        assert session.screen.visible.count("3f9a1c07be52") == 1
        session.process.send_signal(signal.SIGINT)
        assert session.end() == 128 + signal.SIGINT


def test_watch_continues_while_the_server_is_away(store: Store, bus_url: str) -> None:
    slow_rank(store)
    with ExitStack() as stack:
        with serving(store, bus_url, token=ADMIN) as server:
            command = [*PACELINE, "runs", "--watch", "--server", url(server), "--token", ADMIN]
            session = stack.enter_context(in_terminal(command))
            session.wait_for("3f9a1c07be52")
        session.wait_for("no server answers")
        assert session.screen.visible.count("3f9a1c07be52") == 1
        session.process.send_signal(signal.SIGINT)
        assert session.end() == 128 + signal.SIGINT


def test_watch_without_a_terminal_prints_tables(
    store: Store, server: httpx.Client, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_rank(store)

    def sleep(_: float) -> None:
        if server.get("/api/v1/runs/ffffffffffff").is_success:
            raise KeyboardInterrupt
        add_run(store, "f" * 12, name="newcomer", state="queued")

    monkeypatch.setattr(runs, "time", SimpleNamespace(sleep=sleep))
    command = ["runs", "--watch", "--server", url(server)]
    code, out, err = main(*command)
    assert (code, err) == (128 + signal.SIGINT, "")
    assert (out.count("3f9a1c07be52"), out.count("newcomer")) == (2, 1)
    assert "\x1b" not in out
    code, out, _ = main(*command, "--json")
    [page] = map(json.loads, out.splitlines())
    assert [run["name"] for run in page["items"]] == ["newcomer", "train"]


def test_watch_ends_if_the_server_refuses(server: httpx.Client, main: Main) -> None:
    code, _, err = main("runs", "--watch", "--server", url(server), "--token", "wrong")
    assert code != 0 and "requires a token" in err
