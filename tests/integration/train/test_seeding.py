"""A sample's random numbers: the same on any rank, in any process, with any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.train.seeding import sequence_of, torch_generator
from paceline.wire.synchronisation import convert
from support import seeding
from support.ranks import Ranks
from support.relaxing import SAMPLES
from support.seeding import Drawn

pytestmark = pytest.mark.ranks

WORKERS: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 2}


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Ranks]]:
    made = {world: Ranks(world) for world in (1, 2, 3)}
    yield made
    for pool in made.values():
        pool.stop()


def merged(ran: list[tuple[Drawn, dict[str, Any]]]) -> Drawn:
    """What the samples of all ranks drew; no two ranks had the same sample."""
    keys = list(chain(*(drawn for drawn, _ in ran)))
    assert len(set(keys)) == len(keys)
    return {key: numbers for drawn, _ in ran for key, numbers in drawn.items()}


@settings(max_examples=6)
@given(
    count=st.integers(6, 17),
    batch=st.integers(2, 6),
    seed=st.integers(0, 2**62),
    save_at=st.integers(0, 3),
)
def test_a_sample_draws_the_same_numbers_wherever_it_is_loaded(
    pools: dict[int, Ranks], count: int, batch: int, seed: int, save_at: int
) -> None:
    options = {"global_batch": batch, "seed": seed}
    reference = merged(pools[1].run(seeding.draw, count, options, {}))
    assert reference.keys() == {(epoch, i) for epoch in (0, 1) for i in range(count)}
    for world, loading in [(2, {}), (2, WORKERS), (3, {}), (3, WORKERS)]:
        assert merged(pools[world].run(seeding.draw, count, options, loading)) == reference
    last = 2 * math.ceil(count / batch) - 1
    before = pools[2].run(seeding.draw, count, options, WORKERS, None, min(save_at, last))
    after = pools[3].run(seeding.draw, count, options, WORKERS, before[0][1])
    assert merged([*before, *after]) == reference
    # No number occurs twice: not in another epoch, nor of another sample, nor of another source.
    numbers = list(chain(*reference.values()))
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize(
    "loading",
    [
        WORKERS | {"persistent_workers": True},
        {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
    ],
    ids=["fork", "spawn"],
)
def test_workers_that_live_for_several_epochs(
    pools: dict[int, Ranks], loading: dict[str, Any]
) -> None:
    options = {"global_batch": 4, "seed": 5}
    reference = merged(pools[1].run(seeding.draw, 10, options, {}))
    assert merged(pools[2].run(seeding.draw, 10, options, loading, timeout_s=240)) == reference
    # Batches of the epoch that was left are on their way when the next one begins.
    for first, second in pools[2].run(seeding.left_early, 10, options, loading, timeout_s=240):
        assert first.items() <= reference.items()
        assert second.items() <= reference.items()


def test_batches_that_are_taken_over(pools: dict[int, Ranks]) -> None:
    """They are loaded in the rank's own process, and the others by workers."""
    ran = pools[2].run(seeding.taken_over, convert("averaging", {"every": 3}), 0.05)
    assert sum(taken for _, taken in ran) > 0
    drawn = {key: numbers for of_rank, _ in ran for key, numbers in of_rank.items()}
    assert drawn.keys() == {(epoch, i) for epoch in (0, 1) for i in range(SAMPLES)}
    for (epoch, index), numbers in drawn.items():
        generator = torch_generator(sequence_of(3, epoch, index), "cpu")
        own = torch.rand((), dtype=torch.float64, generator=generator)
        assert numbers[0] == float(own)
