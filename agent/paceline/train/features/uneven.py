"""Handling of ranks whose loops have different numbers of iterations.

With ``Session(uneven_steps=True)`` ranks take batches of a segment over from each other
(`sync.pool`), so a fast rank's loop has more iterations than a slow one's. With
``Session(micro_batches=True)`` a step has several iterations on a rank that computes its batch in
parts. In both cases this module refuses the script's own collectives in iterations that not all
ranks have. It also makes the script's learning-rate schedules advance once per planned step.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.optim.lr_scheduler import LRScheduler

from paceline.core.errors import PacelineError
from paceline.train.collectives import listen
from paceline.train.ddp import CurrentStep
from paceline.train.feature import Feature
from paceline.train.plan_shard import LocalStep
from paceline.train.state import TrainingState
from paceline.train.sync.pool import SharedBatches, ends_span
from paceline.train.timing import RunningStep

logger = logging.getLogger(__name__)

_REFUSED = (
    "{name} in step {step}: not all ranks reach this collective, because under this policy a fast "
    "rank's loop has more iterations than a slow one's. Call collectives outside of the loop over "
    "session.loader(), or leave out Session(uneven_steps=True)"
)
_REFUSED_BEFORE_LAST = (
    "{name} in step {step}, before its last micro-batch: not all ranks have this iteration of the "
    "loop. Call collectives where session.batch.last is true, or outside of the loop"
)
_GIVE_LIMITS = "give Session(limits=…), or call session.profile before the loop"


class _UnevenLoops(Feature):
    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._accept_collectives = refuse_collectives(state.current)
        self._schedules = Schedules(state.current)

    def turn_ended(self, running: RunningStep, closing: bool) -> None:
        # If the script left the loop, it may not have reached its call of the schedule's `step`.
        if not closing and not running.step.more:
            self._schedules.turn_ended(running.step)

    def close(self) -> None:
        self._accept_collectives()
        self._schedules.close()


class MicroBatches(_UnevenLoops):
    """Handling of steps that have several iterations of the script's loop."""

    def connect(self) -> None:
        terms, limits = self._state.context.terms, self._state.context.limits
        by_samples = terms.token_budget is None
        if by_samples and not limits.samples and self._state.startup.leads:
            logger.warning("micro_batches=True has no effect without limits: %s", _GIVE_LIMITS)

    def begin_turn(self, turn: LocalStep) -> None:
        """Find the script's schedules, to ignore their `step` before a step's last micro-batch."""
        gate = self._state.gate
        if turn.micro_index == 0 and gate.relaxed is not None:
            self._schedules.look(gate.chosen())
        if turn.more:
            self._schedules.look(None)


class WorkSharing(_UnevenLoops):
    """Handling of batches that ranks take over from each other under relaxed synchronisation."""

    def __init__(self, state: TrainingState) -> None:
        super().__init__(state)
        # Set from the first iteration until the session is closed.
        self._pool: SharedBatches | None = None
        self._taken: LocalStep | None = None
        # True if ranks may take over each other's batches in the current step.
        self._pools = False

    @property
    def may_differ(self) -> bool:
        """Return True if ranks may have different numbers of iterations from the next segment on.

        In the first segment of relaxed synchronisation, ranks must have equal numbers of
        iterations: it is not known yet whether the script suits the synchronisation, and how the
        script steps its schedules.
        """
        return self._schedules.known

    def connect(self) -> None:
        startup, limits = self._state.startup, self._state.context.limits.of_parts
        self._pool = SharedBatches(startup.store, startup.rank, startup.world, limits)

    def claim(self, step: LocalStep) -> tuple[LocalStep, bool]:
        """Return the step that this rank runs, and whether it still trains the step's batch.

        Call this method when `step` has begun. `step` is a planned step of this rank, or a step
        that `take_over` returned. If another rank has taken the batch over, return the step without
        its batch, and False.
        """
        gate = self._state.gate
        self._pools = gate.pools(step)
        if self._pools:
            self._schedules.reach(step, step.step)
        elif gate.relaxed is not None:
            self._schedules.look(gate.chosen())
        taken = step is self._taken
        mine = taken or self._is_mine(step)
        if not taken and ends_span(step):
            step = replace(step, shared=True)
        if gate.relaxed is None and step.pooled:
            # The script does not suit relaxed synchronisation, so each rank trains its own batch.
            step = replace(step, pooled=False)
        return (step if mine else step.without_batch()), mine

    def _is_mine(self, step: LocalStep) -> bool:
        if self._pool is None or not step.pooled:
            return True
        # A rank without samples computes a filler, unless ranks share batches.
        if not step.samples:
            return not self._pools
        return self._pool.begins(step, may_leave=self._pools)

    def is_taken_over(self, step: LocalStep) -> bool:
        """Return True if this rank need not load the step's batch: another rank will train it."""
        return self._pool is not None and step.pooled and self._pool.is_taken_over(step)

    def take_over(self, step: LocalStep) -> LocalStep | None:
        """Return another rank's batch, to be trained after this planned step, if there is one."""
        self._taken = None
        if self._pool is not None and ends_span(step) and self._state.gate.pools(step):
            running = self._state.current.running
            with nullcontext() if running is None else running.waiting():
                self._taken = self._pool.takes_over(step)
        return self._taken

    def turn_ended(self, running: RunningStep, closing: bool) -> None:
        super().turn_ended(running, closing)
        if self._pool is not None and self._state.gate.relaxed is not None:
            self._pool.worked(running.worked_s)

    def step_ended(self, step: LocalStep) -> None:
        if self._pool is not None and ends_span(step):
            self._pool.end_span(step)
        if self._pools and step.last:
            self._schedules.reach(step, step.segment_end)

    def closed(self) -> None:
        self._pool = None


def refuse_collectives(current: CurrentStep) -> Callable[[], None]:
    """Refuse the script's own collectives in iterations that not all ranks have.

    Without this check, a rank that calls a collective in such an iteration would wait for the other
    ranks for half an hour. Return a function that removes the check.
    """
    thread = threading.get_ident()

    def refuse(name: str, group: dist.ProcessGroup, args: tuple[Any, ...]) -> None:
        running = current.running
        if running is None or not running.in_body or threading.get_ident() != thread:
            return
        # Paceline itself calls this collective.
        if current.reduces:
            return
        step = running.step
        if step.pooled or step.more:
            said = _REFUSED if step.pooled else _REFUSED_BEFORE_LAST
            raise PacelineError(said.format(name=name.strip("_"), step=step.step))

    return listen(refuse)


class Schedules:
    """Control of the script's learning-rate schedules, which must follow the work of all ranks.

    If a script calls ``scheduler.step()`` in each iteration, fast and slow ranks would get
    different learning rates, and fast ranks would pass the schedule's end. So while ranks share
    batches, the script's calls do nothing, and this class steps the schedule once for each planned
    step. This applies only to schedules that the script stepped exactly once in each earlier
    iteration. Not thread-safe.
    """

    def __init__(self, current: CurrentStep) -> None:
        self._current = current
        self._schedules: dict[int, _Schedule] = {}
        self._wrapped: dict[type, Any] = {}
        # True within a schedule's step, which may call the steps of other schedules.
        self._nested = False
        self._looked = False
        # Number of iterations since `look`, in steps that all ranks made together.
        self._turns = 0

    @property
    def known(self) -> bool:
        """Return True once the script's calls of its schedules were counted in some iteration."""
        return self._turns > 0

    def look(self, optimiser: torch.optim.Optimizer | None) -> None:
        """Find the optimiser's schedules, once, and count their calls from now on.

        If `optimiser` is None, find all schedules of the process. Schedules that the script makes
        later are then included: their `step` does nothing before a step's last micro-batch.
        """
        if self._looked:
            return
        self._looked = True
        if optimiser is None:
            for kind in _with_step(LRScheduler):
                self._wrap(kind)
        for living in gc.get_objects():
            kind = type(living)
            if not issubclass(kind, LRScheduler):
                continue
            if optimiser is None or getattr(living, "optimizer", None) is optimiser:
                self._schedules[id(living)] = _Schedule(living)
                self._wrap(next(base for base in kind.__mro__ if "step" in vars(base)))

    def turn_ended(self, step: LocalStep) -> None:
        """Count an iteration of a step that all ranks make together."""
        if self._looked and not step.pooled:
            self._turns += 1

    def reach(self, step: LocalStep, number: int) -> None:
        """Step the schedules until they have advanced to step `number`, which the ranks reached.

        `step` is any step of the segment that includes step `number`.
        """
        for schedule in self._schedules.values():
            if schedule.calls == self._turns:
                for _ in range(schedule.due(step, number)):
                    schedule.scheduler.step()

    def close(self) -> None:
        for kind, method in self._wrapped.items():
            kind.step = method  # type: ignore[attr-defined]
        self._wrapped.clear()
        self._schedules.clear()

    def _wrap(self, kind: type) -> None:
        """Wrap `step` of a schedule's class; a wrapper on the object would be in its state_dict."""
        if kind in self._wrapped:
            return
        original = self._wrapped[kind] = vars(kind)["step"]
        schedules = self

        @functools.wraps(original)
        def step(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
            schedule = schedules._schedules.get(id(scheduler))
            running = schedules._current.running
            # A scheduler calls its `step` once in its constructor.
            begins = not getattr(scheduler, "_step_count", 1)
            if running is not None and running.in_body and running.step.more and not begins:
                # The optimiser does not step in this iteration either.
                return None
            if schedule is None or schedules._nested:
                return original(scheduler, *args, **kwargs)
            if args or kwargs:
                return original(scheduler, *args, **kwargs)
            if running is not None and running.in_body:
                if not running.step.pooled:
                    schedule.calls += 1
                elif schedule.calls == schedules._turns:
                    return None
            schedules._nested = True
            try:
                return original(scheduler)
            finally:
                schedules._nested = False

        kind.step = step  # type: ignore[attr-defined]


def _with_step(kind: type[Any]) -> Iterator[type[Any]]:
    if "step" in vars(kind):
        yield kind
    for derived in kind.__subclasses__():
        yield from _with_step(derived)


class _Schedule:
    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler
        # Number of calls by the script, in steps that all ranks made together.
        self.calls = 0
        # The newest segment, and the number of its steps for which `step` of the schedule was
        # called.
        self._segment, self._made = -1, 0

    def due(self, step: LocalStep, number: int) -> int:
        """Return how often to call the schedule's `step` to advance it to step `number`.

        The caller must make these calls, because the next results assume that they were made.
        """
        # At the first call in a segment, the schedule has already advanced to step `number`.
        if step.segment != self._segment:
            self._segment, self._made = step.segment, number - step.segment_first
        due = max(number - step.segment_first - self._made, 0)
        self._made += due
        return due
