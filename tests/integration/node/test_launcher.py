"""Real TorchElastic launchers and ranks under a supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from paceline.node import logs, rundir
from paceline.node import supervisor as supervising
from paceline.node.rundir import Record
from paceline.node.supervisor import Supervisor
from paceline.wire import Launch
from support.node import SLEEP, command, family, link_to, ranks, script, states, wait_gone
from support.waiting import until

Train = Callable[..., Supervisor]


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Train]:
    """Starts a script's text under a supervisor, which is closed at the end."""
    started: list[Supervisor] = []
    links = contextlib.ExitStack()

    def start(text: str, nproc: int, *, bus_url: str | None = None, **more: object) -> Supervisor:
        env = {"GIVEN": "yes", **more.pop("env", {})}
        launch = Launch(script(tmp_path, text), ["--x", "1"], nproc, env, **more)
        link = links.enter_context(link_to(bus_url)) if bus_url else None
        record = Record(f"r{len(started)}", "here", "the test", "")
        supervisor = Supervisor(launch, tmp_path, record, link)
        started.append(supervisor)
        supervisor.start()
        return supervisor

    yield start
    for supervisor in started:
        supervisor.close()
    links.close()


def finish(supervisor: Supervisor) -> None:
    def settled() -> bool:
        supervisor.poll()
        return supervisor.settled

    until(settled, "the run to settle")


def running(supervisor: Supervisor, nproc: int, attempt: int = 0) -> dict[int, psutil.Process]:
    """The ranks, once all of them have written a line."""

    def all_there() -> bool:
        supervisor.poll()
        logs = [rundir.rank_log(supervisor.directory, attempt, r, "stdout") for r in range(nproc)]
        return all(log.exists() and log.stat().st_size for log in logs)

    until(all_there, f"{nproc} ranks to run")
    by_rank = ranks(family(os.getpid()))
    assert sorted(by_rank) == list(range(nproc))
    return by_rank


def processes(supervisor: Supervisor) -> list[psutil.Process]:
    mark = str(supervisor.directory.parents[1])
    return [p for p in family(os.getpid()) if any(a.startswith(mark) for a in command(p))]


def output(supervisor: Supervisor, rank: int, stream: str = "stdout", attempt: int = 0) -> str:
    return rundir.rank_log(supervisor.directory, attempt, rank, stream).read_text()


@pytest.mark.ranks
def test_scripts_get_no_secrets_and_an_attempt_is_told_that_was_over_before_anybody_looked(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent with much to do looks seldom."""
    for name in ("TOKEN", "AGENT_TOKEN", "VIEWER_TOKEN", "DATABASE", "CONFIG"):
        monkeypatch.setenv(f"PACELINE_{name}", "a-secret")
    monkeypatch.setenv("PACELINE_SPOOL_BYTES", "12345678")
    text = """
        import os
        print(sorted(os.environ.items()))
        assert os.environ["PACELINE_ATTEMPT"] == "1"
    """
    supervisor = train(text, 1, max_restarts=1)
    wait_gone(processes(supervisor), 60)
    finish(supervisor)
    assert supervisor.last is not None
    assert (supervisor.last.state, supervisor.last.attempt) == ("finished", 1)
    for attempt in (0, 1):
        seen = output(supervisor, 0, attempt=attempt)
        assert "a-secret" not in seen
        assert "12345678" in seen


def failure(supervisor: Supervisor) -> str:
    last = supervisor.last
    assert last is not None
    assert last.state == "failed"
    assert last.message is not None
    return last.message


@pytest.mark.ranks
def test_ranks_reduce_and_finish(train: Train, bus_url: str) -> None:
    text = """
        import os, sys
        import torch
        import torch.distributed as dist
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        print("sum", total.item(), sys.argv[1:], os.environ["GIVEN"], os.environ["LOCAL_RANK"])
        print(os.environ["PACELINE_RUN"], os.environ["PACELINE_BUS"], os.environ["PACELINE_SPOOL"])
        dist.destroy_process_group()
    """
    supervisor = train(text, 3, bus_url=bus_url)
    finish(supervisor)
    assert [(s.state, s.attempt, s.exit_code) for s in states(bus_url, "r0")] == [
        ("starting", 0, None),
        ("running", 0, None),
        ("finished", 0, 0),
    ], output(supervisor, 0, "stderr")
    for rank in range(3):
        first, second = output(supervisor, rank).splitlines()
        assert first == f"sum 6.0 ['--x', '1'] yes {rank}"
        assert second == f"r0 {bus_url} {supervisor.directory / 'spool'}"


def test_a_driver_is_started_once_and_is_no_rank(train: Train) -> None:
    text = """
        import os, sys
        print(sorted(name for name in os.environ if "RANK" in name or "WORLD_SIZE" in name))
        print([name for name in os.environ if name.startswith(("TORCHELASTIC", "MASTER"))])
        print(os.environ["PACELINE_DRIVER"] == str(os.getpid()), os.environ["PACELINE_ATTEMPT"])
        print(os.environ["PACELINE_MAX_RESTARTS"], os.environ["PACELINE_PLACEMENT"])
        sys.exit(7)
    """
    supervisor = train(text, 3, env={"PACELINE_DRIVER": "1"}, max_restarts=2)
    finish(supervisor)
    assert supervisor.last is not None
    assert (supervisor.last.exit_code, supervisor.last.attempt) == (7, 0)  # it is not started anew
    assert (supervisor.last.message or "").startswith("the driver ended with code 7; log: ")
    assert output(supervisor, 0).splitlines() == ["[]", "[]", "True 0", '2 ["here"]']
    assert not rundir.rank_log(supervisor.directory, 0, 1, "stdout").exists()


@pytest.mark.ranks
def test_rank_that_raises_is_named_and_ends_the_others(train: Train, tmp_path: Path) -> None:
    # The others fail too, of the lost connection: they are not to blame.
    now = tmp_path / "now"
    text = f"""
        import os
        import torch
        import torch.distributed as dist
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        print("ready", flush=True)
        while True:
            if dist.get_rank() == 2 and os.path.exists({str(now)!r}):
                raise RuntimeError("bad sample 7\\nsecond line")
            dist.all_reduce(torch.ones(1))
    """
    supervisor = train(text, 3)
    by_rank = running(supervisor, 3)
    now.touch()
    finish(supervisor)
    log = rundir.rank_log(supervisor.directory, 0, 2, "stderr")
    words = "RuntimeError: bad sample 7"
    assert failure(supervisor).splitlines()[0] in (
        f"rank 2 failed: {words} (exit code 1); log: {log}",
        # At times: gloo's threads may outlive the interpreter.
        f"rank 2 was killed by SIGABRT after {words}; log: {log}",
    )
    wait_gone(by_rank.values())


@pytest.mark.ranks
def test_first_to_raise_is_to_blame_even_if_last_to_exit(train: Train) -> None:
    text = """
        import atexit, os, time
        from pathlib import Path
        rank = os.environ["RANK"]
        if rank == "1":
            atexit.register(time.sleep, 0.15)
            raise ValueError("the cause")
        log = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parents[1] / "1" / "stderr.log"
        while "the cause" not in log.read_text():
            time.sleep(0.005)
        time.sleep(0.02)  # times of files are a few milliseconds coarse
        raise RuntimeError("a consequence")
    """
    supervisor = train(text, 2)
    finish(supervisor)
    assert "RuntimeError: a consequence" in output(supervisor, 0, "stderr")
    assert failure(supervisor).startswith("rank 1 failed: ValueError: the cause (exit code 1)")


@pytest.mark.ranks
def test_a_rank_that_aborts_after_it_raised_is_told_by_what_it_raised_and_the_end_of_its_log(
    train: Train, bus_url: str
) -> None:
    text = """
        import atexit, os, sys, time
        if os.environ["RANK"] == "0":
            time.sleep(60)
        atexit.register(os.abort)
        for number in range(1000):
            print("line", number, "of a long log", file=sys.stderr)
        sys.stderr.buffer.write(b"not UTF-8: \\xff, NUL: \\0\\n")
        raise ValueError("no such label")
    """
    supervisor = train(text, 2, bus_url=bus_url)
    finish(supervisor)
    (reports,) = [state.message for state in states(bus_url, "r0") if state.state == "failed"]
    assert reports == failure(supervisor)
    head, *tail = reports.splitlines()
    log = rundir.rank_log(supervisor.directory, 0, 1, "stderr")
    assert head == f"rank 1 was killed by SIGABRT after ValueError: no such label; log: {log}"
    assert supervisor.last is not None
    assert supervisor.last.exit_code == 128 + signal.SIGABRT
    assert "ValueError: no such label" in tail
    assert "line 999 of a long log" in tail
    assert "line 0 of a long log" not in tail
    assert "\0" not in reports
    assert len("\n".join(tail)) <= 2000


@pytest.mark.ranks
def test_killed_rank_is_named_and_ends_the_others(train: Train) -> None:
    text = """
        import subprocess, time
        print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
        time.sleep(600)
    """
    supervisor = train(text, 3)
    by_rank = running(supervisor, 3)
    children = [psutil.Process(int(output(supervisor, rank))) for rank in by_rank]
    by_rank[1].kill()
    finish(supervisor)
    assert failure(supervisor).startswith("rank 1 was killed by SIGKILL; log: ")
    assert supervisor.last is not None
    assert supervisor.last.exit_code == 128 + signal.SIGKILL
    wait_gone([*by_rank.values(), *children])


@pytest.mark.ranks
def test_restart_after_a_failure(train: Train, bus_url: str) -> None:
    # The ranks meet anew, through a store that is not TorchElastic's own.
    text = """
        import os, sys
        import torch
        import torch.distributed as dist
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(1))
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        print("attempt", attempt)
        dist.destroy_process_group()
        if attempt == 0 and os.environ["RANK"] == "1":
            sys.exit(7)
    """
    supervisor = train(text, 2, bus_url=bus_url, max_restarts=1)
    finish(supervisor)
    reported = [(s.state, s.attempt, s.exit_code) for s in states(bus_url, "r0")]
    assert reported[0] == ("starting", 0, None)
    assert reported[-2:] == [("running", 1, None), ("finished", 1, 0)]
    why = [s.message for s in states(bus_url, "r0") if (s.state, s.attempt) == ("running", 1)]
    assert str(why[0]).startswith("rank 1 ended with code 7; log: ")
    for attempt in (0, 1):
        assert output(supervisor, 1, attempt=attempt) == f"attempt {attempt}\n"


@pytest.mark.ranks
def test_nothing_outlives_the_launcher(train: Train) -> None:
    supervisor = train(SLEEP, 2)
    running(supervisor, 2)
    everyone = processes(supervisor)
    assert len(everyone) == 3
    (launcher,) = [p for p in everyone if "paceline.node.elastic.launcher" in p.cmdline()]
    launcher.kill()
    finish(supervisor)
    wait_gone(everyone)
    assert failure(supervisor).startswith("the launcher was killed by SIGKILL")


@pytest.mark.ranks
def test_stop_asks_gives_time_to_save_and_then_kills(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervising, "_KILL_LAUNCHER_AFTER_S", 8.0)
    text = """
        import os, signal, sys, time
        def bye(*_):
            print("bye", flush=True)
            if os.environ["RANK"] == "0":
                time.sleep(6)  # ranks of a failed attempt have 5 s
                print("saved", flush=True)
                sys.exit(0)
        signal.signal(signal.SIGTERM, bye)
        print("up", flush=True)
        while True:
            time.sleep(600)
    """
    supervisor = train(text, 2)
    by_rank = running(supervisor, 2)
    supervisor.stop("enough")
    supervisor.stop("a second time changes nothing")
    finish(supervisor)
    wait_gone(by_rank.values())
    assert output(supervisor, 0) == "up\nbye\nsaved\n"
    assert output(supervisor, 1) == "up\nbye\n", "it was asked first"
    assert supervisor.last is not None
    assert (supervisor.last.state, supervisor.last.message) == ("stopped", "enough")


@pytest.mark.long
@pytest.mark.ranks
def test_a_rank_that_prints_too_much_leaves_a_bounded_log(train: Train) -> None:
    text = """
        import sys
        print("begins")
        for _ in range(300):
            print("x" * 2**20)
        print("ends")
    """
    supervisor = train(text, 1)
    finish(supervisor)
    log = rundir.rank_log(supervisor.directory, 0, 0, "stdout")
    assert log.stat().st_size > 300 << 20
    assert log.stat().st_blocks * 512 <= logs.KEPT_FIRST + 2 * logs.KEPT_LAST
    with log.open("rb") as opened:
        assert opened.readline() == b"begins\n"
        opened.seek(-5, os.SEEK_END)
        assert opened.read() == b"ends\n"
