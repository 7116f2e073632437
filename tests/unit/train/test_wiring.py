"""A rank's parts: what becomes of those that run when a later one cannot be made."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from torch.distributed import HashStore

from paceline.core.terms import Terms
from paceline.node.spool import drain
from paceline.train import wiring
from paceline.train.checkpoint.position import Position
from paceline.train.environment import Environment
from paceline.train.meeting import Meeting
from paceline.train.parts import Step
from paceline.wire import MOST_WHY, Fallback, Message, decode

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
    meeting = Meeting(0, 1, HashStore(), 0, np.ones(4))
    environment = Environment(run="r1", bus=NOBODY, spool=tmp_path)
    with pytest.raises(ValueError, match="no leader"):
        wiring.connect(terms, meeting, environment, Position(), [], lambda: 0, None)
    assert started == {"paceline-telemetry", "paceline-control"}
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize(("rank", "run"), [(0, "r1"), (1, "r1"), (0, None)])
def test_rank_0_reports_fallbacks_in_a_run_and_cuts_their_reason(
    tmp_path: Path, rank: int, run: str | None
) -> None:
    terms = Terms(4, 2, 0, False, "samples", 2)
    sizes = np.ones(4) if rank == 0 else None
    meeting = Meeting(rank, 2, HashStore(), 0, sizes)
    environment = Environment(run=run, bus=None, spool=tmp_path)
    wired = wiring.connect(terms, meeting, environment, Position(), [], lambda: 0, None)
    assert (wired.on_fallback is not None) == (rank == 0 and run is not None)
    if wired.on_fallback is not None:
        step = Step(0, 40, 3, [1], 1.0, 1.0, 1.0, 1.0, None, 0)
        wired.on_fallback(step, "x" * (MOST_WHY + 1))
    wired.exit_stack.close()
    messages: list[Message] = []
    drain(tmp_path, lambda fields: messages.append(decode(fields)[1]), include_open=True)
    reported = wired.on_fallback is not None
    assert messages == ([Fallback(0, 3, "x" * MOST_WHY)] if reported else [])
