"""Ranks that are out of step are named on all ranks, with the step; no reduction mixes two steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support import lockstep
from support.ranks import RankError, Ranks


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.stop()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("skips", "it made no backward pass in step 5, but rank {other} did"),
        ("sums and skips", "it made no backward pass in step 5, but rank {other} did"),
        ("zero", "it made no backward pass in step 5, but rank {other} did"),
        ("twice", "it made 2 backward passes in step 5, but rank {other} made 1"),
        ("raises", "an error ended its loop in step 5"),
        ("breaks", "it left its loop in step 5, but rank {other} continued to step 6"),
        ("stops", "it closed its session after epoch 0, but rank {other} continued to epoch 1"),
    ],
)
def test_a_rank_out_of_step_is_named_on_all(
    kind: str, words: str, rank: int, pair: Ranks, tmp_path: Path
) -> None:
    said = pair.run(lockstep.trained, kind, rank, f"file://{tmp_path}/meet")
    expected = f"rank {rank} is out of step: {words.format(other=1 - rank)}"
    assert expected in said[1 - rank]
    own = {"raises": "no such thing", "breaks": f"rank {rank} is done"}
    assert own.get(kind, f"rank {rank} is done" if kind == "stops" else expected) in said[rank]


@pytest.mark.parametrize(
    "kind", ["all skip", "accumulates", "two models", "sometimes two", "all break"]
)
def test_an_unusual_rhythm_of_all_ranks_is_in_step(kind: str, pair: Ranks) -> None:
    (first, step), (second, same) = pair.run(lockstep.regular, kind)
    assert torch.equal(first, second)
    assert step == same


def test_a_killed_rank_is_named() -> None:
    pool = Ranks(2)
    with pytest.raises(RankError, match="rank 1 failed: its process has ended") as caught:
        pool.run(lockstep.killed, 1, timeout_s=20)
    pool.stop()
    assert "rank 1: died" in str(caught.value)
