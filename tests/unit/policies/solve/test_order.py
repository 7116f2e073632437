"""The epoch's order is PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.policies.solve.order import epoch_order, remaining_in_order


@pytest.mark.parametrize("n", [0, 1, 2, 3, 64, 1074, 100_003])
@pytest.mark.parametrize("seed", [0, 1, 7, 2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**63 - 2])
def test_order_is_torch_randperm(n: int, seed: int) -> None:
    for epoch in (0, 1):
        generator = torch.Generator().manual_seed(seed + epoch)
        expected = torch.randperm(n, generator=generator).numpy()
        np.testing.assert_array_equal(epoch_order(n, seed, epoch), expected)


def test_a_million_samples_are_a_permutation() -> None:
    order = epoch_order(1_000_000, 3, 0)
    assert np.array_equal(np.sort(order), np.arange(1_000_000))


def test_order_is_shared_and_so_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(10, 0, 0)[0] = 1


def test_more_samples_than_32_bit_draws_serve() -> None:
    with pytest.raises(ValueError, match="n: 300000000 samples"):
        epoch_order(300_000_000, 0, 0)


def test_remaining_keeps_the_epochs_order() -> None:
    order = epoch_order(20, 5, 2)
    left = np.sort(order[7:])
    np.testing.assert_array_equal(remaining_in_order(20, 5, 2, left), order[7:])
