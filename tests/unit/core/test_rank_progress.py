"""Which ranks can never match each other again, by what each has published."""

from __future__ import annotations

import pytest

from paceline.core.rank_progress import (
    KEPT_ENTRIES,
    RankProgress,
    conflict,
    described,
    laggards,
    skips,
)


def progress(
    passes: list[list[int]], *, ended: bool = True, epoch: int = 0, phase: str = "compute"
) -> RankProgress:
    """A rank that has been in these steps, and reduced these models in each of them."""
    made = RankProgress(epoch=epoch, in_loop=True, phase=phase)
    for step, models in enumerate(passes):
        made.step = step
        for model in models:
            made.reduce(step, model)
        if step < len(passes) - 1 or ended:
            made.finished = step
            if not models:
                made.skip(step)
    return made


def words(*of: RankProgress) -> str:
    return conflict(dict(enumerate(of))) or ""


def test_ranks_in_step_have_no_conflict_wherever_they_are() -> None:
    slow, fast = progress([[0], [0]]), progress([[0], [0], [0]], ended=False)
    behind = progress([[0], [0], []], ended=False)
    assert words(slow, fast) == words(fast, slow) == words(fast, behind) == ""
    assert words(progress([[], [0]]), progress([[], [0]])) == ""
    assert words(progress([[0]] * (KEPT_ENTRIES + 9)), progress([[0]] * (KEPT_ENTRIES + 8))) == ""


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ([[[0], []], [[0], [0]]], "rank 0 is out of step: it made no backward pass in step 1, but"),
        ([[[0], [0]], [[0], []]], "rank 1 is out of step: it made no backward pass in step 1, but"),
        # Rank 1 continued, and waits with the reduction of the next step.
        ([[[0], [0]], [[0], [], [0]]], "rank 1 is out of step: it made no backward pass in step 1"),
        ([[[0, 1], [0, 1]], [[0, 1], [0]]], "rank 1 is out of step: it made 1 backward pass in"),
        ([[[0], [0, 0]], [[0], [0]]], "rank 0 is out of step: it made 2 backward passes in step 1"),
        ([[[0], [0, 0]], [[0], [0]], [[0], [0]]], "rank 0 is out of step: it made 2 backward pass"),
        (
            [[[0, 1]], [[1, 0]]],
            "in step 0 rank 1 makes the backward pass of a different wrapped model",
        ),
    ],
)
def test_passes_that_do_not_match_are_named(of: list[list[list[int]]], expected: str) -> None:
    assert expected in words(*map(progress, of))


def test_a_rank_that_left_its_loop_is_named() -> None:
    left, other = progress([[0], [0]]), progress([[0], [0], []], ended=False)
    left.leave(raised=False)
    assert "rank 0 is out of step: it left its loop in step 1, but rank 1 continued" in words(
        left, other
    )
    both = progress([[0], [0]])
    both.leave(raised=False)
    assert words(left, both) == ""
    left.departures.clear()
    left.leave(raised=True)
    assert "rank 0 is out of step: an error ended its loop in step 1" in words(left, other)
    later = progress([[0], [0], [0]], epoch=1)
    assert words(both, later) == "", "a rank that left as well, and is in the next epoch"


def test_a_rank_that_left_before_its_pass_is_named() -> None:
    left, other = progress([[0], []], ended=False), progress([[0], [0]], ended=False)
    left.leave(raised=False)
    assert "rank 0 is out of step: it left its loop in step 1 before the backward pass" in words(
        left, other
    )


def test_a_rank_that_closed_its_session_is_named() -> None:
    closed, other = progress([[0]]), progress([[0], []], ended=False, epoch=1)
    closed.closed, closed.in_loop = True, False
    assert "rank 0 is out of step: it closed its session after epoch 0, but" in words(closed, other)
    assert "closed its session" in described(0, closed)
    other.in_loop = False
    assert words(closed, other) == ""


def test_a_pass_that_is_missing_under_a_relaxed_policy_is_named_once_the_others_are_past() -> None:
    skipped, other = progress([[], []]), progress([[]])
    other.skipped = []
    for each in (skipped, other):
        each.relaxed = True
    assert list(skips({0: skipped, 1: other})) == [(0, 0)]
    other.skip(0)
    assert list(skips({0: skipped, 1: other})) == [], "both did"
    for step in range(1, 9):
        other.skip(step)
    assert other.skipped == [(0, 8)]


def test_only_ranks_that_others_wait_for_are_late() -> None:
    waits = ("sync", "plan")
    here, there = progress([[0]], phase="sync"), progress([[0]], phase="compute")
    of = {0: here, 1: there}
    assert laggards(of, waits, 30.0) == []
    here.since_s = 30.0
    assert laggards(of, waits, 30.0) == [1]
    there.phase = "plan"
    assert laggards(of, waits, 30.0) == [], "all wait: none of them is late"
    assert described(1, there) == "rank 1 is after step 0 (plan)"
    assert described(1, RankProgress()) == "rank 1 has not begun its first step"
