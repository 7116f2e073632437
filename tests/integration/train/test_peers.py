"""Ranks that ask each other, AD-PSGD's means of two, RNA's server: nothing lost, nobody hangs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from paceline.wire.synchronisation import Synchronisation, convert
from support import peers
from support.ranks import Ranks

pytestmark = pytest.mark.ranks
WORLD = 4
PAIRWISE = convert("pairwise")
LOSSLESS = {"quorum": 1, "staleness": None, "mean": False}


def hierarchical(groups: list[list[int]], every: int | None) -> Synchronisation:
    return convert("hierarchical", {"groups": groups, "every": every} | LOSSLESS)


@pytest.mark.parametrize("answering", [[1, 3], [0, 1, 2, 3]], ids=str)
def test_each_question_has_its_answer(ranks: Ranks, answering: list[int]) -> None:
    answers = ranks.run(peers.ask, answering, 20, 0)
    assert all(answer["right"] for answer in answers)
    for rank in range(WORLD):
        assert sum(answer["asked_by"].count(rank) for answer in answers) == 20
    assert [answer["left"] for answer in answers] == [0] * WORLD, "keys in the store"


@pytest.mark.parametrize(("answering", "leaver"), [([1], 0), ([1], 1), ([0, 1, 2, 3], 2)])
def test_a_rank_that_leaves_is_named(answering: list[int], leaver: int) -> None:
    pool = Ranks(WORLD)
    try:
        messages = pool.run(peers.leave, answering, leaver, timeout_s=30)
    finally:
        pool.stop()
    assert messages[leaver] == ""
    for rank in set(range(WORLD)) - {leaver}:
        assert messages[rank] == f"rank {leaver} has left"


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_silent_is_named(ranks: Ranks, late: int) -> None:
    messages = ranks.run(peers.silent, [1], late)
    assert messages[late] == "nothing"
    for rank in set(range(WORLD)) - {late}:
        assert f"rank {rank} waited 0.5 s for ranks [{late}]" in messages[rank]


def test_groups_are_kept_for_when_they_come_again(ranks: Ranks) -> None:
    two, three = [[0, 1], [2, 3]], [[0, 3], [1], [2]]
    others = [[[0], [1, 2, 3]], [[0, 2], [1, 3]], [[0, 1, 2], [3]]]
    answers = ranks.run(peers.regroup, [two, three, two, *others, three, two])
    sums = [[1, 3, 1, 0, 2, 3, 3, 1], [1, 1, 1, 6, 4, 3, 1, 1], [5, 2, 5, 6, 2, 3, 2, 5]]
    assert [answer["sums"] for answer in answers] == [*sums, [5, 3, 5, 6, 4, 3, 3, 5]]
    assert answers[3]["ranks"][:2] == [(1, 2), (1, 2)]
    for answer in answers:  # the groups made first gave way to the fifth
        assert answer["groups"] == [0, 1, 0, 2, 3, 4, 1, 5]


def test_who_is_not_asked_for_long_still_answers(ranks: Ranks) -> None:
    assert ranks.run(peers.seldom) == [[1.0], [], [3.0], [4.0]]


def mean_of_steps(seed: int, steps: int, weights: Sequence[float]) -> list[float]:
    total = torch.zeros(5)
    for rank, weight in enumerate(weights):
        for step in range(steps):
            total -= weight * peers.noise(seed, rank, step)
    return total.tolist()


@pytest.mark.parametrize(
    ("seed", "weights"), [(0, [0.25] * 4), (1, [0.25] * 4), (2, [0.4, 0.1, 0.0, 0.5])], ids=str
)
@pytest.mark.parametrize("slow_s", [0.0, 0.002])
@pytest.mark.parametrize(
    "what",
    [PAIRWISE, hierarchical([[0, 1, 2], [3]], 3), hierarchical([[3, 0], [2, 1]], None)],
    ids=["pairwise", "hierarchical", "apart"],
)
def test_each_step_of_each_rank_counts_once(
    ranks: Ranks, what: Synchronisation, slow_s: float, seed: int, weights: list[float]
) -> None:
    """The sum of all replicas is that of all steps, as they weigh, whatever came between."""
    answers = ranks.run(peers.by_noise, what, 40, seed, slow_s, weights)
    assert all(answer["after"] == answers[0]["after"] for answer in answers)
    assert answers[0]["after"] == pytest.approx(mean_of_steps(seed, 40, weights), abs=1e-4)


def test_a_mean_of_local_steps_weighs_by_what_ranks_trained_with(ranks: Ranks) -> None:
    """Ranks move by 1, 2, 3 and 4 in each step, the last two by nothing, as they have no samples.

    Two steps, then their mean: 0.8 · 2 + 0.2 · 4 = 2.4; and so twice.
    """
    what = convert("averaging", {"every": 2})
    answers = ranks.run(peers.by_ranks, what, 4, [0.8, 0.2, 0.0, 0.0])
    for answer in answers:
        assert answer["after"] == answer["before"] == pytest.approx([4.8] * 5)


def test_an_outer_optimiser_steps_along_what_the_mean_has_changed(ranks: Ranks) -> None:
    """Half of the way: two steps lead from 0 to a mean of 2.4, so to 1.2; and so twice."""
    what = convert("averaging", {"every": 2, "outer": {"rate": 0.5, "momentum": 0}, "parts": 1})
    answers = ranks.run(peers.by_ranks, what, 4, [0.8, 0.2, 0.0, 0.0])
    for answer in answers:
        assert answer["after"] == answer["before"] == pytest.approx([2.4] * 5)


def test_where_ranks_meet_between_outer_steps_they_have_the_mean(ranks: Ranks) -> None:
    what = convert("averaging", {"every": 1000, "outer": {"rate": 0.5, "momentum": 0.9}})
    answers = ranks.run(peers.by_ranks, what, 2, [0.8, 0.2, 0.0, 0.0])
    for answer in answers:
        assert answer["after"] == pytest.approx([2.4] * 5)


def streamed(
    seed: int, steps: int, every: int, parts: int, overlap: int, keep: float
) -> tuple[list[list[float]], list[float]]:
    """Streaming DiLoCo by its definition, on four replicas that step by noise with rate 1.

    Returns:
        the replicas before they all meet, and what they are then.
    """
    rate, momentum, of_part = 0.7, 0.9, [slice(0, 2), slice(2, 5)] if parts == 2 else [slice(0, 5)]
    replicas, anchor, velocity = torch.zeros(WORLD, 5), torch.zeros(5), torch.zeros(5)
    work, on_its_way = torch.zeros(parts, WORLD), {}

    def land(part: int) -> None:
        at, (mean, gave) = of_part[part], on_its_way.pop(part)[1:]
        change = anchor[at] - mean
        velocity[at] = momentum * velocity[at] + change
        anchor[at] -= rate * (change + momentum * velocity[at])
        replicas[:, at] = keep * replicas[:, at] + (1 - keep) * anchor[at]
        work[part] += keep * gave

    for step in range(steps):
        replicas -= torch.stack([peers.noise(seed, rank, step) for rank in range(WORLD)])
        work += 1 / WORLD
        for part in [part for part, flight in on_its_way.items() if flight[0] == step]:
            land(part)
        for part in range(parts):
            if (peers.FIRST + step + 1) % every == part * every // parts:
                weights = work[part] / work[part].sum()
                mean = (weights[:, None] * replicas[:, of_part[part]]).sum(0)
                on_its_way[part] = (step + overlap, mean, work[part].clone())
                work[part] = 0
    before: list[list[float]] = replicas.tolist()
    for part in list(on_its_way):
        land(part)
    for part in range(parts):
        if not (total := work[part].sum()):
            continue  # replicas are equal already
        weights = work[part] / total
        replicas[:, of_part[part]] = (weights[:, None] * replicas[:, of_part[part]]).sum(0)
    after: list[float] = replicas[0].tolist()
    return before, after


@pytest.mark.parametrize("keep", [0.0, 0.25])
@pytest.mark.parametrize(
    ("every", "parts", "overlap"), [(4, 1, 1), (4, 1, 4), (4, 2, 2), (5, 2, 1)]
)
@pytest.mark.parametrize("steps", [19, 20])
def test_a_mean_on_its_way_comes_into_force_some_steps_later(
    ranks: Ranks, steps: int, every: int, parts: int, overlap: int, keep: float
) -> None:
    outer = {"rate": 0.7, "momentum": 0.9}
    rules = {"every": every, "parts": parts, "overlap": overlap, "keep": keep, "outer": outer}
    answers = ranks.run(peers.by_noise, convert("averaging", rules), steps, 5, 0.001)
    before, after = streamed(5, steps, every, parts, overlap, keep)
    for answer, alone in zip(answers, before, strict=True):
        assert answer["before"] == pytest.approx(alone, abs=1e-4)
        assert answer["after"] == answers[0]["after"] == pytest.approx(after, abs=1e-4)


def test_a_mean_on_its_way_is_the_mean_that_ranks_wait_for(ranks: Ranks) -> None:
    """Bit by bit, where ranks do not move while it is on its way."""
    rules = {"every": 4, "outer": {"rate": 0.7, "momentum": 0.9}}
    waited, behind = (
        ranks.run(peers.by_starts, convert("averaging", rules | overlap), 14)
        for overlap in ({}, {"overlap": 2})
    )
    assert [answer["after"] for answer in behind] == [answer["after"] for answer in waited]
    assert [answer["before"] for answer in behind] == [answer["before"] for answer in waited]


@pytest.mark.parametrize("leaver", [1, 0], ids=["before it gives", "after it gave"])
def test_a_rank_that_leaves_ends_a_mean_on_its_way(ranks: Ranks, leaver: int) -> None:
    answers = ranks.run(peers.leave_on_the_way, leaver)
    assert answers.pop(leaver) == ""
    assert set(answers) == {f"rank {leaver} has left"}


def test_a_push_may_end_later_than_what_it_pulled_is_in_use(ranks: Ranks) -> None:
    answers = ranks.run(peers.by_late_givers, hierarchical([[0, 1], [2, 3]], 1), 20)
    assert all(answer["after"] == answers[0]["after"] for answer in answers)
    assert answers[0]["after"] == pytest.approx(mean_of_steps(1, 20, [0.25] * 4), abs=1e-4)


def test_means_of_two_bring_replicas_together(ranks: Ranks) -> None:
    answers = ranks.run(peers.by_quadratics, PAIRWISE, 100)
    # By itself rank 0 would not move, and rank 3 would get that far.
    alone = 9 * (1 - 0.98**100)
    assert min(answers[0]["before"]) > 1
    assert max(answers[3]["before"]) < alone - 0.1
    # Ranks that ask tell, each of its own: as often as they step.
    assert [len(answer["worlds"]) for answer in answers] == [100, 0, 100, 0]
    for answer in (answers[0], answers[2]):
        assert set(answer["worlds"]) == {2}
        assert all(sum(ages) == 2 and ages[0] for ages in answer["staleness"])


def test_replicas_are_as_far_apart_as_their_steps(ranks: Ranks) -> None:
    """Not as the run's steps before this exchange began."""
    answers = ranks.run(peers.by_latecomers, PAIRWISE, 4)
    for answer in (answers[0], answers[2]):
        assert answer["staleness"][0] == [1, 1, *[0] * 14]


@pytest.mark.parametrize(
    "groups", [[[0, 1, 2], [3]], [[0], [1, 2, 3]], [[0, 3], [1], [2]]], ids=str
)
def test_unequal_groups_find_the_least_loss_of_all(ranks: Ranks, groups: list[list[int]]) -> None:
    """Not that of the mean of groups, and no slower than one group would."""
    answers = ranks.run(peers.by_quadratics, hierarchical(groups, 4), 300)
    assert all(answer["after"] == answers[0]["after"] for answer in answers)
    assert answers[0]["after"] == pytest.approx([(0 + 1 + 4 + 9) / 4] * 5, abs=0.25)
    of_groups = sorted({world for answer in answers for world in answer["worlds"]})
    assert of_groups == sorted({len(group) for group in groups})


def test_within_a_group_replicas_are_the_same(ranks: Ranks) -> None:
    given: dict[str, Any] = {"quorum": 2, "staleness": 0, "waits": True, "mean": False}
    what = convert("hierarchical", {"groups": [[0, 2], [1, 3]], "every": 3} | given)
    answers = ranks.run(peers.by_noise, what, 30, 1)
    assert (
        answers[0]["before"] == answers[2]["before"] != answers[1]["before"] == answers[3]["before"]
    )
