"""Why a rank waits: the rules themselves, without ranks, threads or a clock."""

from __future__ import annotations

from paceline.core.member import Member, RoundAction, RoundCounts, WaitReason
from paceline.core.rounds import Call, Drift, RoundProgress


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
    ranks[1].finish()
    end_round(ranks, [1])
    assert ranks[0].wait_reason() is None
    assert (ranks[0].slowest, ranks[0].ahead) == ([], 0)


def test_a_rank_waits_for_all_but_one_of_its_copies() -> None:
    (rank,) = members(1, Call(quorum=1), Drift())
    assert rank.offer("gradient", 8, on_host=False) is None
    assert rank.offer("gradient", 8, on_host=False) is WaitReason.COPYING
    rank.arrived()
    assert rank.wait_reason() is None


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
