"""`paceline-relaxed`: batches of `paceline`, and pairwise averaging while ranks still wait.

With the scheduler's batches, three causes of waiting remain: ranks that are slow at different
times, a rank whose smallest batch is still too large for it, and the all-reduce itself. Where ranks
wait long, each rank steps independently, and after each step two replicas become their mean
(AD-PSGD, Lian et al. 2018). No gradient is lost, no rank waits until another rank has computed, and
ranks exchange replicas while they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from paceline.policies.base import BatchesOf, Choice, Feedback, Floats, Policy, Preset
from paceline.policies.presets.relaxed import RelaxedParameters
from paceline.policies.registry import make as policy_of
from paceline.wire.synchronisation import ALLREDUCE, Pairwise, Synchronisation

# Number of blocks of steps in the jackknife; blocks, because slowdowns last for several steps.
_BLOCKS = 8
# The 97.5 % quantile of Student's t with `_BLOCKS` − 1 degrees of freedom.
_T_OF_BLOCKS = 2.365
# Minimum number of measured steps from which the chooser compares the two synchronisations.
_FEWEST_MEASURED = 2 * _BLOCKS
# The all-reduce is used again after this many consecutive choices against the relaxed
# synchronisation.
_AGREE = 2
# A try of the relaxed synchronisation with too few usable steps ends after this number of segments,
# and this number of seconds counts as its duration.
_BLIND_SEGMENTS, _BLIND_S = 16, 60.0
# Pause after a try of the relaxed synchronisation that saved too little, as a multiple of the try's
# duration. The pause doubles with each further such try.
_REST = 20.0


class _ChoiceSteps(NamedTuple):
    """Measurements of the newest steps of the synchronisation in force.

    `step_s` is wall time. `whole` is False for steps in which a rank has no compute time, because
    other ranks took over its batch.
    """

    compute_s: Floats  # [S, W]
    load: Floats  # [S, W]
    # Time of waiting for other ranks and of exchanging gradients.
    sync_s: Floats  # [S, W]
    step_s: Floats  # [S, W]
    whole: npt.NDArray[np.bool_]  # [S]

    def only(self, rows: npt.NDArray[np.bool_]) -> _ChoiceSteps:
        columns = (self.compute_s[rows], self.load[rows], self.sync_s[rows], self.step_s[rows])
        return _ChoiceSteps(*columns, self.whole[rows])

    @property
    def taken_s(self) -> float:
        """Mean wall time of a step on the slowest rank, for which all ranks wait in the end."""
        return float(self.step_s.mean(axis=0).max())

    @property
    def slowest_s(self) -> float:
        rows = self.compute_s[self.whole] if self.whole.any() else self.compute_s
        return float(rows.max(axis=1).mean())

    def computing_s(self, *, shared: bool) -> float:
        """Return the time in which the ranks compute the work of one step if no rank waits.

        If fast ranks take over work of slow ranks (`shared`), the ranks' loads per second add up.
        If not, the result is the time of the slowest rank.
        """
        if not shared:
            return float(self.compute_s.mean(axis=0).max())
        load, compute_s = self.load.sum(axis=0), self.compute_s.sum(axis=0)
        per_s = float((load[compute_s > 0] / compute_s[compute_s > 0]).sum())
        rows = self.load[self.whole] if self.whole.any() else self.load
        return float(rows.sum(axis=1).mean()) / max(per_s, 1e-30)


class _ChoiceMemory(msgspec.Struct, forbid_unknown_fields=True):
    # True while the relaxed synchronisation is in force.
    relaxed: bool = False
    # Number of segments since the last change of the synchronisation.
    segments: int = 0
    # First step whose times are measured under the synchronisation in force.
    since: int = 0
    # Number of consecutive choices against the synchronisation in force.
    against: int = 0
    # Time in seconds of a step's exchange of gradients, last measured under the all-reduce.
    exchange_s: float = 0.0
    # Time in seconds of a step that is neither computing nor exchange, last measured under the
    # all-reduce: data loading, and the script itself.
    rest_s: float = 0.0
    # First step whose time is not yet included in `tried_s` and `wait_s`.
    seen: int = 0
    # Time in seconds since the relaxed synchronisation came into force; 0 under the all-reduce.
    tried_s: float = 0.0
    # True if the relaxed synchronisation has saved enough since it came into force.
    proved: bool = False
    # Time in seconds until the relaxed synchronisation may be tried again.
    wait_s: float = 0.0
    # Number of tries that did not save enough.
    wrong: int = 0


@dataclass(frozen=True)
class Measured:
    """A chooser that uses relaxed synchronisation while this surely saves enough time.

    The time under the synchronisation in force is measured; the time under the other
    synchronisation is estimated. A step under the all-reduce is estimated to take the compute time
    of its slowest rank, plus the time of the exchange and of everything else, such as data loading;
    both were last measured under the all-reduce. A relaxed step is estimated to take the time that
    all ranks together need for the step's work, or the time of the slowest rank if ranks cannot
    take over batches. The exchange adds no time, because it normally runs while ranks compute.

    If the relaxed synchronisation saves less than `back`, the chooser returns to the all-reduce. If
    the relaxed synchronisation never saved enough, it is tried again after 20 times the duration of
    the try. This pause doubles with each further try that does not save enough, so tries add at
    most a few per cent to the run time.

    "Surely" means that the whole 95 % interval of the saved time is above `saving`; for a return to
    the all-reduce, the whole interval must be below `back`. The interval can be too narrow, because
    all steps of a segment are recorded with the same wall time if ranks take over batches.
    Therefore two consecutive choices must agree before the chooser returns to the all-reduce.

    Args:
        saving: fraction of the time for the same work that the relaxed synchronisation must save.
        back: saved fraction of the time below which the chooser returns to the all-reduce. A value
            above `saving` counts as `saving`.
        steps: number of the newest complete steps whose times are compared.
        hold: minimum number of segments between two changes.
        first: first step of the segment for which the choice is made.
        uneven: true if fast ranks take over batches under the relaxed synchronisation.
    """

    relaxed: Synchronisation
    saving: float
    back: float
    steps: int
    hold: int
    first: int = 0
    uneven: bool = True

    def on_steps(self, first: int, *, uneven: bool) -> Measured:
        """See `StepsChooser.on_steps`."""
        return replace(self, first=first, uneven=uneven)

    def choose(self, feedback: Feedback, world: int, memory: Mapping[str, Any]) -> Choice:
        """See `Chooser.choose`."""
        now = _recall(memory)
        if world == 1:
            return self._choice(now, "there is only one rank")
        # In the first segment of relaxed synchronisation, ranks do not take over batches yet.
        if now.segments <= 1:
            now.since = now.seen = self.first
        steps = self._known(feedback, world, now)
        if steps is None:
            words = f"fewer than {_FEWEST_MEASURED} steps have been measured since the last change"
            if now.relaxed and now.segments >= _BLIND_SEGMENTS:
                words, now.tried_s = f"pairwise averaging was tried, but {words}", _BLIND_S
                self._change(now)
            return self._choice(now, words)
        self._count_time(now, steps, int(feedback.step[-1]))
        if not now.relaxed:
            now.exchange_s = float(steps.sync_s.min(axis=1).mean())
            now.rest_s = max(0.0, steps.taken_s - steps.slowest_s - now.exchange_s)
        gain = self._gain(steps, now)
        error = _half_interval(len(steps.step_s), lambda rows: self._gain(steps.only(rows), now))
        words = self._words(steps, now, f"{gain:.2f} times the throughput (± {error:.2f})")
        saves, loses = 1 / (1 - self.saving), 1 / (1 - min(self.back, self.saving))
        if now.relaxed:
            now.against = now.against + 1 if gain + error < loses else 0
            now.proved |= gain > saves
            wants = now.against < _AGREE
        else:
            wants = gain - error > saves and not now.wait_s
        if wants != now.relaxed and now.segments >= self.hold:
            self._change(now)
        return self._choice(now, words)

    def _known(self, feedback: Feedback, world: int, now: _ChoiceMemory) -> _ChoiceSteps | None:
        rows = feedback.by_step(world)
        timed = np.isfinite(rows.step_s).all(axis=1) & (rows.step_s > 0).any(axis=1)
        good = timed & (rows.step[:, 0] >= now.since)
        good &= (rows.compute_s.max(axis=1, initial=0.0) > 0) & (rows.load.sum(axis=1) > 0)
        # A rank that has samples but no time recompiled code in the step. Without the rank's time,
        # the step would seem too fast.
        good &= ~((rows.samples > 0) & (rows.compute_s <= 0)).any(axis=1)
        newest = np.flatnonzero(good)[-self.steps :]
        newest = newest[len(newest) % _BLOCKS :]
        if len(newest) < _FEWEST_MEASURED:
            return None
        compute_s = rows.compute_s[newest]
        # If ranks take over batches, one rank may compute several batches in a step and another
        # rank none. The record of the other rank then has no compute time.
        shared = now.relaxed and self.uneven
        whole: Any = (compute_s > 0).all(axis=1) if shared else np.ones(len(newest), bool)
        columns = (rows.load[newest], rows.sync_s[newest], rows.step_s[newest])
        return _ChoiceSteps(compute_s, *columns, whole)

    def _count_time(self, now: _ChoiceMemory, steps: _ChoiceSteps, newest: int) -> None:
        passed_s = max(0, newest + 1 - now.seen) * steps.taken_s
        now.seen = max(now.seen, newest + 1)
        if now.relaxed:
            now.tried_s += passed_s
        else:
            now.wait_s = max(0.0, now.wait_s - passed_s)

    def _change(self, now: _ChoiceMemory) -> None:
        # This try saved enough time until conditions changed, so forget earlier tries that did not.
        if now.proved:
            now.wrong = 0
        elif now.relaxed:
            now.wait_s = _REST * 2**now.wrong * now.tried_s
            now.wrong = min(now.wrong + 1, 10)
        now.proved = False
        now.relaxed, now.segments, now.since = not now.relaxed, 0, self.first
        now.against, now.tried_s = 0, 0.0

    def _gain(self, steps: _ChoiceSteps, now: _ChoiceMemory) -> float:
        """Return the work per second under the relaxed synchronisation ÷ under the all-reduce."""
        computing_s = steps.computing_s(shared=self.uneven)
        if not now.relaxed:
            return steps.taken_s / (computing_s + now.rest_s)
        rest_s = min(now.rest_s, max(0.0, steps.taken_s - computing_s))
        return (steps.slowest_s + now.exchange_s + rest_s) / steps.taken_s

    def _words(self, steps: _ChoiceSteps, now: _ChoiceMemory, gain: str) -> str:
        if now.relaxed:
            reduced_s = self._gain(steps, now) * steps.taken_s
            return (
                f"the work of a step takes {_in_ms(steps.taken_s)}; with all-reduce it would take "
                f"{_in_ms(reduced_s)}: {gain}"
            )
        alone_s = steps.computing_s(shared=self.uneven) + now.rest_s
        words = (
            f"a step takes {_in_ms(steps.taken_s)}: its slowest rank computes for "
            f"{_in_ms(steps.slowest_s)}, the exchange takes {_in_ms(now.exchange_s)}; without "
            f"waiting, ranks would need {_in_ms(alone_s)}: pairwise averaging might give {gain}"
        )
        if now.wait_s:
            words += f"; it was tried and saved too little: next try in {now.wait_s:.0f} s"
        return words

    def _choice(self, now: _ChoiceMemory, words: str) -> Choice:
        how, name = (self.relaxed, self.relaxed.name) if now.relaxed else (ALLREDUCE, "all-reduce")
        now.segments += 1
        return Choice(how, f"{name}: {words}", msgspec.to_builtins(now))


def _recall(memory: Mapping[str, Any]) -> _ChoiceMemory:
    try:
        return msgspec.convert(memory, _ChoiceMemory)
    except msgspec.ValidationError:
        return _ChoiceMemory()


def _half_interval(steps: int, estimate: Callable[[Any], float]) -> float:
    """Return half of an estimate's 95 % interval, by the delete-a-block jackknife.

    `estimate` computes the estimate from the steps that are True in a mask, [steps]. `steps`, the
    number of successive steps, is at least `_BLOCKS`.
    """
    blocks = np.arange(steps) * _BLOCKS // steps
    values = np.array([estimate(blocks != block) for block in range(_BLOCKS)])
    deviation = np.sqrt((_BLOCKS - 1) / _BLOCKS * ((values - values.mean()) ** 2).sum())
    return float(_T_OF_BLOCKS * deviation)


def _in_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


class PacelineRelaxedParameters(RelaxedParameters, frozen=True, kw_only=True):
    """Parameters of `paceline-relaxed`."""

    saving: Annotated[
        float,
        Meta(
            ge=0,
            le=0.9,
            description="Pairwise averaging is used if it saves more than this fraction of the"
            " training time, by the lower bound of the 95 % confidence interval.",
        ),
    ] = 0.15
    back: Annotated[
        float,
        Meta(
            ge=0,
            le=0.9,
            description="The run returns to all-reduce if pairwise averaging saves less than this "
            "fraction of the training time, by the upper bound of the 95 % confidence interval. "
            "Values above `saving` count as `saving`.",
        ),
    ] = 0.1
    steps: Annotated[
        int,
        Meta(
            ge=_FEWEST_MEASURED,
            le=64,
            description="Number of newest steps whose times decide between all-reduce and pairwise "
            "averaging.",
        ),
    ] = 32
    hold: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Minimum number of segments between two changes of the synchronisation.",
        ),
    ] = 4
    batches: BatchesOf = "paceline"


def make(parameters: PacelineRelaxedParameters) -> Policy:
    """Make the policy."""
    chooser = Measured(
        Pairwise(),
        saving=parameters.saving,
        back=parameters.back,
        steps=parameters.steps,
        hold=parameters.hold,
    )
    batches = policy_of(parameters.batches)
    return replace(batches, name="paceline-relaxed", synchroniser=chooser)


preset = Preset(
    name="paceline-relaxed",
    summary="Batches that fit speeds and sizes; while ranks still wait for each other, they step "
    "independently and average replicas in pairs.",
    source="Paceline; the pairwise means are AD-PSGD's",
    make=make,
    parameters=PacelineRelaxedParameters,
)
