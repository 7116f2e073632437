"""Handles scripts whose ranks iterate the loop differently often.

Under a pooled synchroniser (`paceline.core.pool`) a fast rank's loop has more iterations than a
slow one's, if the script allows it: ``Session(uneven_steps=True)``. Then this module refuses the
script's own collectives in the loop's body, and steps its learning-rate schedules by planned steps.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler

from paceline.core.errors import PacelineError
from paceline.train.collectives import listen
from paceline.train.ddp import CurrentStep
from paceline.train.parts import Step

_REFUSED = (
    "{name} in step {step}: not all ranks reach this collective, because under this policy a fast "
    "rank's loop has more iterations than a slow one's. Call collectives outside of the loop over "
    "session.loader(), or leave out Session(uneven_steps=True)"
)
_REFUSED_BEFORE_LAST = (
    "{name} in step {step}, before its last micro-batch: not all ranks have this iteration of the "
    "loop. Call collectives where session.batch.last is true, or outside of the loop"
)


def refuse_collectives(current: CurrentStep) -> Callable[[], None]:
    """Refuse the script's own collectives in iterations that not all ranks have.

    Otherwise the ranks that call one would wait for the others for half an hour. Return a function
    that removes the check.
    """
    thread = threading.get_ident()

    def refuse(name: str, group: dist.ProcessGroup, args: tuple[Any, ...]) -> None:
        running = current.running
        if running is None or not running.in_body or threading.get_ident() != thread:
            return
        # The collective is DDP's own.
        if current.reduces:
            return
        step = running.step
        if step.pooled or step.more:
            said = _REFUSED if step.pooled else _REFUSED_BEFORE_LAST
            raise PacelineError(said.format(name=name.strip("_"), step=step.step))

    return listen(refuse)


class Schedules:
    """The script's learning-rate schedules, which follow the work that all ranks have done.

    A script that calls ``scheduler.step()`` in each iteration would be at different points of its
    schedule on fast and slow ranks, and beyond its end on fast ones. So while ranks share batches,
    these calls do nothing, and this class steps the schedule by the numbers of steps instead. It
    leaves alone a schedule that was not stepped exactly once in each iteration before. For one
    thread.
    """

    def __init__(self, current: CurrentStep) -> None:
        self._current = current
        self._schedules: dict[int, _Schedule] = {}
        # Classes with a wrapped `step`, and the original one.
        self._wrapped: dict[type, Any] = {}
        # In a schedule's step, which may call the steps of other schedules.
        self._nested = False
        self._looked = False
        # Iterations since `look`, in steps that all ranks made together.
        self._turns = 0

    @property
    def known(self) -> bool:
        """Return whether it is known how the script steps its schedules."""
        return self._turns > 0

    def look(self, optimiser: torch.optim.Optimizer | None) -> None:
        """Find the optimiser's schedules, once, and count their calls from now on.

        None: all schedules; later ones are held back, too, while micro-batches follow.
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

    def turn_over(self, step: Step) -> None:
        """Count an iteration with a batch."""
        if self._looked and not step.pooled:
            self._turns += 1

    def reach(self, step: Step, number: int) -> None:
        """Step the schedules of a segment up to step `number`, which the work has reached."""
        for schedule in self._schedules.values():
            if schedule.calls == self._turns:
                for _ in range(schedule.due(step, number)):
                    schedule.scheduler.step()

    def close(self) -> None:
        """Unwrap the script's schedules."""
        for kind, method in self._wrapped.items():
            kind.step = method  # type: ignore[attr-defined]
        self._wrapped.clear()
        self._schedules.clear()

    def _wrap(self, kind: type) -> None:
        """Wrap a class's `step`. A wrapper on an object would be in its ``state_dict``."""
        if kind in self._wrapped:
            return
        original = self._wrapped[kind] = vars(kind)["step"]
        schedules = self

        @functools.wraps(original)
        def step(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
            schedule = schedules._schedules.get(id(scheduler))
            running = schedules._current.running
            # A new scheduler makes its first step itself.
            begins = not getattr(scheduler, "_step_count", 1)
            if running is not None and running.in_body and running.step.more and not begins:
                # The optimiser does not step either.
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
        # The script's calls, in steps that all ranks made together.
        self.calls = 0
        # The calls made for this segment.
        self._segment, self._made = -1, 0

    def due(self, step: Step, number: int) -> int:
        """Return the missing calls up to a step of a segment, and count them as made."""
        # Up to this segment, the script made the calls.
        if step.segment != self._segment:
            self._segment, self._made = step.segment, number - step.segment_first
        due = max(number - step.segment_first - self._made, 0)
        self._made += due
        return due
