"""Balanced partitions for training loops of your own: `partition`, and `Speeds` that it may use."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paceline.core.cost import Cost
from paceline.policies.jit import compiled
from paceline.policies.predict.linear import LinearPredictor
from paceline.policies.solve.balance import grouped, improve, search
from paceline.policies.solve.balance import partition as solve
from paceline.policies.solve.explore import explore
from paceline.policies.solve.workers import Workers, most_of
from paceline.policies.values import Feedback, Floats, Ints, Models

_WINDOW = 64  # steps
# Maximum number of items times ranks for which the largest differencing method and the greedy cut
# (`_largest_first`) are tried. Each takes about a second at its maximum.
_MOST_DIFFERENCES = 2_000_000
_MOST_STEPS = 50_000_000
# Maximum number of items for branch and bound, and of its nodes, which take 0.1 s.
_FEW_ITEMS = 24
_SEARCH_NODES = 1_000_000
# Nothing more is tried if the slowest rank takes less than this fraction longer than it would with
# a perfectly even division.
_CLOSED = 1e-9


class Speeds:
    """Speeds of ranks, learned from the measured times of their batches, for `partition`.

    Each rank's time is modelled as a·Λ + c·n + b seconds for n samples of total cost Λ; the newest
    64 steps count. Until each rank has been measured, all ranks count as equal.

        speeds = paceline.Speeds(ranks=8)
        parts = paceline.partition(costs, 8, speeds=speeds)
        ...
        speeds.add([costs[part].sum() for part in parts], seconds, [len(part) for part in parts])

    Args:
        ranks: number of ranks, W.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = _whole("ranks", ranks, 1)
        self._steps: list[Floats] = []

    def add(
        self,
        loads: Sequence[float] | Floats,
        seconds: Sequence[float] | Floats,
        counts: Sequence[int] | Ints,
    ) -> None:
        """Add a step.

        Args:
            loads: total cost of each rank's batch, [W].
            seconds: time of each rank's forward and backward pass, [W] s, without waiting for other
                ranks.
            counts: number of samples in each rank's batch, [W].

        Raises:
            ValueError: a length is not W, or a number is negative or not finite.
        """
        given = {"loads": loads, "seconds": seconds, "counts": counts}
        row = np.array([_numbers(name, values, self.ranks) for name, values in given.items()])
        self._steps = [*self._steps[1 - _WINDOW :], row]

    def models(self) -> Models:
        """Return the ranks' performance models."""
        if not self._steps:
            return Models.unknown(self.ranks)
        steps = len(self._steps)
        loads, seconds, counts = (part.ravel() for part in np.stack(self._steps, axis=1))
        zeros = np.zeros(steps * self.ranks)
        feedback = Feedback(
            step=np.repeat(np.arange(steps), self.ranks),
            rank=np.tile(np.arange(self.ranks), steps),
            samples=counts.astype(np.int64),
            load=loads,
            compute_s=seconds,
            squares=zeros,
            longest=zeros,
            sync_s=zeros,
            step_s=zeros,
        )
        return LinearPredictor(cost="sum").fit(feedback, self.ranks)


def partition(
    costs: Sequence[float] | Floats,
    ranks: int,
    *,
    speeds: Sequence[float] | Floats | Speeds | None = None,
    limits: int | Sequence[int] | Ints | None = None,
    equal_count: bool = False,
    padded: bool = False,
) -> list[Ints]:
    """Divide items among ranks so that the slowest rank ends as early as possible.

    It replaces verl's ``get_seqlen_balanced_partitions`` and greedy cuts. It is a pure function
    that imports no torch: equal arguments give equal results.

        parts = paceline.partition([900, 80, 400, 410, 90], 2)    # [[0, 1], [2, 3, 4]]

    Up to 2 million items times ranks, the slowest rank ends no later than with the largest
    differencing method or the greedy cut, where these methods apply. (An implementation of them
    that chooses differently among equal sums may have another result.) For up to 24 items the
    result is optimal as a rule: branch and bound ends after a million nodes, which take 0.1 s. With
    more items, the search ends with a perfectly even division, or after some 0.1 s. Padded batches
    have a solver of their own, which is optimal for up to 10 ranks, and for equal ranks.

    If ranks must agree, compute the parts on one rank and broadcast them: processors of different
    makers may round the fits of `Speeds` differently.

    Args:
        costs: cost of each of the n items, in any unit, [n]; with `padded`, its length.
        ranks: number of ranks, W.
        speeds: relative speed of each rank, above 0, [W], or `Speeds`; None: all are equal.
        limits: maximum number of items that fit into a rank's memory: one number, or one for each
            rank; None: no limit.
        equal_count: each rank gets n / W items; if W does not divide n, the fastest ranks with room
            get one more.
        padded: a rank computes its number of items times its longest item, because its batch is
            padded. Then give `Speeds.add` these products as loads.

    Returns:
        The indices of each rank's items, ascending, [W]. With fewer items than ranks, some are
        empty.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """
    ranks = _whole("ranks", ranks, 1)
    sizes = _numbers("costs", costs, None)
    models = _models(speeds, ranks)
    if padded:
        models = Models(models.a, models.c, models.b, models.known, Cost(padded=True))
    most = _limits(limits, ranks, len(sizes))
    counts = None
    if equal_count:
        counts = _equal_counts(len(sizes), models, most)
    if not len(sizes):
        return [np.empty(0, np.int64) for _ in range(ranks)]
    # The solver divides times, so it needs costs above 0; an item without a cost may go anywhere.
    positive = np.where(sizes > 0, sizes, np.min(sizes[sizes > 0], initial=1.0) * 1e-9)
    assigned = solve(positive, models, counts, most)
    if not padded:
        assigned = _best(positive, models, counts, most, assigned)
    items, of_ranks = grouped(assigned, ranks)
    return np.split(items, np.cumsum(of_ranks)[:-1])


def _equal_counts(items: int, models: Models, limits: Ints | None) -> Ints:
    ranks = models.world
    counts = np.full(ranks, items // ranks)
    room = np.full(ranks, items) if limits is None else limits
    more = np.flatnonzero(room > counts)
    more = more[np.argsort(models.a[more], kind="stable")][: items % ranks]
    counts[more] += 1
    if counts.sum() < items or (counts > room).any():
        raise ValueError(
            f"limits={room.tolist()}: equal_count gives each rank {items // ranks} items, and "
            f"{items % ranks} ranks one more"
        )
    return counts


def _best(
    costs: Floats, models: Models, counts: Ints | None, limits: Ints | None, found: Ints
) -> Ints:
    """Improve the assignment `found` by other methods and a longer search; return the best, [n]."""
    ranks = models.world
    most = most_of(limits if counts is None else counts, len(costs), ranks)
    workers = Workers.of(models, most)
    bound = float(max(costs.sum() / (1 / models.a).sum(), costs.max() * models.a.min()))
    if ranks == 1 or _slowest_s(costs, models, found) <= bound * (1 + _CLOSED):
        return found
    starts = []
    if len(costs) * ranks <= _MOST_STEPS:
        starts.append(_largest_first(np.argsort(-costs, kind="stable"), costs, workers))
    equal = _are_equal(models) and limits is None and (counts is None or _are_equal(counts))
    if equal and len(costs) * ranks <= _MOST_DIFFERENCES:
        starts.append(_differenced(costs, ranks, equal_count=counts is not None))
    improved = [improve(costs, models, start, counts, limits) for start in starts]
    found = min([found, *starts, *improved], key=lambda each: _slowest_s(costs, models, each))
    found = explore(costs, workers, found, bound * (1 + _CLOSED))
    if len(costs) <= _FEW_ITEMS:
        order = np.argsort(-costs, kind="stable")
        ranks_of = found[order]
        search(costs[order], workers, bound, ranks_of, _SEARCH_NODES)
        found[order] = ranks_of
    return found


def _slowest_s(costs: Floats, models: Models, assigned: Ints) -> float:
    load = np.bincount(assigned, costs, models.world)
    count = np.bincount(assigned, minlength=models.world)
    time_s = models.a * load + models.c * count + models.b * (count > 0)
    return float(time_s.max())


def _are_equal(values: Models | Ints) -> bool:
    if isinstance(values, Models):
        return all(np.ptp(part) == 0 for part in (values.a, values.c, values.b))
    return bool(np.ptp(values) == 0)


def _differenced(costs: Floats, ranks: int, *, equal_count: bool) -> Ints:
    """Assign items by the largest differencing method of Karmarkar and Karp, [n].

    Each partial solution has `ranks` sums, descending. The two with the largest spreads are joined,
    the largest sum of one with the smallest of the other, until one is left. At first, each partial
    solution has one item or, with `equal_count`, one item for each rank.
    """
    order = np.argsort(-costs, kind="stable")
    width = ranks if equal_count else 1
    leaves = [order[at : at + width] for at in range(0, len(order), width)]
    sums = [np.pad(costs[leaf], (0, ranks - len(leaf))) for leaf in leaves]
    heap = [(float(each[-1] - each[0]), node) for node, each in enumerate(sums)]
    heapq.heapify(heap)
    joins: list[tuple[int, int, Ints]] = []
    while len(heap) > 1:
        (_, first), (_, second) = heapq.heappop(heap), heapq.heappop(heap)
        joined = sums[first] + sums[second][::-1]
        by_sum = np.argsort(-joined, kind="stable")
        sums.append(joined[by_sum])
        joins.append((first, second, by_sum))
        heapq.heappush(heap, (float(sums[-1][-1] - sums[-1][0]), len(sums) - 1))
    # The rank of each sum of each partial solution, from the last solution back to the first ones.
    rank_of = {len(sums) - 1: np.arange(ranks)}
    for node in range(len(sums) - 1, len(leaves) - 1, -1):
        first, second, by_sum = joins[node - len(leaves)]
        of_first = np.empty(ranks, np.int64)
        of_first[by_sum] = rank_of.pop(node)
        rank_of[first], rank_of[second] = of_first, of_first[::-1]
    assigned = np.empty(len(costs), np.int64)
    for node, leaf in enumerate(leaves):
        assigned[leaf] = rank_of[node][: len(leaf)]
    return assigned


@compiled
def _largest_first(order: Ints, costs: Floats, w: Workers) -> Ints:
    """Assign each item, in the given order, to the rank with room that then ends first, [n]."""
    assigned, time_s, count = np.empty(len(costs), np.int64), w.b.copy(), np.zeros(len(w.a))
    for item in order:
        least, rank = np.inf, 0
        for j in range(len(w.a)):
            then = time_s[j] + w.a[j] * costs[item] + w.c[j]
            if then < least and count[j] < w.most[j]:
                least, rank = then, j
        assigned[item] = rank
        time_s[rank] = least
        count[rank] += 1
    return assigned


def _models(speeds: Sequence[float] | Floats | Speeds | None, ranks: int) -> Models:
    zeros = np.zeros(ranks)
    if speeds is None:
        return Models(np.ones(ranks), zeros, zeros)
    if isinstance(speeds, Speeds):
        if speeds.ranks != ranks:
            raise ValueError(f"speeds: they are of {speeds.ranks} ranks, not of {ranks}")
        return speeds.models()
    values = _numbers("speeds", speeds, ranks)
    if not (values > 0).all():
        raise ValueError(f"speeds={values.tolist()}: give numbers above 0")
    return Models(1 / values, zeros, zeros)


def _limits(
    limits: int | Sequence[int] | Ints | None, ranks: int, items: int
) -> npt.NDArray[np.int64] | None:
    if limits is None:
        return None
    if isinstance(limits, int):
        limits = [limits] * ranks
    most = _numbers("limits", limits, ranks).astype(np.int64)
    if most.sum() < items:
        raise ValueError(f"limits: all ranks together hold {most.sum()} items, not {items}")
    return most


def _numbers(name: str, values: Sequence[float] | Floats | Ints, count: int | None) -> Floats:
    try:
        made = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"{name}: give a list of numbers") from None
    if made.ndim != 1 or (count is not None and len(made) != count):
        wanted = "a list of numbers" if count is None else f"{count} numbers, one for each rank"
        raise ValueError(f"{name}: its shape is {list(made.shape)}; give {wanted}")
    if not np.isfinite(made).all() or (made < 0).any():
        wrong = int(np.flatnonzero(~(np.isfinite(made) & (made >= 0)))[0])
        raise ValueError(f"{name}[{wrong}] = {made[wrong]}: give finite numbers, 0 or more")
    return made


def _whole(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name}={value!r}: give a whole number")
    if value < least:
        raise ValueError(f"{name}={value}: give {least} or more")
    return int(value)
