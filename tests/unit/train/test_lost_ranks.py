"""The search for the rank because of which a collective failed: signs that else may be harmless."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from torch.distributed import HashStore

from paceline.core.rank_progress import RankProgress
from paceline.train.features import lost_ranks
from paceline.train.features.lost_ranks import RankMonitor

FAILURE = "rank-monitor/failure"


class Searching:
    """Rank 0's monitor of two ranks, after a failed collective; its thread does not run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.alive = 1_000.0, True
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr(lost_ranks, "time", clock)
        monkeypatch.setattr(lost_ranks, "_is_alive", lambda process: process != 7 or self.alive)
        state: Any = SimpleNamespace(
            startup=SimpleNamespace(rank=0, world=2), activity=lambda: (5, "sync")
        )
        self.store: Any = HashStore()
        self.monitor = RankMonitor(state)
        self.monitor._progress.step, self.monitor._progress.in_loop = 5, True
        self.monitor._explaining = True

    def other(self, **fields: Any) -> RankProgress:
        """Rank 1, on another machine unless `place` is given."""
        values = {"step": 5, "in_loop": True, "phase": "compute", "place": "elsewhere"} | fields
        return RankProgress(**values)

    def compare(self, other: RankProgress) -> str | None:
        """Let rank 1 publish, and rank 0 compare; what it found."""
        self.store.set("rank-monitor/rank/1", msgspec.msgpack.encode(other))
        self.monitor._publish(self.store)
        self.monitor._compare(self.store)
        return self.store.get(FAILURE).decode() if self.store.check([FAILURE]) else None


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Searching:
    return Searching(monkeypatch)


@pytest.mark.parametrize(
    ("raised", "words"), [(True, "an error ended its loop"), (False, "it left its loop")]
)
def test_a_rank_that_left_its_loop_is_named(search: Searching, raised: bool, words: str) -> None:
    other = search.other()
    other.leave(raised)
    other.in_loop = False
    assert search.compare(other) == f"rank 1 failed: {words} in step 5"


def test_a_rank_that_closed_its_session_and_ended_is_named(search: Searching) -> None:
    own = search.monitor._progress
    other = search.other(in_loop=False, closed=True, place=own.place, process=7)
    assert search.compare(other) is None, "its process runs"
    search.alive, other.beat = False, 1
    assert search.compare(other) == (
        "rank 1 has ended before the others: rank 1 has closed its session after step 5"
    )


def test_a_silent_rank_is_named(search: Searching) -> None:
    other = search.other()
    assert search.compare(other) is None
    search.now += 3.5
    other.beat += 1
    assert search.compare(other) is None, "it has published"
    search.now += 3.9
    assert search.compare(other) is None
    search.now += 0.2
    assert search.compare(other) == (
        "rank 1 failed: no heartbeat for 4 s, so its process or its node is gone; last seen: "
        "rank 1 is in step 5 (compute)"
    )


def test_signs_count_only_after_a_collective_failed(search: Searching) -> None:
    search.monitor._explaining = False
    other = search.other()
    assert search.compare(other) is None
    search.now += 60
    other.leave(True)
    other.in_loop = False
    assert search.compare(other) is None
    search.monitor._explaining = True
    assert search.compare(other) is not None
