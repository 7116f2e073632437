"""Progress of each rank, and the comparison that finds ranks that are out of step.

Ranks reduce gradients together: the n-th reduction of one rank is matched with the n-th reduction
of each other rank. If one rank leaves out a backward pass, its reduction in the next step would be
matched with the other ranks' reduction in this step, and the sums would mix two steps. Each rank
therefore keeps a `RankProgress`, and publishes it once a second; rank 0 compares them
(`paceline.train.features.lost_ranks`):

- `conflict` returns why the ranks' reductions can never match again. It does not use elapsed time.
- `laggards` returns the ranks that the others are waiting for, once the wait is long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

# Each list of `RankProgress` keeps this many of its newest entries. A few entries are enough,
# because ranks stop within two reductions of a conflict.
KEPT_ENTRIES = 32

_SKIP = (
    "Every rank must make the same backward passes in each step: to skip a batch on one rank, "
    "multiply its loss by 0 instead of leaving out the pass, or let all ranks decide together, "
    "for example by an all-reduce"
)
_LEAVE = (
    "All ranks must leave the loop over the loader after the same step: let them decide together, "
    "for example by an all-reduce of the stopping criterion"
)


class Departure(msgspec.Struct, array_like=True, frozen=True):
    """A rank's departure from its loop over the loader, before the loop's end."""

    epoch: int
    step: int
    # True if an exception ended the loop, False for a break or a return.
    raised: bool


class RankProgress(msgspec.Struct, array_like=True):
    """Steps, reductions and departures of one rank."""

    # The step that the rank is in, or was in last.
    step: int = -1
    epoch: int = 0
    in_loop: bool = False
    # Newest step whose loop body has ended or was left.
    finished: int = -1
    # True under a relaxed policy, which does not reduce gradients in every step.
    relaxed: bool = False
    # A triple for each of the newest reductions: its number, its step, and the number of the
    # wrapped model. The rank has begun these reductions, but may still be waiting for other ranks
    # in the last one.
    newest: list[tuple[int, int, int]] = []
    # A pair for each range of steps without a backward pass: its first and its last step.
    skipped: list[tuple[int, int]] = []
    departures: list[Departure] = []
    closed: bool = False
    phase: str = ""
    # Seconds that the rank has been in `phase` of `step`.
    since_s: float = 0.0
    # Number of times that the rank has published its progress.
    beat: int = 0
    # The host and PID namespace in which the process runs, and its PID there.
    place: str = ""
    process: int = 0

    @property
    def reductions(self) -> int:
        """Number of reductions that have begun."""
        return self.newest[-1][0] + 1 if self.newest else 0

    def reduce(self, step: int, model: int) -> None:
        """Record the start of a reduction."""
        newest = self.newest
        newest.append((newest[-1][0] + 1 if newest else 0, step, model))
        if len(newest) > KEPT_ENTRIES:
            del newest[0]

    def skip(self, step: int) -> None:
        """Record a step without a backward pass."""
        if self.skipped and self.skipped[-1][1] == step - 1:
            self.skipped = [*self.skipped[:-1], (self.skipped[-1][0], step)]
        else:
            self.skipped = [*self.skipped[1 - KEPT_ENTRIES :], (step, step)]

    def leave(self, raised: bool) -> None:
        """Record that the rank left its loop in the current step."""
        left = Departure(self.epoch, self.step, raised)
        self.departures = [*self.departures[1 - KEPT_ENTRIES :], left]
        self.finished = max(self.finished, self.step)

    def at(self, reduction: int) -> tuple[int, int] | None:
        """Return a reduction's step and model; None if it has not begun, or is not in `newest`."""
        return next((at[1:] for at in self.newest if at[0] == reduction), None)

    def passes(self, step: int) -> int:
        """Return the number of reductions in one of the newest steps."""
        return sum(at[1] == step for at in self.newest)

    def has_skipped(self, step: int) -> bool:
        """Return True if a step had no backward pass."""
        return any(first <= step <= last for first, last in self.skipped)


def conflict(of: Mapping[int, RankProgress]) -> str | None:
    """Describe, with rank and step, why reductions can never match again; None: they can match."""
    return _left(of) or _closed(of) or _unmatched(of)


def skips(of: Mapping[int, RankProgress]) -> Iterator[tuple[int, int]]:
    """Yield rank and step of each backward pass that only some ranks skipped.

    Only ranks under a relaxed policy are considered.
    """
    for rank, progress in of.items():
        others = [other for number, other in of.items() if number != rank]
        if not progress.relaxed or not others:
            continue
        for step, _ in progress.skipped:
            if all(other.finished >= step for other in others) and not all(
                other.has_skipped(step) for other in others
            ):
                yield rank, step


def laggards(of: Mapping[int, RankProgress], waits: Sequence[str], patience_s: float) -> list[int]:
    """Return the ranks that do not wait, if another rank has waited at least `patience_s` seconds.

    Return an empty list if no rank has waited that long. `waits` are the phases in which a rank
    waits for others.
    """
    waiting = {rank for rank, progress in of.items() if progress.phase in waits}
    if not any(of[rank].since_s >= patience_s for rank in waiting):
        return []
    return [rank for rank in of if rank not in waiting]


def described(rank: int, progress: RankProgress) -> str:
    """Describe which step a rank is in, and what it does there."""
    if progress.closed:
        return f"rank {rank} has closed its session after step {progress.step}"
    if progress.step < 0:
        return f"rank {rank} has not begun its first step"
    if progress.in_loop and progress.step > progress.finished:
        return f"rank {rank} is in step {progress.step} ({progress.phase})"
    if progress.in_loop:
        return f"rank {rank} is after step {progress.step} ({progress.phase})"
    return f"rank {rank} is outside its loop after step {progress.step}"


def _left(of: Mapping[int, RankProgress]) -> str | None:
    for rank, progress in of.items():
        for departure in progress.departures:
            how = "an error ended its loop" if departure.raised else "it left its loop"
            for other, beside in of.items():
                if beside.epoch == departure.epoch and beside.step > departure.step:
                    why = (
                        f"rank {rank} is out of step: {how} in step {departure.step}, but rank "
                        f"{other} continued to step {beside.step}"
                    )
                    return why if departure.raised else f"{why}. {_LEAVE}"
    return None


def _closed(of: Mapping[int, RankProgress]) -> str | None:
    for rank, progress in of.items():
        for other, beside in of.items():
            if progress.closed and beside.in_loop and beside.epoch > progress.epoch:
                return (
                    f"rank {rank} is out of step: it closed its session after epoch "
                    f"{progress.epoch}, but rank {other} continued to epoch {beside.epoch}. "
                    f"{_LEAVE}"
                )
    return None


def _unmatched(of: Mapping[int, RankProgress]) -> str | None:
    """Describe a reduction that one rank has begun and another has left out, or return None."""
    last = min(of, key=lambda rank: (of[rank].reductions, rank))
    fewest = of[last].reductions
    reduced = {
        rank: at for rank, progress in of.items() if (at := progress.at(fewest - 1)) is not None
    }
    if len(set(reduced.values())) > 1:
        return _different(of, reduced)
    for other, beside in of.items():
        if (at := beside.at(fewest)) is None:
            continue
        step = at[0]
        for rank, progress in of.items():
            past = progress.step > step or progress.finished >= step
            if progress.reductions == fewest and past:
                return _uneven(of, rank, other, step)
    return None


def _different(of: Mapping[int, RankProgress], reduced: Mapping[int, tuple[int, int]]) -> str:
    """Describe two ranks whose n-th reductions are of different steps or of different models."""
    early = min(reduced, key=lambda rank: (reduced[rank][0], rank))
    late = max(reduced, key=lambda rank: (reduced[rank][0], reduced[rank] != reduced[early], -rank))
    step = reduced[early][0]
    if reduced[late][0] > step:
        return _uneven(of, late, early, step)
    return (
        f"ranks are out of step: in step {step} rank {late} makes the backward pass of a different "
        f"wrapped model than rank {early}. {_SKIP}"
    )


def _uneven(of: Mapping[int, RankProgress], fewer: int, more: int, step: int) -> str:
    """Describe two ranks that made different numbers of backward passes in a step."""
    few, many = of[fewer].passes(step), of[more].passes(step)
    left = [at for at in of[fewer].departures if at.step == step]
    if left:
        how = "an error ended its loop" if left[-1].raised else "it left its loop"
        why = (
            f"rank {fewer} is out of step: {how} in step {step} before the backward pass that "
            f"rank {more} made there"
        )
        return why if left[-1].raised else f"{why}. {_LEAVE}"
    if few == 0:
        return (
            f"rank {fewer} is out of step: it made no backward pass in step {step}, but rank "
            f"{more} did. {_SKIP}"
        )
    alike = sum(progress.passes(step) == many for progress in of.values())
    as_before = few == of[fewer].passes(step - 1)
    # If the rank with more backward passes differs from the majority, it is the one out of step.
    if 2 * alike < len(of) or (2 * alike == len(of) and as_before):
        fewer, more, few, many = more, fewer, many, few
    passes = f"{few} backward pass{'es' if few > 1 else ''}"
    return (
        f"rank {fewer} is out of step: it made {passes} in step {step}, but rank {more} made "
        f"{many}. {_SKIP}"
    )
