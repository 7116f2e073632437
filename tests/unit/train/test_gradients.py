"""An optimiser's gradients and settings as a vector, and sums of such vectors applied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.train.sync.gradients import Flat


def parameter(gradient: list[float]) -> nn.Parameter:
    made = nn.Parameter(torch.ones(len(gradient)))
    made.grad = torch.tensor(gradient)
    return made


def apply(flat: Flat, optimiser: torch.optim.Optimizer, total: torch.Tensor) -> None:
    with flat.applying(optimiser, total):
        optimiser.step()


def test_settings_are_the_contributors_means_for_that_step() -> None:
    a, b = parameter([2.0, 4.0]), parameter([1.0])
    b.grad = None
    optimiser = torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 0.3}], 0.1, momentum=0.5)
    flat = Flat([a, b], optimiser)
    vector = flat.read(optimiser, 0.5, 0.25, 1).vector
    optimiser.param_groups[0]["lr"] = 0.3
    total = vector + flat.read(optimiser, 0.5, 0.25, 1).vector
    with flat.applying(optimiser, total.clone()):
        # Of half of the work: the mean, at half of the mean rate.
        assert a.grad is not None
        assert a.grad.tolist() == [4.0, 8.0]
        assert b.grad is None
        rates = [group["lr"] for group in optimiser.param_groups]
        assert rates == pytest.approx([0.1, 0.15])
        assert optimiser.param_groups[0]["momentum"] == 0.5
    assert [group["lr"] for group in optimiser.param_groups] == [0.3, 0.3]


def test_whole_numbers_stay() -> None:
    matrix = nn.Parameter(torch.eye(3))
    matrix.grad = torch.eye(3)
    optimiser = torch.optim.Muon([matrix], 0.1)
    flat = Flat([matrix], optimiser)
    apply(flat, optimiser, flat.read(optimiser, 1.0, 1.0, 1).vector)
    assert not torch.equal(matrix, torch.eye(3))
    assert optimiser.param_groups[0]["ns_steps"] == 5


class _Counting(torch.optim.SGD):
    """Writes into its group what the next step depends on, as schedule-free optimisers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["rate_sum"] = group.get("rate_sum", 0.0) + group["lr"]
        return super().step(closure)


def test_what_a_step_writes_into_the_settings_stays() -> None:
    weight = parameter([1.0])
    optimiser = _Counting([weight], 0.5)
    optimiser.step()
    flat = Flat([weight], optimiser)
    vectors = [flat.read(optimiser, 1.0, 0.5, 1).vector for _ in range(3)]
    for vector in vectors:  # read before the first was applied
        apply(flat, optimiser, vector)
    assert optimiser.param_groups[0]["count"] == 4
    assert optimiser.param_groups[0]["rate_sum"] == pytest.approx(0.5 + 3 * 0.25)
    assert optimiser.param_groups[0]["lr"] == 0.5


def test_a_rate_in_a_tensor_comes_back() -> None:
    weight = parameter([1.0])
    optimiser = torch.optim.Adam([weight], torch.tensor(0.1))
    rate = optimiser.param_groups[0]["lr"]
    flat = Flat([weight], optimiser)
    apply(flat, optimiser, flat.read(optimiser, 1.0, 0.25, 1).vector)
    assert weight.item() == pytest.approx(1 - 0.025)
    assert optimiser.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.1)
