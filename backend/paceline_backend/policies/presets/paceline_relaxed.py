"""`paceline-relaxed`: `paceline`'s batches, and pairwise means while ranks still wait.

Batches of the scheduler take all ranks equally long, as far as speeds last and samples' sizes tell.
What is left are ranks that are slow in turn, one whose least batch is still too much for it, and
the all-reduce itself. Where that is much, each rank steps by itself, and after each step two
replicas become their mean (AD-PSGD, Lian et al. 2018). That loses no gradient, no rank waits for
another's computing, and means are taken while ranks compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from paceline.wire.synchronisation import ALLREDUCE, Pairwise, Synchronisation
from paceline_backend.policies.base import BatchesOf, Choice, Feedback, Floats, Policy, Preset
from paceline_backend.policies.presets.relaxed import RelaxedParameters
from paceline_backend.policies.registry import make as policy_of

_BLOCKS = 8  # blocks of neighbouring steps for the jackknife: slowdowns last for several steps
_T = 2.365  # 97.5 % quantile of Student's t with `_BLOCKS` − 1 degrees of freedom
_FEWEST = 2 * _BLOCKS  # steps that a choice needs
_AGREE = 2  # choices in a row that must speak against what is in force and relaxed
# Segments, about as many seconds, after which a try of which nothing gets known is given up.
_BLIND, _BLIND_S = 16, 60.0
# After a try that was wrong: times what it took, until the next one. Twice as much each time.
_REST = 20.0


class _Steps(NamedTuple):
    """What the newest steps of the synchroniser in force took."""

    compute_s: Floats  # [S, W]
    load: Floats  # [S, W]
    sync_s: Floats  # [S, W] wait and exchange
    step_s: Floats  # [S, W] wall time
    whole: npt.NDArray[np.bool_]  # [S] the records have the step's batches: not fewer, not others

    def only(self, rows: npt.NDArray[np.bool_]) -> _Steps:
        """Some of the steps."""
        columns = (self.compute_s[rows], self.load[rows], self.sync_s[rows], self.step_s[rows])
        return _Steps(*columns, self.whole[rows])

    @property
    def taken_s(self) -> float:
        """Wall time of a step: that of the rank that takes longest, as all meet in the end."""
        return float(self.step_s.mean(axis=0).max())

    @property
    def slowest_s(self) -> float:
        """How long a step's slowest rank computes, on average."""
        rows = self.compute_s[self.whole] if self.whole.any() else self.compute_s
        return float(rows.max(axis=1).mean())

    def computing_s(self, *, shared: bool) -> float:
        """How long ranks compute for the work of a step, without waiting for each other.

        Args:
            shared: ranks share the work, so their rates add up. Else none gets further than the one
                that takes longest.
        """
        if not shared:
            return float(self.compute_s.mean(axis=0).max())
        load, compute_s = self.load.sum(axis=0), self.compute_s.sum(axis=0)
        per_s = float((load[compute_s > 0] / compute_s[compute_s > 0]).sum())
        rows = self.load[self.whole] if self.whole.any() else self.load
        return float(rows.sum(axis=1).mean()) / max(per_s, 1e-30)


class _Memory(msgspec.Struct, forbid_unknown_fields=True):
    relaxed: bool = False  # the relaxed synchroniser is in force
    segments: int = 0  # since the last change
    since: int = 0  # the first step that says something about the synchroniser in force
    against: int = 0  # choices in a row that spoke against it
    exchange_s: float = 0.0  # of a step under the all-reduce
    rest_s: float = 0.0  # of a step under the all-reduce: loading, and the script itself
    seen: int = 0  # up to this step time has been counted:
    tried_s: float = 0.0  # how long the relaxed synchroniser has been in force
    proved: bool = False  # it has saved enough in that time
    wait_s: float = 0.0  # until it may be tried again
    wrong: int = 0  # tries that were wrong


@dataclass(frozen=True)
class Measured:
    """Chooses a relaxed synchroniser while it surely saves more than `saving` of the time.

    What is in force is measured, and the other one is estimated. A step under the all-reduce takes
    as long as its slowest rank computes, and in addition the exchange and what else there was when
    it was in force last. A relaxed step takes what all ranks together need for its work, as they
    share it. The exchange is hidden behind the computing, if all goes well.

    If it does not go well, the all-reduce comes back: when the relaxed synchroniser saves less than
    `back`. If it never saved enough, it is tried again after 20 times as long as the try took, and
    after each further such try twice as long. So tries cost a few per cent of the time at most.

    "Surely" means that the whole 95 % interval of the gain is on one side. Where ranks share
    batches, the steps of a segment have one wall time, so two choices in a row must agree to go
    back.

    Args:
        relaxed: the synchroniser beside the all-reduce.
        saving: share of the time for the same work.
        back: at most `saving`; a larger value counts as `saving`.
        steps: how many of the newest complete steps to judge from.
        hold: least number of segments between two changes.
        first: step of the segment that is chosen for.
        uneven: ranks share batches under the relaxed synchroniser.
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
            return self._choice(now, "there is one rank only")
        # In the first segment of a relaxed synchroniser ranks do not share batches yet.
        if now.segments <= 1:
            now.since = now.seen = self.first
        steps = self._known(feedback, world, now)
        if steps is None:
            words = f"fewer than {_FEWEST} of its steps are known"
            if now.relaxed and now.segments >= _BLIND:
                words, now.tried_s = f"pairwise means were tried, but {words}", _BLIND_S
                self._change(now)
            return self._choice(now, words)
        self._count_time(now, steps, int(feedback.step[-1]))
        if not now.relaxed:
            now.exchange_s = float(steps.sync_s.min(axis=1).mean())
            now.rest_s = max(0.0, steps.taken_s - steps.slowest_s - now.exchange_s)
        gain = self._gain(steps, now)
        error = _half_interval(len(steps.step_s), lambda rows: self._gain(steps.only(rows), now))
        words = self._words(steps, now, f"{gain:.2f} times the work (± {error:.2f})")
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

    def _known(self, feedback: Feedback, world: int, now: _Memory) -> _Steps | None:
        """What is known of the steps of the synchroniser in force; None: too little."""
        rows = feedback.by_step(world)
        timed = np.isfinite(rows.step_s).all(axis=1) & (rows.step_s > 0).any(axis=1)
        good = timed & (rows.step[:, 0] >= now.since)
        good &= (rows.compute_s.max(axis=1, initial=0.0) > 0) & (rows.load.sum(axis=1) > 0)
        # A rank with samples and no time compiled code again: the step would seem too fast.
        good &= ~((rows.samples > 0) & (rows.compute_s <= 0)).any(axis=1)
        newest = np.flatnonzero(good)[-self.steps :]
        newest = newest[len(newest) % _BLOCKS :]
        if len(newest) < _FEWEST:
            return None
        compute_s = rows.compute_s[newest]
        # Where ranks share batches, a record may be of no batch, or be left out as one of several.
        shared = now.relaxed and self.uneven
        whole: Any = (compute_s > 0).all(axis=1) if shared else np.ones(len(newest), bool)
        columns = (rows.load[newest], rows.sync_s[newest], rows.step_s[newest])
        return _Steps(compute_s, *columns, whole)

    def _count_time(self, now: _Memory, steps: _Steps, newest: int) -> None:
        """Counts the time since the last choice."""
        passed_s = max(0, newest + 1 - now.seen) * steps.taken_s
        now.seen = max(now.seen, newest + 1)
        if now.relaxed:
            now.tried_s += passed_s
        else:
            now.wait_s = max(0.0, now.wait_s - passed_s)

    def _change(self, now: _Memory) -> None:
        """The other synchroniser is in force from this segment on."""
        if now.proved:  # it was right, until something changed
            now.wrong = 0
        elif now.relaxed:
            now.wait_s = _REST * 2**now.wrong * now.tried_s
            now.wrong = min(now.wrong + 1, 10)
        now.proved = False
        now.relaxed, now.segments, now.since = not now.relaxed, 0, self.first
        now.against, now.tried_s = 0, 0.0

    def _gain(self, steps: _Steps, now: _Memory) -> float:
        """Work per second under the relaxed synchroniser, over that under the all-reduce."""
        computing_s = steps.computing_s(shared=self.uneven)
        if not now.relaxed:
            return steps.taken_s / (computing_s + now.rest_s)
        rest_s = min(now.rest_s, max(0.0, steps.taken_s - computing_s))
        return (steps.slowest_s + now.exchange_s + rest_s) / steps.taken_s

    def _words(self, steps: _Steps, now: _Memory, gain: str) -> str:
        if now.relaxed:
            reduced_s = self._gain(steps, now) * steps.taken_s
            return (
                f"the work of a step takes {_in_ms(steps.taken_s)}, under the all-reduce it would "
                f"take {_in_ms(reduced_s)}: {gain}"
            )
        alone_s = steps.computing_s(shared=self.uneven) + now.rest_s
        words = (
            f"a step takes {_in_ms(steps.taken_s)}: its slowest rank computes "
            f"{_in_ms(steps.slowest_s)}, the exchange takes {_in_ms(now.exchange_s)}; without "
            f"waiting, ranks would need {_in_ms(alone_s)}: pairwise means might do {gain}"
        )
        if now.wait_s:
            words += f"; they were tried and saved too little: not again for {now.wait_s:.0f} s"
        return words

    def _choice(self, now: _Memory, words: str) -> Choice:
        how, name = (self.relaxed, self.relaxed.name) if now.relaxed else (ALLREDUCE, "all-reduce")
        now.segments += 1
        return Choice(how, f"{name}: {words}", msgspec.to_builtins(now))


def _recall(memory: Mapping[str, Any]) -> _Memory:
    """The chooser's memory; a new one if it does not fit: it comes over the bus."""
    try:
        return msgspec.convert(memory, _Memory)
    except msgspec.ValidationError:
        return _Memory()


def _half_interval(steps: int, estimate: Callable[[Any], float]) -> float:
    """Half the 95 % interval of an estimate from steps in order: delete-a-block jackknife.

    Args:
        steps: from `_BLOCKS` on.
        estimate: from those steps that a mask [steps] keeps.
    """
    blocks = np.arange(steps) * _BLOCKS // steps
    values = np.array([estimate(blocks != block) for block in range(_BLOCKS)])
    deviation = np.sqrt((_BLOCKS - 1) / _BLOCKS * ((values - values.mean()) ** 2).sum())
    return float(_T * deviation)


def _in_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


class PacelineRelaxedParameters(RelaxedParameters, frozen=True, kw_only=True):
    """What `paceline-relaxed` takes."""

    saving: Annotated[
        float,
        Meta(
            ge=0,
            le=0.9,
            description="Share of the time for the same work that pairwise means must save: the"
            " lower bound of the 95 % interval.",
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
        int, Meta(ge=_FEWEST, le=64, description="The newest steps, whose times it rests on.")
    ] = 32
    hold: Annotated[
        int, Meta(ge=1, le=1024, description="Segments that a choice is kept for, at least.")
    ] = 4
    batches: BatchesOf = "paceline"


def make(parameters: PacelineRelaxedParameters) -> Policy:
    """The policy."""
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
    summary="Batches that fit speeds and sizes; while ranks still wait for each other, each steps "
    "by itself and two replicas at a time become their mean.",
    source="Paceline; the pairwise means are AD-PSGD's",
    make=make,
    parameters=PacelineRelaxedParameters,
)
