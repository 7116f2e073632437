"""Rounds of a partial all-reduce: every gradient once, or counted as dropped; nobody hangs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support import rounds
from support.ranks import Ranks

pytestmark = pytest.mark.ranks
WORLD = 4
CALLS: dict[str, dict[str, Any]] = {
    "rna": {"probes": 2, "staleness": 4, "mean": True},
    "majority": {"probes": 1, "staleness": 4, "mean": False, "waits": True, "paced": True},
    "solo": {"probes": None, "staleness": 1, "mean": False, "waits": True, "paced": True},
    "n-soft": {"parts": 2, "staleness": 4, "mean": False},
    "ssp": {"quorum": 1, "staleness": None, "lead": 2, "mean": False},
    "backup": {"spare": 1, "staleness": 0, "waits": True, "mean": False},
    "all": {"quorum": WORLD, "staleness": 4, "mean": False},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_gradient_counts_once_or_as_dropped(ranks: Ranks, name: str, seed: int) -> None:
    given = CALLS[name]
    answers = ranks.run(rounds.exchange, given, 30, seed)
    first = answers[0]
    # The same sums in the same order on all ranks.
    assert all(answer["totals"] == first["totals"] for answer in answers)
    assert first["numbers"] == list(range(len(first["numbers"])))
    assert all(answer["dropped"] == first["dropped"] for answer in answers)
    offered = sum(answer["offered"] for answer in answers)
    went_in = np.sum(first["staleness"], axis=0)
    assert went_in.sum() + first["dropped"] / 3 == offered
    total = np.sum(first["totals"])
    contributors = np.sum(first["contributors"])
    if given["mean"]:  # what waited for the same round counts as one
        assert total == pytest.approx(contributors)
    else:
        assert total == went_in.sum()
    assert max(first["contributors"]) <= WORLD
    if given["staleness"] is None:
        assert first["dropped"] == 0
        assert max(answer["ahead"] for answer in answers) <= given["lead"]


def test_a_probed_rank_calls_as_it_ends_a_step_not_for_what_came_too_late(ranks: Ranks) -> None:
    assert ranks.run(rounds.leftover) == [[1.0, 6.0]] * WORLD


def test_gradients_of_one_rank_count_as_one_the_newest_most(ranks: Ranks) -> None:
    """RNA, Sec. 3.3: weight 1 for the older of two, 2 for the newer."""
    totals, ages = ranks.run(rounds.aged)[0]
    assert totals == [[1.0, 0.0], pytest.approx([3 / 3, 2 * 3 / 3])]
    assert ages == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]


def test_a_gradient_on_its_way_to_the_host_goes_into_a_later_round(ranks: Ranks) -> None:
    answers = ranks.run(rounds.arriving)
    assert [sums for sums, _ in answers] == [[2.0, 1.0]] * WORLD
    assert [copied for _, copied in answers] == [[0.5], [0.25], [], []]


def test_a_rank_that_is_not_drawn_does_not_call(ranks: Ranks) -> None:
    assert ranks.run(rounds.undrawn) == [False] * WORLD


@pytest.mark.parametrize("optimiser", ["SGD", "decay", "Adam", "AdamW"])
def test_rounds_of_few_take_a_share_of_a_step(ranks: Ranks, optimiser: str) -> None:
    """So many gradients move parameters as far as under the all-reduce, whatever the optimiser."""
    steps = 16
    given = {**CALLS["all"], "waits": True}
    reduced = ranks.run(rounds.stepped, given, optimiser, steps)
    for name in ("ssp", "n-soft"):
        given = {**CALLS[name], "staleness": None}
        apart = ranks.run(rounds.stepped, given, optimiser, steps)
        assert apart == pytest.approx(reduced, rel=0.01)


@pytest.mark.parametrize("name", ["majority", "solo"])
def test_eager_sgd_has_one_round_to_a_step(ranks: Ranks, name: str) -> None:
    answers = ranks.run(rounds.exchange, CALLS[name], 30, 5)
    # In the end ranks tell that they are through.
    assert 30 <= len(answers[0]["numbers"]) <= 30 + WORLD


@pytest.mark.parametrize("name", ["rna", "n-soft", "ssp"])
@pytest.mark.parametrize("after", [0, 7])
def test_a_rank_that_leaves_is_named(name: str, after: int) -> None:
    pool = Ranks(3)
    try:
        messages = pool.run(rounds.leave, CALLS[name], 1, after, timeout_s=30)
    finally:
        pool.stop()
    assert messages[1] == ""
    for text in (messages[0], messages[2]):
        assert "rank 1 has left" in text
        assert "round" in text


def test_a_rank_that_is_silent_is_named(ranks: Ranks) -> None:
    messages = ranks.run(rounds.silent, CALLS["rna"], 2)
    assert messages[2] == "nothing"
    for rank in (0, 1, 3):
        assert f"rank {rank}, round" in messages[rank]
        assert "2" in messages[rank].split("for ranks", 1)[1]
