"""A signal or an operator's stop saves a declared checkpoint before the ranks end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from support import ending
from support.ranks import RankError, Ranks


@pytest.mark.parametrize(
    ("number", "rank", "late"),
    [
        (signal.SIGTERM, 0, False),
        (signal.SIGTERM, 1, True),
        (signal.SIGUSR1, 1, False),
        (None, 0, False),
    ],
)
def test_a_declared_checkpoint_is_saved_and_then_the_scripts_handler_runs(
    number: int | None, rank: int, late: bool, ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks.run(ending.signalled, tmp_path, number, rank, late)
    step = first[0]
    assert 5 <= step == second[0], "all ranks ended after the same step"
    assert first[1] and second[1]
    saved = [path.name for path in tmp_path.iterdir()]
    assert any(name.endswith(str(step + 1)) for name in saved), saved
    seen = (first, second)[rank][2]
    assert seen == ([] if number is None else sorted(saved)), "it was saved before"
    assert (first, second)[1 - rank][2] == []


def test_without_a_handler_the_signal_ends_the_rank_after_the_checkpoint(tmp_path: Path) -> None:
    pool = Ranks(2)
    with pytest.raises(RankError, match="rank 1: died"):
        pool.run(ending.terminated, tmp_path, timeout_s=20)
    pool.stop()
    assert list(tmp_path.iterdir())
