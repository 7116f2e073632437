"""NeMo-RL's sequence packing, written anew: how it fills bins, and which rank gets which bin.

Each bin is a micro-batch of at most `capacity` tokens. Ranks get the bins of a step in turn, as
many each. What is followed is NVIDIA-NeMo/RL at 02508a4, Apache-2.0: the packers of
``nemo_rl/data/packing/algorithms.py``, and ``BatchedDataDict.shard_by_batch_size`` in
``nemo_rl/distributed/batched_data_dict.py`` with a pad multiple of 1. It needs Ray, vLLM and more,
so it is not called itself.
"""

from __future__ import annotations

import random
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bins = list[list[int]]  # places of samples
Packer = Callable[[Sequence[int], int], Bins]


def concatenative(sizes: Sequence[int], capacity: int) -> Bins:
    """In the given order, a new bin where the newest has no room."""
    bins: Bins = []
    room = 0
    for place, size in enumerate(sizes):
        if not bins or size > room:
            bins.append([])
            room = capacity
        bins[-1].append(place)
        room -= size
    return bins


def first_fit(sizes: Sequence[int], capacity: int, order: Iterable[int]) -> Bins:
    """Each sample, in this order, to the first bin with room."""
    bins: Bins = []
    rooms: list[int] = []
    for place in order:
        fitting = (k for k, room in enumerate(rooms) if room >= sizes[place])
        if (at := next(fitting, None)) is None:
            at = len(bins)
            bins.append([])
            rooms.append(capacity)
        bins[at].append(place)
        rooms[at] -= sizes[place]
    return bins


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> Bins:
    """The largest sample first."""
    return first_fit(sizes, capacity, _descending(range(len(sizes)), sizes))


def first_fit_shuffle(sizes: Sequence[int], capacity: int) -> Bins:
    """In a random order, the same for the same sizes."""
    return first_fit(sizes, capacity, random.Random(0).sample(range(len(sizes)), len(sizes)))


def modified_first_fit_decreasing(sizes: Sequence[int], capacity: int) -> Bins:
    """After Johnson and Garey (1985), with NeMo-RL's own end.

    Samples above a half of the capacity begin a bin each, get one above a third beside them or two
    above a sixth, and are filled up. What is left goes to the emptiest of further bins.
    """
    falling = _descending(range(len(sizes)), sizes)
    bins = [[place] for place in falling if 2 * sizes[place] > capacity]
    medium = [place for place in falling if 2 * sizes[place] <= capacity < 3 * sizes[place]]
    small = [place for place in falling if 3 * sizes[place] <= capacity < 6 * sizes[place]]
    tiny = [place for place in falling if 6 * sizes[place] <= capacity]
    rooms = [capacity - sizes[each[0]] for each in bins]

    def fill(at: int, rest: list[int], place: int | None) -> None:
        if place is not None:
            rest.remove(place)
            bins[at].append(place)
            rooms[at] -= sizes[place]

    for at in range(len(bins)):
        fill(at, medium, _largest(medium, sizes, rooms[at]))
    for at in reversed(range(len(bins))):
        smallest = small[-2:]
        fits = len(smallest) == 2 and sum(sizes[place] for place in smallest) <= rooms[at]
        if len(bins[at]) == 1 and fits:
            fill(at, small, small[-1])
            fill(at, small, _largest(small, sizes, rooms[at]))
    rest = _descending(medium + small + tiny, sizes)
    for at in range(len(bins)):
        while (place := _largest(rest, sizes, rooms[at])) is not None:
            fill(at, rest, place)
    return bins + _emptiest_first(rest, sizes, capacity)


def _emptiest_first(falling: list[int], sizes: Sequence[int], capacity: int) -> Bins:
    """Each sample to the emptiest bin, or to a new one if it does not fit there."""
    bins: list[tuple[int, list[int]]] = []  # what each holds, ascending
    for place in falling:
        held, members = 0, []
        if bins and bins[0][0] + sizes[place] <= capacity:
            held, members = bins.pop(0)
        members.append(place)
        insort(bins, (held + sizes[place], members), key=lambda each: each[0])
    return [members for _, members in bins]


def _descending(places: Iterable[int], sizes: Sequence[int]) -> list[int]:
    return sorted(places, key=lambda place: -sizes[place])


def _largest(falling: list[int], sizes: Sequence[int], room: int) -> int | None:
    """The first that fits of samples in descending order of size; None: none does."""
    return next((place for place in falling if sizes[place] <= room), None)


def in_multiples(bins: Bins, world: int) -> Bins:
    """As many bins for each rank: new ones get a sample each, of the bin that has the most.

    Where there are too few samples for that, which NeMo-RL refuses, some ranks have a bin less.
    """
    made = [list(each) for each in bins]
    sources = sorted(range(len(bins)), key=lambda at: (-len(bins[at]), -at))
    wanted = -(-max(len(bins), world) // world) * world
    while len(made) < wanted and sources:
        if len(made[sources[0]]) > 1:
            made.append([made[sources[0]].pop()])
        else:
            sources.pop(0)
    return made


def packed(batch: Ints, sizes: Ints, world: int, capacity: int, packer: Packer) -> list[Ints]:
    """A step's samples for each rank.

    Args:
        batch: samples of the step, [n].
        sizes: λ of each sample, [N], none more than `capacity`.
        world: number of ranks.
        capacity: of a micro-batch.
        packer: fills bins.
    """
    bins = in_multiples(packer(sizes[batch].tolist(), capacity), world)
    places = [list(chain.from_iterable(bins[rank::world])) for rank in range(world)]
    return [batch[np.array(of_rank, np.int64)] for of_rank in places]
