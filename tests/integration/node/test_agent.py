"""`paceline agent` as a process of its own, real ranks below it, a real bus above."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import redis

from paceline import wire
from paceline.node import spool
from paceline.node.delivery import Delivery, is_supervised
from paceline.node.link import Link
from paceline.node.rundir import Record
from paceline.node.session import without
from paceline.wire import Kill, Launch, NodeState, RunState, State
from paceline.wire.bus import publish
from paceline_backend.server.embedded import EmbeddedBus
from support.disks import SmallDisk
from support.node import (
    SLEEP,
    family,
    link_to,
    nodes,
    paceline,
    ranks,
    script,
    states,
    telemetry,
    wait_gone,
)
from support.waiting import DEADLINE_S, until

StartAgent = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[StartAgent]:
    """Starts agents of node "here"; kills those still running at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(bus_url: str, data: Path = tmp_path / "data", *options: str) -> subprocess.Popen[str]:
        arguments = ("--bus", bus_url, "--node", "here", "--data", str(data), *options)
        process = paceline("agent", *arguments)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def registered(bus_url: str, process: subprocess.Popen[str]) -> NodeState:
    def newest() -> NodeState | None:
        assert process.poll() is None, process.communicate()
        known = nodes(bus_url)
        return known[-1] if known else None

    newest_state = until(newest, "the agent to register")
    assert newest_state is not None
    return newest_state


def tell(bus_url: str, run: str, command: Launch | Kill) -> None:
    with redis.Redis.from_url(bus_url) as bus:
        publish(bus, wire.commands("here"), command, run)


def reported(bus_url: str, run: str, state: str) -> RunState:
    """The run's report of a state, once there."""

    def reported_state() -> RunState | None:
        return next((s for s in states(bus_url, run) if s.state == state), None)

    report = until(reported_state, f"run {run} to be {state}; it was {states(bus_url, run)}")
    assert report is not None
    return report


def ranks_below(process: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """All processes below an agent, once it has so many ranks."""
    until(lambda: len(ranks(family(process.pid))) == count, f"{count} ranks")
    return family(process.pid)


def test_registers_beats_is_alone_and_says_goodbye(bus_url: str, agent: StartAgent) -> None:
    process = agent(bus_url)
    first = registered(bus_url, process)
    assert (first.node, first.runs, first.left) == ("here", [], False)
    assert first.cores == len(os.sched_getaffinity(0))
    assert first.memory_bytes == psutil.virtual_memory().total
    second = agent(bus_url)
    assert second.wait(DEADLINE_S) == 3
    _, err = second.communicate()
    assert "another agent uses the data directory" in err
    until(lambda: len(nodes(bus_url)) >= 2, "a heartbeat")
    assert nodes(bus_url)[1].at > first.at
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 0
    assert nodes(bus_url)[-1].left


@pytest.mark.ranks
def test_leaves_in_order_when_the_provider_takes_the_machine_back(
    bus_url: str, agent: StartAgent, tmp_path: Path
) -> None:
    """A file server stands for the metadata service: the notice is there once its file is."""
    (tmp_path / "metadata").mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "metadata"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as service:
        threading.Thread(target=service.serve_forever).start()
        address = f"http://127.0.0.1:{service.server_port}/notice"
        process = agent(bus_url, tmp_path / "data", "--notice", address)
        registered(bus_url, process)
        tell(bus_url, "r", Launch(script(tmp_path, SLEEP), [], 2, {}))
        reported(bus_url, "r", "running")
        everyone = ranks_below(process, 2)
        (tmp_path / "metadata" / "notice").write_text("terminate at noon")
        assert process.wait(DEADLINE_S) == 0
        service.shutdown()
    wait_gone(everyone)
    stopped = reported(bus_url, "r", "stopped")
    assert stopped.message == "the provider reclaims here: terminate at noon"
    assert nodes(bus_url)[-1].left


@pytest.mark.ranks
def test_runs_side_by_side_one_killed(bus_url: str, agent: StartAgent, tmp_path: Path) -> None:
    process = agent(bus_url)
    registered(bus_url, process)
    tell(bus_url, "long", Launch(script(tmp_path, SLEEP), [], 2, {}))
    text = "import os; print(os.environ['PACELINE_RUN'], os.environ['A'], os.getcwd())"
    short = Launch(Path(script(tmp_path, text, "short.py")).name, [], 1, {"A": "b"}, str(tmp_path))
    tell(bus_url, "short", short)
    tell(bus_url, "missing", Launch(str(tmp_path / "nowhere.py"), [], 1, {}))
    assert "there is no file" in str(reported(bus_url, "missing", "failed").message)
    assert reported(bus_url, "short", "finished").exit_code == 0
    log = tmp_path / "data" / "runs" / "short" / "logs" / "attempt_0" / "0" / "stdout.log"
    assert log.read_text() == f"short b {tmp_path}\n"

    reported(bus_url, "long", "running")
    until(lambda: nodes(bus_url)[-1].runs == ["long"], "a heartbeat that names the run")
    everyone = ranks_below(process, 2)
    tell(bus_url, "another", Kill("not ours", 0))
    tell(bus_url, "long", Kill("an operator asked", 0))
    stopped = reported(bus_url, "long", "stopped")
    assert stopped.message == "an operator asked"
    wait_gone(everyone)
    assert [s.state for s in states(bus_url, "long")] == ["starting", "running", "stopped"]


@pytest.mark.ranks
def test_bad_input_harms_nobody_else(bus_url: str, agent: StartAgent, tmp_path: Path) -> None:
    odd = tmp_path / "data" / "runs"
    (odd / "unreadable" / "run.json").mkdir(parents=True)
    (odd / "a-file").touch()
    process = agent(bus_url)
    registered(bus_url, process)
    path = script(tmp_path, "")
    tell(bus_url, "name", Launch(path, [], 1, {"A=B": "x"}))
    assert "'A=B' is not a valid variable name" in str(reported(bus_url, "name", "failed").message)
    tell(bus_url, "nul", Launch(path, ["\0"], 1, {}))
    assert "NUL" in str(reported(bus_url, "nul", "failed").message)
    tell(bus_url, "../../x", Launch(path, [], 1, {}))
    assert "an id has letters" in str(reported(bus_url, "../../x", "failed").message)
    assert not (tmp_path / "x").exists()
    tell(bus_url, "good", Launch(path, [], 1, {}))
    assert reported(bus_url, "good", "finished").exit_code == 0
    process.terminate()
    _, err = process.communicate(timeout=DEADLINE_S)
    assert err.count("cannot deliver the remaining reports of run unreadable") == 1
    assert "a-file" not in err


def test_unreadable_spool_does_not_silence_a_run(
    bus_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> bytes:  # root may read whatever the mode says
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(spool, "_read", read)
    (tmp_path / "r" / "spool").mkdir(parents=True)
    (tmp_path / "r" / "spool" / "1.rank0.spool").touch()
    (tmp_path / "r" / "spool" / "rank0.dropped").write_text("")
    with link_to(bus_url) as link:
        delivery = Delivery(tmp_path / "r", Record("r", "here", "the agent", ""), link)
        delivery.report(State.FINISHED, exit_code=0)
        assert [state.state for state in states(bus_url, "r")] == ["finished"]
        assert not delivery.settled, "what is spooled may still be mended"
        delivery.close()


def test_who_takes_over_a_run_that_goes_on_reports_its_newest_attempt(
    bus_url: str, tmp_path: Path
) -> None:
    """An earlier attempt's end would not count any more."""
    with Link(without("id", bus_url, "here")) as link:
        delivery = Delivery(tmp_path / "r", Record("r", "here", "the agent", "id"), link)
        delivery.report(State.RUNNING, 3)
        assert is_supervised(tmp_path / "r")
        delivery.close()
        assert not is_supervised(tmp_path / "r")
        taken = Delivery.resume(tmp_path / "r", link)
        assert taken is not None
        taken.close()
    last = states(bus_url, "r")[-1]
    assert (last.state, last.attempt, last.message) == ("failed", 3, "the agent was killed")


@pytest.mark.ranks
def test_stopped_agent_stops_its_runs(bus_url: str, agent: StartAgent, tmp_path: Path) -> None:
    process = agent(bus_url)
    registered(bus_url, process)
    tell(bus_url, "r", Launch(script(tmp_path, SLEEP), [], 2, {}))
    everyone = ranks_below(process, 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    wait_gone(everyone)
    assert states(bus_url, "r")[-1].message == "the agent was stopped"
    last = telemetry(bus_url)[-1][1]
    assert isinstance(last, NodeState)
    assert last.left


@pytest.mark.ranks
def test_killed_agent_leaves_no_process_and_the_next_one_tells(
    bus_url: str, agent: StartAgent, tmp_path: Path
) -> None:
    text = """
        import os, time
        from pathlib import Path
        from paceline import wire
        from paceline.node import spool
        where = Path(os.environ["PACELINE_SPOOL"])
        left = spool.Spool(where, "rank0", 1 << 20)
        left.append(wire.encode(wire.StepBatch([]), os.environ["PACELINE_RUN"]))
        left.note_dropped(3)
        (where / "ready").touch()
        time.sleep(600)
    """
    process = agent(bus_url)
    registered(bus_url, process)
    tell(bus_url, "r", Launch(script(tmp_path, text), [], 1, {}))
    spool = tmp_path / "data" / "runs" / "r" / "spool"
    until(lambda: (spool / "ready").exists(), "the rank to spool")
    reported(bus_url, "r", "running")
    everyone = ranks_below(process, 1)
    process.kill()
    wait_gone(everyone)

    following = agent(bus_url)
    failed = reported(bus_url, "r", "failed")
    assert failed.message == "the agent was killed"
    assert failed.dropped == 3
    assert ("r", wire.StepBatch([])) in telemetry(bus_url), "the open chunk was delivered"
    assert not list(spool.glob("*.part"))

    # Once is enough, and no old command is obeyed.
    beats = len(nodes(bus_url))
    until(lambda: len(nodes(bus_url)) >= beats + 2, "two heartbeats")
    assert [s.state for s in states(bus_url, "r")].count("failed") == 1
    assert not ranks(family(following.pid))


@pytest.mark.ranks
def test_bus_away(agent: StartAgent, tmp_path: Path) -> None:
    text = """
        import sys, time
        from pathlib import Path
        while not Path(sys.argv[1]).exists():
            time.sleep(0.05)
    """
    with EmbeddedBus(tmp_path / "bus") as bus:
        process = agent(bus.url)
        registered(bus.url, process)
        end = tmp_path / "end"
        tell(bus.url, "r", Launch(script(tmp_path, text), [str(end)], 2, {}))
        reported(bus.url, "r", "running")
        everyone = ranks_below(process, 2)
        bus.kill()
        assert all(p.is_running() for p in everyone)
        end.touch()
        wait_gone(everyone)
        bus.start()
        assert reported(bus.url, "r", "finished").exit_code == 0
        assert [s.state for s in states(bus.url, "r")] == ["starting", "running", "finished"]


def test_a_run_that_goes_on_says_so(
    bus_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it trains nothing yet, validates or writes a checkpoint."""
    now = 1_000.0
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)
    monkeypatch.setattr("paceline.node.delivery.time", clock)
    with link_to(bus_url) as link:
        delivery = Delivery(tmp_path / "r", Record("r", "here", "the agent", ""), link)

        def reported_after(seconds: float) -> list[wire.Message]:
            nonlocal now
            now += seconds
            delivery.pump()
            return [message for run, message in telemetry(bus_url) if run == "r"]

        first = delivery.report(State.STARTING)
        second = delivery.report(State.RUNNING)
        assert reported_after(1.0) == [first, second]
        assert reported_after(3.0) == [first, second, second], "a sign of life"
        assert reported_after(3.0) == [first, second, second, second]
        last = delivery.report(State.FINISHED, exit_code=0)
        assert delivery.settled
        assert reported_after(60.0) == [first, second, second, second, last]
        delivery.close()


@pytest.mark.ranks
def test_a_run_ends_on_a_full_disk_as_it_ended(
    bus_url: str, agent: StartAgent, tmp_path: Path, small_disk: SmallDisk
) -> None:
    """Neither launcher nor agent can write down how; its script writes nothing."""
    process = agent(bus_url, small_disk.path)
    registered(bus_url, process)
    text = (
        "import pathlib, sys, time\n"
        "while not pathlib.Path(sys.argv[1]).exists():\n"
        "    time.sleep(0.05)\n"
    )
    go = tmp_path / "go"
    tell(bus_url, "r", Launch(script(tmp_path, text), [str(go)], 1, {}))
    reported(bus_url, "r", "running")
    small_disk.fill()
    go.touch()
    assert reported(bus_url, "r", "finished").exit_code == 0
    small_disk.empty()
    record = small_disk.path / "runs" / "r" / "run.json"
    until(lambda: b'"settled":true' in record.read_bytes(), "the agent to keep how it ended")
    assert [s.state for s in states(bus_url, "r")] == ["starting", "running", "finished"]


@pytest.mark.ranks
def test_a_run_goes_on_with_further_attempts(
    bus_url: str, agent: StartAgent, tmp_path: Path
) -> None:
    """Each launch counts on, and the logs of the attempts before stay."""
    process = agent(bus_url)
    registered(bus_url, process)
    text = """
import os, sys
given = [os.environ[name] for name in ("PACELINE_FIRST_ATTEMPT", "TORCHELASTIC_RESTART_COUNT")]
print(*given, os.environ["PACELINE_CHECKPOINTS"])
sys.exit(given == ["2", "0"])
"""
    launch = Launch(script(tmp_path, text), [], 1, {}, max_restarts=1)
    tell(bus_url, "r", launch)
    assert reported(bus_url, "r", "finished").attempt == 0
    tell(bus_url, "r", msgspec.structs.replace(launch, attempt=2))

    def again() -> bool:
        return [s.attempt for s in states(bus_url, "r") if s.state == "finished"] == [0, 3]

    until(again, f"attempts 2 and 3; there were {states(bus_url, 'r')}")
    logs = tmp_path / "data" / "runs" / "r" / "logs"
    checkpoints = tmp_path / "data" / "runs" / "r" / "checkpoints"
    assert {log.parts[-3]: log.read_text() for log in logs.glob("*/0/stdout.log")} == {
        "attempt_0": f"0 0 {checkpoints}\n",
        "attempt_2": f"2 0 {checkpoints}\n",
        "attempt_3": f"2 1 {checkpoints}\n",
    }
    tell(bus_url, "r", Launch(str(tmp_path / "nowhere.py"), [], 1, {}, attempt=4))
    assert reported(bus_url, "r", "failed").attempt == 4


@pytest.mark.ranks
def test_a_run_that_goes_on_is_not_launched_again_and_obeys_no_order_of_before(
    bus_url: str, agent: StartAgent, tmp_path: Path
) -> None:
    """On a bus without users, whoever read an order may send it once more.

    A run is resumed while its processes run where the bus was away and it was taken for lost.
    """
    registered(bus_url, agent(bus_url))
    launch = Launch(script(tmp_path, SLEEP), [], 1, {}, attempt=2)
    tell(bus_url, "r", launch)
    reported(bus_url, "r", "running")
    tell(bus_url, "r", launch)
    tell(bus_url, "r", msgspec.structs.replace(launch, attempt=3))
    failed = reported(bus_url, "r", "failed")
    assert (failed.attempt, failed.node) == (3, "here")
    assert "its earlier processes still run on here" in str(failed.message)
    assert [state.attempt for state in states(bus_url, "r") if state.state == "failed"] == [3]
    tell(bus_url, "r", Kill("again", 0))
    tell(bus_url, "r", Kill("now", 2))
    stopped = reported(bus_url, "r", "stopped")
    assert (stopped.message, stopped.attempt) == ("now", 2)
