"""A rank's parts: what becomes of those that run when a later one cannot be made."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from torch.distributed import HashStore

from paceline.core.terms import Terms
from paceline.train import wiring
from paceline.train.checkpoint import Position
from paceline.train.environment import Environment
from paceline.train.meeting import Meeting

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
