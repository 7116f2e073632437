"""Why a rank waits: the rules themselves, without ranks, threads or a clock."""

from __future__ import annotations

from paceline.core.member import Member, RoundAction, RoundCounts, WaitReason
from paceline.core.rounds import Call, Drift, RoundProgress
from paceline.wire import MOST_PENDING


def members(world: int, call: Call, drift: Drift) -> list[Member[str]]:
    progress = RoundProgress(world, call, drift)
    return [Member(rank, progress) for rank in range(world)]


def end_round(ranks: list[Member[str]], through: list[int]) -> None:
    """A round to which all ranks contribute."""
    progress = ranks[0]._progress
    progress.begin()
    for member in ranks:
        member.contribute(RoundCounts(progress.drift))
    progress.end([member.clock for member in ranks], through)


def test_a_rank_waits_that_is_further_ahead_than_its_lead_until_the_slowest_goes_on() -> None:
    ranks = members(3, Call(quorum=1), Drift(lead=1))
    assert ranks[0].offer("gradient", 8) is None
    assert ranks[1].offer("gradient", 8) is None
    assert ranks[0].offer("gradient", 8) is WaitReason.LEAD
    assert ranks[0].waiting is WaitReason.LEAD
    assert (ranks[0].slowest, ranks[0].ahead) == ([1, 2], 2), "no round has told of rank 1's step"
    end_round(ranks, [])
    assert ranks[0].wait_reason() is WaitReason.LEAD
    assert (ranks[0].slowest, ranks[0].ahead) == ([2], 2)
    ranks[2].offer("gradient", 8)
    end_round(ranks, [])
    assert ranks[0].wait_reason() is None


def test_a_rank_does_not_wait_for_ranks_that_have_no_more_steps() -> None:
    ranks = members(2, Call(quorum=1), Drift(lead=0))
    assert ranks[0].offer("gradient", 8) is WaitReason.LEAD
    ranks[1].through()
    end_round(ranks, [1])
    assert ranks[0].wait_reason() is None
    assert (ranks[0].slowest, ranks[0].ahead) == ([], 0)


def test_a_rank_waits_for_as_many_rounds_as_it_has_done_steps() -> None:
    ranks = members(2, Call(quorum=2), Drift(waits=True))
    assert ranks[0].offer("gradient", 8) is WaitReason.ROUNDS
    end_round(ranks, [])
    assert ranks[0].wait_reason() is None


def test_a_rank_waits_for_the_round_that_it_calls_for_too_many_pending_gradients() -> None:
    ranks = members(2, Call(quorum=2), Drift())
    for _ in range(MOST_PENDING):
        assert ranks[0].offer("gradient", 8) is None
    assert ranks[0].offer("gradient", 8) is WaitReason.PENDING
    assert ranks[0].announce() is RoundAction.CALL
    progress = ranks[0]._progress
    progress.begin()
    assert len(ranks[0].contribute(RoundCounts(progress.drift))) == MOST_PENDING + 1
    assert ranks[0].wait_reason() is WaitReason.PENDING, "the round is under way"
    progress.end([MOST_PENDING + 1, 0], [])
    assert ranks[0].wait_reason() is None


def test_a_rank_waits_for_all_but_one_of_its_copies() -> None:
    (rank,) = members(1, Call(quorum=1), Drift())
    assert rank.offer("gradient", 8, on_host=False) is None
    assert rank.offer("gradient", 8, on_host=False) is WaitReason.COPYING
    rank.arrived()
    assert rank.wait_reason() is None


def contributions(staleness: int | None) -> tuple[list[str], RoundCounts]:
    """What goes into a round of two gradients: one is seven rounds old, and the newer one two."""
    drift = Drift(staleness=staleness)
    rank, _ = members(2, Call(quorum=1), drift)
    progress = rank._progress
    for _ in range(4):
        progress.begin()
        progress.end([0, 0], [])
    rank.offer("old", 8)
    progress.begin()
    progress.end([0, 0], [])  # rank 1 alone gave something to it
    rank.take()
    rank.offer("new", 4)
    for _ in range(2):
        progress.begin()
        progress.end([0, 0], [])
    tally = RoundCounts(drift)
    return [gradient for _, _, gradient in rank.contribute(tally)], tally


def test_of_what_is_too_old_the_newest_goes_into_the_round() -> None:
    for staleness, kept, dropped, ages in (
        (None, ["old", "new"], 0, 2),
        (7, ["old", "new"], 0, 2),
        (6, ["new"], 8, 1),
        (1, ["new"], 8, 1),
        (0, [], 12, 0),
    ):
        gradients, tally = contributions(staleness)
        assert (gradients, tally.dropped, sum(tally.ages)) == (kept, dropped, ages), staleness
        assert tally.contributors == bool(kept)


def test_a_rank_with_an_old_gradient_is_ready_unless_that_is_dropped() -> None:
    for staleness, action in (
        (4, RoundAction.CALL),
        (1, RoundAction.CALL),
        (0, RoundAction.NOTHING),
    ):
        rank, _ = members(2, Call(quorum=1), Drift(staleness=staleness))
        for _ in range(9):
            rank._progress.begin()
            rank._progress.end([0, 0], [])
        rank.offer("gradient", 8)
        assert rank.announce() is action
