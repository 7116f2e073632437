"""Ranks out of step are named on all ranks, with the step; no reduction mixes two steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support import lost_ranks, sessions
from support.ranks import RankError, Ranks


@pytest.mark.parametrize(
    ("kind", "rank", "words", "own"),
    [
        ("skips", 0, "it made no backward pass in step 5, but rank 1 did", ""),
        ("skips", 1, "it made no backward pass in step 5, but rank 0 did", ""),
        ("sums and skips", 1, "it made no backward pass in step 5, but rank 0 did", ""),
        ("zero", 1, "it made no backward pass in step 5, but rank 0 did", ""),
        ("twice", 1, "it made 2 backward passes in step 5, but rank 0 made 1", ""),
        ("raises", 1, "an error ended its loop in step 5", "no such thing"),
        ("breaks", 0, "it left its loop in step 5, but rank 1 continued to step 6", ""),
        ("breaks", 1, "it left its loop in step 5, but rank 0 continued to step 6", ""),
        (
            "stops",
            0,
            "it ended or closed its session, and with it the ranks' key-value store, while rank 1",
            "done",
        ),
        (
            "stops",
            1,
            "it closed its session after epoch 0, but rank 0 continued to epoch 1",
            "done",
        ),
    ],
)
def test_a_rank_out_of_step_is_named_on_all(
    kind: str, rank: int, words: str, own: str, tmp_path: Path
) -> None:
    pool = Ranks(2)
    with pytest.raises(RankError):
        pool.run(lost_ranks.trained, kind, rank, tmp_path)
    pool.stop()
    said = [(tmp_path / str(each)).read_text() for each in range(2)]
    expected = f"rank {rank} is out of step: {words}"
    assert expected in said[1 - rank]
    assert (own or expected) in said[rank]


@pytest.mark.parametrize(
    "kind", ["all skip", "accumulates", "two models", "sometimes two", "all break"]
)
def test_an_unusual_rhythm_of_all_ranks_is_in_step(kind: str, ranks: Ranks) -> None:
    (first, step), (second, same) = ranks.run(lost_ranks.regular, kind)
    assert torch.equal(first, second)
    assert step == same


def test_a_killed_rank_is_named() -> None:
    pool = Ranks(2)
    with pytest.raises(RankError, match="rank 1 failed: its process has ended") as caught:
        pool.run(sessions.killed, 1, timeout_s=20)
    pool.stop()
    assert "rank 1: died" in str(caught.value)


def test_batches_of_two_sessions_with_different_weights_are_refused(ranks: Ranks) -> None:
    for said in ranks.run(lost_ranks.two_sessions, False, (6, 8)):
        assert "the session of Sized (global_batch=8)" in said
        assert "the session of Sized (global_batch=6) has wrapped" in said
    assert ranks.run(lost_ranks.two_sessions, False, (8, 8)) == ["trained", "trained"]
    assert ranks.run(lost_ranks.two_sessions, True, (6, 8)) == ["trained", "trained"]


def test_a_gather_of_uneven_parts_is_an_error_on_all_ranks(ranks: Ranks) -> None:
    for kind, name in {
        "all_gather": "all_gather",
        "differentiable": "all_gather",
        "into_tensor": "all_gather_into_tensor",
        "reduce_scatter": "reduce_scatter",
    }.items():
        for said in ranks.run(lost_ranks.gathers, kind, [2, 6]):
            assert said.startswith(f"PacelineError: {name} in step 0: the ranks' tensors have")
            assert "(2, 1) on rank 0, (6, 1) on rank 1" in said
        if kind != "reduce_scatter":  # gloo has none
            assert ranks.run(lost_ranks.gathers, kind, [4, 4]) == ["trained", "trained"]
    assert ranks.run(lost_ranks.gathers, "numbers", [2, 6]) == ["trained", "trained"]
