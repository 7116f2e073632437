"""`Session(token_budget=…)`: what ranks train, how long epochs are, and what is refused."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

import paceline
from paceline.core.batch_limits.budget import counts_within
from paceline.train.epochs import epoch_order
from support import budgets
from support.budgets import Seen
from support.ranks import Ranks
from support.sessions import Numbered, Sized

pytestmark = pytest.mark.ranks
WORLD = 3
COUNT, BUDGET, SEED, EPOCHS = 40, 7.0, 7, 3
OPTIONS = {"token_budget": BUDGET, "seed": SEED}
SIZES = np.array(Sized(COUNT).sizes)


def due() -> list[tuple[int, int, list[int]]]:
    """Epoch, step and sorted samples of each step, as the budget has them."""
    steps, number = [], 0
    for epoch in range(EPOCHS):
        order = epoch_order(COUNT, SEED, epoch)
        for part in np.split(order, np.cumsum(counts_within(SIZES[order], BUDGET))[:-1]):
            steps.append((epoch, number, sorted(part.tolist())))
            number += 1
    return steps


def trained(seen: list[Seen]) -> list[tuple[int, int, list[int]]]:
    """Epoch, step and sorted samples of each step, of all ranks together."""
    together = []
    for parts in zip(*(of_rank.steps for of_rank in seen), strict=True):
        assert len({(epoch, step) for epoch, step, _ in parts}) == 1
        samples = sorted(chain.from_iterable(used for _, _, used in parts))
        together.append((parts[0][0], parts[0][1], samples))
    return together


def test_steps_are_those_of_the_budget_and_trained_as_by_one_process(ranks: Ranks) -> None:
    seen: list[Seen] = ranks.run(budgets.train, COUNT, EPOCHS, OPTIONS)
    assert trained(seen) == due()
    alone = budgets.train(COUNT, EPOCHS, OPTIONS)
    assert trained([alone]) == due()
    for of_rank in seen:  # in double precision: weights are Λ_j / ΣΛ without asking
        torch.testing.assert_close(of_rank.parameters, alone.parameters, rtol=1e-6, atol=1e-7)
    for step, (_, _, samples) in enumerate(due()):
        loads = [SIZES[of_rank.steps[step][2]].sum() for of_rank in seen]
        weights = [of_rank.weights[step] for of_rank in seen]
        np.testing.assert_allclose(weights, np.array(loads) / SIZES[samples].sum())


def test_every_rank_knows_how_long_each_epoch_is(ranks: Ranks) -> None:
    of_epochs = [sum(epoch == wanted for epoch, _, _ in due()) for wanted in range(EPOCHS)]
    assert len(set(of_epochs)) > 1, "the case is of epochs that differ"
    for seen in ranks.run(budgets.train, COUNT, EPOCHS, OPTIONS):
        assert seen.ahead == of_epochs
        assert seen.lengths == list(np.repeat(of_epochs, of_epochs))
        assert seen.total == len(due())


@pytest.mark.parametrize("at", [0, 4, 8, 13])
def test_any_number_of_ranks_goes_on_with_the_same_rest(ranks: Ranks, at: int) -> None:
    before: list[Seen] = ranks.run(budgets.train, COUNT, EPOCHS, OPTIONS, None, at)
    assert trained(before) == due()[: at + 1]
    state = before[0].state
    alone = budgets.train(COUNT, EPOCHS, OPTIONS, state)
    assert trained([alone]) == due()[at + 1 :]
    assert before[1].trained + alone.trained == list(np.cumsum([len(s) for _, _, s in due()]))
    assert trained(ranks.run(budgets.train, COUNT, EPOCHS, OPTIONS, state)) == due()[at + 1 :]


def test_no_rank_gets_more_than_its_limit(ranks: Ranks) -> None:
    limits = [5.0, 3.0, 5.0]
    for seen in (
        ranks.run(budgets.train, COUNT, EPOCHS, OPTIONS),
        ranks.run(budgets.train, COUNT, EPOCHS, OPTIONS | {"token_limits": limits}),
    ):
        assert trained(seen) == due()
        most = [max(SIZES[used].sum() for _, _, used in of_rank.steps) for of_rank in seen]
    assert all(np.array(most) <= limits)
    assert most[0] > 3.0


def test_micro_batches_keep_the_limits_and_train_as_one_process(ranks: Ranks) -> None:
    limits = [3.0, 3.5, 6.0]
    options = OPTIONS | {"token_limits": limits, "micro_batches": True}
    seen: list[Seen] = ranks.run(budgets.train, COUNT, EPOCHS, options)
    together: dict[int, list[int]] = {}
    for of_rank, limit in zip(seen, limits, strict=True):
        turns: dict[int, list[float]] = {}
        for _, step, used in of_rank.steps:
            turns.setdefault(step, []).append(SIZES[used].sum())
            together.setdefault(step, []).extend(used)
        assert max(map(max, turns.values())) <= limit
        assert all(len(loads) == 1 for loads in turns.values() if sum(loads) <= limit)
    assert any(len(of_rank.steps) > len(due()) for of_rank in seen), "some step is cut"
    assert [sorted(used) for _, used in sorted(together.items())] == [s for _, _, s in due()]
    alone = budgets.train(COUNT, EPOCHS, OPTIONS)
    for of_rank in seen:
        torch.testing.assert_close(of_rank.parameters, alone.parameters, rtol=1e-6, atol=1e-7)


WITH_BUDGET: list[tuple[dict[str, Any], str]] = [
    ({"global_batch": 4}, "both of global_batch and token_budget"),
    ({"drop_last": True}, "drop_last and token_budget cannot be combined"),
    ({"limits": 4}, "limits and token_budget cannot be combined: .* give token_limits"),
    ({"shapes": 2}, "shapes and token_budget cannot be combined"),
    ({"uneven_steps": True}, "uneven_steps and token_budget cannot be combined"),
    (
        {"micro_batches": True, "token_limits": [5, 2, 5]},
        "2 on rank 1, .* size 3, which each rank must hold alone",
    ),
    (
        {"token_budget": 2.5},
        r"sizes\[2\] is 3 \(4 of 12 samples are too large\), more than token_budget=2.5",
    ),
    ({"token_budget": 0}, "token_budget is 0: it must be finite and above 0"),
    ({"token_budget": "8"}, "token_budget is '8': it must be a number"),
    ({"token_limits": 2}, "largest sample has size 3, which fits on no rank"),
    ({"token_limits": 5}, "steps of up to 9 are sure to fit, .* lower token_budget"),
    ({"token_limits": [5, 5]}, "one for each of 3 ranks"),
    ({"token_limits": [-1]}, "token_limits is .*at least 0"),
    ({"token_limits": "x"}, "token_limits is 'x': give one number"),
]


@pytest.mark.parametrize(("options", "why"), WITH_BUDGET)
def test_what_a_budget_does_not_go_with_is_refused_on_all_ranks(
    ranks: Ranks, options: dict[str, Any], why: str
) -> None:
    for said in ranks.run(budgets.refused, {"token_budget": 12.0} | options):
        assert re.search(why, said), said


def test_limits_of_tokens_need_a_budget() -> None:
    assert "token_limits needs token_budget" in budgets.refused(
        {"global_batch": 4, "token_limits": 8}
    )
    assert "neither of global_batch and token_budget" in budgets.refused({})


def test_profile_is_refused() -> None:
    session = paceline.Session(Sized(12), token_budget=8)
    with pytest.raises(paceline.PacelineError, match=r"profile: .*give Session token_limits"):
        session.profile(lambda _: None)
    session.close()


def test_without_sizes_a_budget_counts_samples() -> None:
    session = paceline.Session(Numbered(10), token_budget=np.int64(4))
    assert session.steps_per_epoch == 3
    session.close()
