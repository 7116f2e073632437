"""Steps limited by a sum of sizes (tokens, frames, seconds) instead of a number of samples.

A step gets samples, in the epoch's order, until one more would exceed the budget. So a step's
samples depend only on which samples are left when it begins. The rest of an epoch therefore has the
same steps after any resume, whatever the number of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Sums of the same sizes in different orders differ by less than this relative error.
ROUNDING = 1e-9
# The end of a step is searched in windows of samples that grow. The first has this many samples.
_FIRST_WINDOW = 64


@dataclass(frozen=True)
class Budget:
    """Bounds on the total size of each step's samples, and perhaps of each rank's local batch.

    Args:
        tokens: the largest total size of a step over all ranks, in the unit of the sizes.
        sizes: the size λ of each sample; none is above `tokens`.
        limits: the largest total size of each rank's local batch; None: there are no limits.
    """

    tokens: float
    sizes: Floats
    limits: Floats | None = None

    def counts(self, samples: Ints, steps: int | None = None) -> Ints:
        """Return the number of samples of each step.

        Steps are filled with `samples` in the given order, until `steps` steps are full or, with
        `steps` None, until all samples are used.
        """
        if steps is None:
            return counts_within(self.sizes[samples], self.tokens)
        window = _FIRST_WINDOW * (steps + 1)
        while True:
            # Count one step more than needed, because the window's end may cut off the last step.
            counts = counts_within(self.sizes[samples[:window]], self.tokens, steps + 1)
            if len(counts) > steps or window >= len(samples):
                return counts[:steps]
            window *= 2

    def kept(self, parts: list[Ints]) -> list[Ints]:
        """Move samples between a step's local batches until none exceeds its rank's limit.

        `parts` has the planned local batch of each rank. Return each rank's new local batch. Only
        samples that do not fit on their planned rank move.
        """
        if self.limits is None:
            return parts
        samples = np.concatenate(parts)
        ranks = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        made = kept_within(ranks, self.sizes[samples], self.limits)
        if made is ranks:
            return parts
        counts = np.bincount(made, minlength=len(parts))
        return np.split(samples[np.argsort(made, kind="stable")], np.cumsum(counts)[:-1])

    def excess(self, counts: Ints, samples: Ints) -> str | None:
        """Describe the first local batch that exceeds its rank's limit; None if there is none.

        `counts` has the number of samples of each step and rank, [steps, ranks]. `samples` are
        ordered by step, then by rank.
        """
        if self.limits is None:
            return None
        part = np.repeat(np.arange(counts.size), counts.ravel())
        loads = np.bincount(part, self.sizes[samples], counts.size).reshape(counts.shape)
        steps, ranks = np.nonzero(loads > self.limits * (1 + 4 * ROUNDING))
        if not len(steps):
            return None
        step, rank = int(steps[0]), int(ranks[0])
        return (
            f"rank {rank} gets {shown(loads[step, rank])} in a step; "
            f"its limit is {shown(self.limits[rank])}"
        )


def counts_within(sizes: Floats, budget: float, steps: int | None = None) -> Ints:
    """Return the number of samples of each step within the budget.

    Steps are filled with samples of `sizes` in the given order, until `steps` steps are full or,
    with `steps` None, until all samples are used. The budget has the unit of the sizes.

    Raises:
        ValueError: a sample is larger than the budget.
    """
    counts: list[int] = []
    start, window = 0, _FIRST_WINDOW
    while start < len(sizes) and (steps is None or len(counts) < steps):
        while True:
            # Each sum starts at the first sample of its step. A running sum over the epoch would
            # have other rounding errors, so a step could depend on the steps before it.
            sums = np.cumsum(sizes[start : start + window])
            count = int(np.searchsorted(sums, budget, "right"))
            if count < len(sums) or start + len(sums) == len(sizes):
                break
            window *= 2
        if not count:
            raise ValueError(
                f"a sample of size {shown(sizes[start])} exceeds the budget, {shown(budget)}"
            )
        counts.append(count)
        start += count
        window = count + count // 2 + 8
    return np.array(counts, np.int64)


def kept_within(ranks: Ints, sizes: Floats, limits: Floats) -> Ints:
    """Reassign samples of a step so that no rank exceeds its limit; return each sample's rank.

    A rank above its limit keeps the samples that fit, largest first. Each sample that does not fit
    goes to the rank with the most room left. If `refuse_tight` accepts the limits, that rank always
    has enough room. `ranks` is the planned rank of each sample; `limits`, one per rank, are in the
    unit of `sizes`.

    Raises:
        ValueError: a sample fits on no rank.
    """
    room = limits * (1 + ROUNDING) - np.bincount(ranks, sizes, len(limits))
    full = room < 0
    if not full.any():
        return ranks
    made = ranks.copy()
    room[full] = limits[full]
    left = []
    for place in np.argsort(-sizes, kind="stable").tolist():
        rank = ranks[place]
        if not full[rank]:
            continue
        if sizes[place] <= room[rank]:
            room[rank] -= sizes[place]
        else:
            left.append(place)
    for place in left:
        rank = int(room.argmax())
        if sizes[place] > room[rank] + ROUNDING * limits[rank]:
            size = shown(sizes[place])
            raise ValueError(f"a sample of size {size} fits on no rank beside the other samples")
        made[place] = rank
        room[rank] -= sizes[place]
    return made


def refuse_tight(limits: Floats, longest: float, budget: float) -> None:
    """Reject limits of the ranks that might be too small for a step that fills the budget.

    A sample fits on no rank only if each rank has less room than the sample's size. Then the
    step's total size is above Σ_j max(0, limit_j − longest) + longest, where `longest` is the size
    of the largest sample. So each step of at most this size fits, and larger budgets are rejected.

    Raises:
        ValueError: the limits are too tight; the message gives the largest possible budget.
    """
    given = ", ".join(shown(limit) for limit in limits)
    if limits.max() < longest:
        raise ValueError(
            f"token_limits is [{given}], and the largest sample has size {shown(longest)}, which "
            "fits on no rank: raise a limit, or truncate or drop longer samples"
        )
    holds = float(np.maximum(limits - longest, 0.0).sum()) + longest
    if budget * (1 + ROUNDING) > holds * (1 + 2 * ROUNDING):
        raise ValueError(
            f"token_limits is [{given}], and the largest sample has size {shown(longest)}: only "
            f"steps of up to {shown(holds)} are sure to fit, but token_budget is "
            f"{shown(budget)}: lower token_budget to that limit, raise token_limits, or give "
            "micro_batches=True"
        )


def refuse_small(limits: Floats, longest: float) -> None:
    """Reject limits of the ranks' micro-batches that are too small for the largest sample.

    Raises:
        ValueError: a limit is below `longest`, the size of the largest sample.
    """
    if (limits < longest).any():
        rank = int((limits < longest).argmax())
        raise ValueError(
            f"token_limits is {shown(limits[rank])} on rank {rank}, and the largest sample has "
            f"size {shown(longest)}, which each rank must hold alone with micro_batches=True: "
            "raise the limit, or truncate or drop longer samples"
        )


def shown(amount: float) -> str:
    """Format an amount without rounding: 1000001, 0.1.

    A user may copy a limit from a message, and the copied limit must not be too small.
    """
    amount = float(amount)
    return str(int(amount)) if amount.is_integer() else repr(amount)


def budget_of(given: Any) -> float:
    """Validate the argument `token_budget` of `Session`.

    Raises:
        TypeError, ValueError: the argument is no finite number above 0.
    """
    if isinstance(given, bool) or not isinstance(given, Real):
        raise TypeError(f"token_budget is {given!r}: it must be a number, in the unit of the sizes")
    if not 0 < float(given) < math.inf:
        raise ValueError(f"token_budget is {given}: it must be finite and above 0")
    return float(given)


def refuse_larger(sizes: Floats, budget: float) -> None:
    """Reject a sample that no step can hold.

    Raises:
        ValueError: one of `sizes` exceeds the budget; the message names the first such sample.
    """
    larger = np.flatnonzero(sizes > budget)
    if len(larger):
        first = int(larger[0])
        raise ValueError(
            f"sizes[{first}] is {shown(sizes[first])} ({len(larger)} of {len(sizes)} samples "
            f"are too large), more than token_budget={shown(budget)}, so no step can hold that "
            f"sample: raise token_budget to {shown(sizes.max())} or more, or truncate or drop "
            "longer samples"
        )
