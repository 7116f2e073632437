"""Work stealing, without training: batches close in the store, whenever ranks load them."""

from __future__ import annotations

import random
from datetime import timedelta

import numpy as np
import pytest
from torch.distributed import HashStore

from paceline.train.parts import Part
from paceline.train.sync.stealing import Stealing, put

COUNT = 6  # samples of each batch


@pytest.fixture
def store() -> HashStore:
    made = HashStore()
    made.set_timeout(timedelta(seconds=1))  # type: ignore[no-untyped-call]
    return made


def plan(store: HashStore, world: int, segment: int, first_step: int, steps: int) -> list[Part]:
    """Puts a segment before the ranks, with samples of no other step."""
    parts = []
    for rank in range(world):
        first = (first_step * world + rank * steps) * COUNT
        indices = np.arange(first, first + steps * COUNT, dtype="<u4").tobytes()
        each = [1.0] * steps
        loads, weights = [float(COUNT)] * steps, [1 / world] * steps
        counts = [COUNT] * steps
        parts.append(
            Part(0, segment, first_step, counts, loads, weights, [], indices, False, loads, each)
        )
    put(store, parts, [np.ones(steps * COUNT)] * world)
    return parts


def left(store: HashStore, ranks: list[Stealing], segment: int, first_step: int) -> int:
    """Keys in the store when all are through with two more segments of a step."""
    for k in range(2):
        parts = plan(store, len(ranks), segment + k, first_step + k, 1)
        for part, stealing in zip(parts, ranks, strict=True):
            for step in part.steps():
                stealing.batch(step, None)
    keys: int = store.num_keys()
    return keys


def test_a_late_rank_finds_the_queues_of_all_segments(store: HashStore) -> None:
    """However far ahead of it the others load."""
    early, late = (Stealing(store, rank, 8, None, by_size=False) for rank in range(2))
    planned = [plan(store, 2, segment, 2 * segment, 2) for segment in range(4)]
    for rank, stealing in enumerate((early, late)):
        for parts in planned:
            for step in parts[rank].steps():
                assert stealing.batch(step, None) == step
    assert left(store, [early, late], 4, 8) <= 2 * 2


class Loading:
    """A rank's loader and loop: it loads so many steps before it trains with them."""

    def __init__(self, store: HashStore, rank: int, lookahead: int) -> None:
        self.stealing = Stealing(store, rank, lookahead, None, by_size=False)
        self.rank, self.lookahead = rank, lookahead
        self.trained = -1  # the step in hand
        self.loaded = -1
        self.used: list[int] = []
        self.weight = 0.0
        self.moved = 0  # batches


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("lookahead", [0, 1, 3, 12])
def test_each_sample_is_used_once(store: HashStore, lookahead: int, seed: int) -> None:
    draw = random.Random(seed)
    world, steps = 3, [draw.randint(1, 8) for _ in range(12)]
    starts = np.cumsum([0, *steps]).tolist()
    planned = [plan(store, world, k, starts[k], n) for k, n in enumerate(steps)]
    segment_of = [k for k, n in enumerate(steps) for _ in range(n)]
    batches = [[step for parts in planned for step in parts[rank].steps()] for rank in range(world)]
    ranks = [Loading(store, rank, lookahead) for rank in range(world)]
    pace = [draw.choice([1, 1, 5]) for _ in ranks]
    for end in starts[1:]:  # where all meet
        while able := [loader for loader in ranks if loader.trained < end - 1]:
            loader = draw.choices(able, [pace[other.rank] for other in able])[0]
            while loader.loaded < min(loader.trained + 1 + lookahead, starts[-1] - 1):
                loader.loaded += 1
                step = batches[loader.rank][loader.loaded]
                clocks = None
                if loader.trained >= 0 and segment_of[loader.trained] == step.segment:
                    start = starts[step.segment]  # what the last round told may be old
                    clocks = [max(0, other.trained - start - draw.randint(0, 6)) for other in ranks]
                got = loader.stealing.batch(step, clocks)
                loader.used += got.indices
                loader.weight += got.weight
                loader.moved += got.samples > COUNT
            loader.trained += 1
    used = sorted(index for loader in ranks for index in loader.used)
    assert used == list(range(starts[-1] * world * COUNT))
    assert sum(loader.weight for loader in ranks) == pytest.approx(starts[-1])
    stealing = [loader.stealing for loader in ranks]
    assert left(store, stealing, len(steps), starts[-1]) <= 2 * world
    if lookahead >= max(steps):
        assert not any(loader.moved for loader in ranks), "nobody knows how far the others are"


@pytest.mark.parametrize("lookahead", [0, 3])
def test_what_the_slow_rank_loads_next_is_taken_over(store: HashStore, lookahead: int) -> None:
    fast, slow = (Stealing(store, rank, lookahead, None, by_size=False) for rank in range(2))
    mine, theirs = (list(part.steps()) for part in plan(store, 2, 0, 0, 12))
    # The slow one is in its step 1, and has loaded what it will train with next.
    for step in theirs[: 2 + lookahead]:
        assert slow.batch(step, None) == step
    for step in mine[: 4 + lookahead]:
        assert fast.batch(step, None) == step
    # The fast one is through with 4: three steps ahead it takes three quarters, rounded down.
    enlarged = fast.batch(mine[4 + lookahead], [4, 1])
    left = slow.batch(theirs[2 + lookahead], [4, 1])
    assert enlarged.indices == mine[4 + lookahead].indices + theirs[2 + lookahead].indices[2:]
    assert left.indices == theirs[2 + lookahead].indices[:2]
    assert (enlarged.weight, left.weight) == pytest.approx((0.5 + 0.5 * 4 / 6, 0.5 * 2 / 6))
