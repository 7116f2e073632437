"""`adaptive`: the all-reduce or the partial all-reduce, chosen by the ranks' compute times.

Under RNA's partial all-reduce ranks need not wait for each other in each step, and fast ranks take
over batches of slow ones. So a rank that is slow, in turn with others or for good, holds nobody up.
The price is older gradients and fewer gradients per update. It buys nothing if all ranks take
equally long in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from paceline.wire.synchronisation import ALLREDUCE, Partial, PartialRules, Synchronisation
from paceline_backend.policies.base import Choice, Feedback, Floats, Policy, Preset
from paceline_backend.policies.presets.relaxed import ON_PACELINE, RelaxedParameters, Staleness
from paceline_backend.policies.registry import make as policy_of

BLOCKS = 8  # blocks of neighbouring steps for the jackknife: slowdowns last for several steps
_T = 2.365  # 97.5 % quantile of Student's t with `BLOCKS` − 1 degrees of freedom
FEWEST = 2 * BLOCKS  # steps that a choice needs


@dataclass(frozen=True)
class Estimate:
    """The time of a step under both synchronisers, estimated from measured steps; seconds.

    Exchanges are left out, because under a partial all-reduce they run during the next step.
    """

    slowest_s: float  # mean time of a step's slowest rank: a step under the all-reduce
    relaxed_s: float  # a step under the partial all-reduce: what all ranks need for its batches
    levelled_s: float  # as `slowest_s`, without differences due to lasting speeds and loads
    contributors: float  # ranks with a gradient in a partial round, on average
    gain: float  # gradients per second of the partial all-reduce ÷ those of the all-reduce

    @staticmethod
    def of(
        compute_s: Floats,
        load: Floats,
        probes: int,
        staleness: int | None,
        *,
        uneven: bool = True,
    ) -> Estimate:
        """The estimate from each rank's batches.

        Under the partial all-reduce ranks share the batches of all steps, so their rates add up: W
        batches take ``W / Σ (1 / mean time of a rank)``. The first of `probes` ranks calls a round,
        so a round takes the mean of their least time (RNA, Sec. 3.2). A rank that takes longer has
        no gradient in some rounds. Its newest gradient counts however old it is, unless `staleness`
        is 0: then a gradient is dropped if a round went by while the rank computed it.

        Args:
            compute_s: [S, W], some above 0.
            load: [S, W].
            probes: ranks of which the first that is ready calls a round.
            staleness: rounds after which a gradient may be dropped; None: none is.
            uneven: ranks share batches. Else all make equally many steps, and meet at the pace of
                the slowest rank.
        """
        slowest_s = float(compute_s.max(axis=1).mean())
        response_s = first_of(compute_s, probes)
        # With equal steps, gradients beyond the bound count as lost. That is cautious: a rank's
        # newest gradient is not dropped.
        oldest = np.inf if staleness is None or (uneven and staleness) else staleness + 1
        late = compute_s > response_s * oldest
        ready = np.minimum(1.0, response_s / np.maximum(compute_s, 1e-12))
        mean_s = compute_s.mean(axis=0)
        at_work = mean_s[mean_s > 0]
        together_s = len(at_work) / float((1 / at_work).sum())
        relaxed_s = together_s if uneven else float(mean_s.max())
        return Estimate(
            slowest_s,
            relaxed_s,
            float(compute_s.mean() + _unexplained(compute_s, load).max(axis=1).mean()),
            float((ready * ~late).mean() * compute_s.shape[1]),
            slowest_s / relaxed_s * (1.0 - float(late.mean())),
        )


def half_interval(steps: int, estimate: Callable[[Any], float]) -> float:
    """Half the 95 % interval of an estimate from steps in order: delete-a-block jackknife.

    Args:
        steps: from `BLOCKS` on.
        estimate: from those steps that a mask [steps] keeps.
    """
    blocks = np.arange(steps) * BLOCKS // steps
    values = np.array([estimate(blocks != block) for block in range(BLOCKS)])
    deviation = np.sqrt((BLOCKS - 1) / BLOCKS * ((values - values.mean()) ** 2).sum())
    return float(_T * deviation)


def first_of(times: Floats, probes: int) -> float:
    """The mean of the least time among `probes` ranks that are drawn in each step, s.

    Args:
        times: [S, W].
        probes: from 1 on; more than W count as W.
    """
    world = times.shape[1]
    probes = min(probes, world)
    # chances[i]: the i-th fastest rank is drawn, and none of the faster ranks is.
    ranks = np.arange(world - 1)
    steps = np.maximum(world - ranks - probes, 0) / np.maximum(world - 1 - ranks, 1)
    chances = probes / world * np.concatenate([[1.0], np.cumprod(steps)])
    return float((np.sort(times, axis=1) @ chances).mean())


def _unexplained(compute_s: Floats, load: Floats) -> Floats:
    """Times without each rank's mean and without the effect of its loads, [S, W]."""
    off, loads = compute_s - compute_s.mean(axis=0), load - load.mean(axis=0)
    spread = (loads**2).sum(axis=0)
    slope = (loads * off).sum(axis=0) / np.where(spread > 0, spread, np.inf)
    return np.asarray(off - slope * loads)


class _Memory(msgspec.Struct):
    partial: bool = False  # the relaxed synchroniser is in force
    segments: int = 0  # since the last change


@dataclass(frozen=True)
class Adaptive:
    """Chooses a relaxed synchroniser while it surely saves more than `saving` of the time.

    The all-reduce comes back when the relaxed one surely saves less than `back`. "Surely" means
    that the whole 95 % interval of the gain, by a jackknife over blocks of steps, is on one side.
    Noise thus changes nothing. If the saving is between the two limits, the choice stays.

    Args:
        relaxed: the synchroniser beside the all-reduce.
        saving: share of the time for equally many gradients.
        back: at most `saving`; a larger value counts as `saving`.
        steps: how many of the newest complete steps to judge from.
        hold: least number of segments between two changes.
        probes: see `RoundRules`.
        staleness: see `RoundRules`.
        uneven: ranks share batches under the relaxed synchroniser.
    """

    relaxed: Synchronisation
    saving: float
    back: float
    steps: int
    hold: int
    probes: int = 1
    staleness: int | None = None
    uneven: bool = True

    def on_steps(self, first: int, *, uneven: bool) -> Adaptive:
        """See `StepsChooser.on_steps`."""
        return replace(self, uneven=uneven)

    def choose(self, feedback: Feedback, world: int, memory: Mapping[str, Any]) -> Choice:
        """See `Chooser.choose`."""
        before = _recall(memory)
        if world == 1:
            return self._choice(before, "there is one rank only")
        rows = feedback.by_step(world)
        worked = rows.compute_s.max(axis=1, initial=0.0) > 0
        count = min(self.steps, int(worked.sum())) // BLOCKS * BLOCKS
        if count < FEWEST:
            return self._choice(before, f"too few steps are known: {worked.sum()} of {FEWEST}")
        newest = feedback.batches(world, count)
        compute_s, load = newest.compute_s, newest.load
        estimate = self._estimate(compute_s, load)
        error = self._error(compute_s, load)
        after = self._decide(before, estimate.gain - error, estimate.gain + error)
        return self._choice(after, self._words(estimate, error, world, after.partial))

    def _decide(self, before: _Memory, low: float, high: float) -> _Memory:
        """The choice for a gain between `low` and `high`."""
        saves, loses = 1 / (1 - self.saving), 1 / (1 - min(self.back, self.saving))
        wants = low > saves if not before.partial else high >= loses
        if wants != before.partial and before.segments >= self.hold:
            return _Memory(wants, 0)
        return before

    def _estimate(self, compute_s: Floats, load: Floats) -> Estimate:
        return Estimate.of(compute_s, load, self.probes, self.staleness, uneven=self.uneven)

    def _error(self, compute_s: Floats, load: Floats) -> float:
        """Half the 95 % interval of the gain."""
        return half_interval(
            len(compute_s), lambda rows: self._estimate(compute_s[rows], load[rows]).gain
        )

    def _words(self, estimate: Estimate, error: float, world: int, partial: bool) -> str:
        words = f"a step's slowest rank takes {in_ms(estimate.slowest_s)}, "
        if self.uneven:
            words += f"all ranks together need {in_ms(estimate.relaxed_s)} for its batches: "
        else:
            words += f"no rank more than {in_ms(estimate.relaxed_s)} on average: "
        gain = f"{estimate.gain:.2f} times the gradients (± {error:.2f}, exchanges left out)"
        rounds = isinstance(self.relaxed, Partial)
        if partial:
            words += f"{gain} are expected"
            if rounds:
                words += f", those of some {estimate.contributors:.1f} of {world} ranks in a round"
        else:
            words += f"{'a partial one' if rounds else 'pairwise means'} would give {gain}"
        levelled = 1 - estimate.levelled_s / estimate.slowest_s
        if levelled > max(self.saving, 1 - 1 / estimate.gain):
            words += (
                f"; batches that fit the ranks' speeds and the samples' sizes (`batches`) could "
                f"save {levelled:.0%}"
            )
        return words

    def _choice(self, now: _Memory, words: str) -> Choice:
        how, name = ALLREDUCE, "all-reduce"
        if now.partial:
            how, name = self.relaxed, self.relaxed.name
        memory = {"partial": now.partial, "segments": now.segments + 1}
        return Choice(how, f"{name}: {words}", memory)


def _recall(memory: Mapping[str, Any]) -> _Memory:
    """The chooser's memory; a new one if it does not fit: it comes over the bus."""
    try:
        return msgspec.convert(memory, _Memory)
    except msgspec.ValidationError:
        return _Memory()


def in_ms(seconds: float) -> str:
    """A time for people."""
    return f"{1e3 * seconds:.3g} ms"


class ChoiceParameters(RelaxedParameters, frozen=True):
    """What decides between the all-reduce and a relaxed synchroniser."""

    saving: Annotated[
        float,
        Meta(
            ge=0,
            le=0.9,
            description="Share of the time for as many gradients that the relaxed synchroniser"
            " must save: the lower bound of the 95 % interval.",
        ),
    ] = 0.15
    back: Annotated[
        float,
        Meta(
            ge=0,
            le=0.9,
            description="Share below which, by the upper bound, the all-reduce comes back; not "
            "above `saving`.",
        ),
    ] = 0.1
    steps: Annotated[
        int, Meta(ge=FEWEST, le=64, description="The newest steps, whose times it rests on.")
    ] = 32
    hold: Annotated[
        int, Meta(ge=1, le=1024, description="Segments that a choice is kept for, at least.")
    ] = 4


class AdaptiveParameters(ChoiceParameters, frozen=True):
    """What `adaptive` takes."""

    probes: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Ranks, drawn anew for each partial round, of which the first that is "
            "ready calls it.",
        ),
    ] = 2
    staleness: Staleness = 4


def make(parameters: AdaptiveParameters) -> Policy:
    """The policy."""
    probes, staleness = parameters.probes, parameters.staleness
    chooser = Adaptive(
        Partial(PartialRules(probes=probes, staleness=staleness, mean=True)),
        saving=parameters.saving,
        back=parameters.back,
        steps=parameters.steps,
        hold=parameters.hold,
        probes=probes,
        staleness=staleness,
    )
    return replace(policy_of(parameters.batches), name="adaptive", synchroniser=chooser)


preset = Preset(
    name="adaptive",
    summary="All-reduce, or a partial one while some ranks are slower than others: whichever the "
    "measured times of steps promise more of.",
    source="Paceline; the partial all-reduce is RNA's",
    make=make,
    parameters=AdaptiveParameters,
    variants=ON_PACELINE,
)
