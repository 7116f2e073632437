"""A rank's parts: what becomes of those that run when a later one cannot be made."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from torch.distributed import HashStore

from paceline.core.terms import Terms
from paceline.node import rundir
from paceline.node.spool import drain
from paceline.train import wiring
from paceline.train.checkpoint.position import Position
from paceline.train.context import RunContext
from paceline.train.device import Device
from paceline.train.environment import Environment
from paceline.train.epochs import EpochSteps
from paceline.train.plan_shard import LocalStep
from paceline.train.profile import Limits
from paceline.train.startup import Startup
from paceline.wire import MOST_WHY, Fallback, Message, Phase, decode

NOBODY = "redis://127.0.0.1:9"  # the discard port: nothing answers


def test_no_thread_stays_where_the_leader_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = set(threading.enumerate())
    started: set[str] = set()

    def refuse(*_: object, **__: object) -> None:
        started.update(thread.name for thread in set(threading.enumerate()) - before)
        raise ValueError("no leader")

    monkeypatch.setattr(wiring, "Leader", refuse)
    terms = Terms(4, 2, 0, False, "samples", 2)
    startup = Startup(0, 1, HashStore(), 0, np.ones(4))
    environment = Environment(run="r1", bus=NOBODY, spool=tmp_path)
    device, epoch_steps = Device(None, 0, 1), EpochSteps(terms)
    context = RunContext(terms, environment, device, Limits([]), epoch_steps)
    with pytest.raises(ValueError, match="no leader"):
        wiring.connect(context, startup, Position(), lambda: (0, Phase.DATA), bool, None)
    assert started == {"paceline-telemetry", "paceline-control"}
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize(("rank", "run"), [(0, "r1"), (1, "r1"), (0, None)])
def test_rank_0_reports_fallbacks_in_a_run_and_cuts_their_reason(
    tmp_path: Path, rank: int, run: str | None
) -> None:
    terms = Terms(4, 2, 0, False, "samples", 2)
    sizes = np.ones(4) if rank == 0 else None
    startup = Startup(rank, 2, HashStore(), 0, sizes)
    environment = Environment(run=run, bus=None, spool=tmp_path)
    device, epoch_steps = Device(None, rank, 2), EpochSteps(terms)
    context = RunContext(terms, environment, device, Limits([]), epoch_steps)
    wired = wiring.connect(context, startup, Position(), lambda: (0, Phase.DATA), bool, None)
    assert (wired.on_fallback is not None) == (rank == 0 and run is not None)
    if wired.on_fallback is not None:
        step = LocalStep(0, 40, 3, [1], 1.0, 1.0, 1.0, 1.0, None, 0)
        wired.on_fallback(step, "x" * (MOST_WHY + 1))
    wired.exit_stack.close()
    messages: list[Message] = []
    drain(tmp_path, lambda fields: messages.append(decode(fields)[1]), include_open=True)
    reported = wired.on_fallback is not None
    assert messages == ([Fallback(0, 3, "x" * MOST_WHY)] if reported else [])


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (Environment(), None),
        (Environment(max_restarts=1), "so a restart begins at step 0 again"),
        (Environment(run="r"), "as does `paceline resume`"),
        (Environment(run="r", attempt=2), "so attempt 2 begins at step 0 again"),
    ],
)
def test_a_script_without_checkpoints_is_told_what_a_restart_costs(
    environment: Environment, says: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    at_six = Position(0, 6, np.arange(3))
    for start, rank, saves in [(Position(), 1, False), (Position(), 0, True), (at_six, 0, False)]:
        wiring.warn_of_restarts(environment, start, rank, saves=saves)
    assert not caplog.records, "another rank; it saves; it has loaded a state"
    wiring.warn_of_restarts(environment, Position(), 0, saves=False)
    assert [says in record.getMessage() for record in caplog.records if says] == [True] * bool(says)


def test_a_script_on_a_stream_is_not_told_to_declare_checkpoints(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wiring.warn_of_restarts(Environment(run="r"), Position(), 0, saves=False, streams=True)
    assert "save session.state_dict()" in caplog.text
    assert "session.checkpoint does not support a stream" in caplog.text


@pytest.mark.parametrize(
    ("variables", "warns"),
    [
        ({}, False),
        ({"PACELINE_SERVER": "http://head:8000"}, True),
        ({"PACELINE_SERVER": "http://head:8000", "PACELINE_RUN": "r"}, False),
    ],
)
def test_a_training_that_the_server_does_not_know_of_says_so(
    variables: dict[str, str], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A launcher of others hands the variable on, ours does not."""
    Environment.read(variables).warn_unknown()
    assert ["`paceline node`" in record.getMessage() for record in caplog.records] == [True] * warns


def test_epochs_are_reported_only_without_a_control_plane() -> None:
    here = {"PACELINE_DATA": "/data"}
    assert Environment.read(here).data == Path("/data")
    assert Environment.read({}).data == rundir.default_data()
    assert Environment.read(here | {"PACELINE_RUN": "ab12"}).data is None
