"""Whether a script's ranks may have different numbers of turns of its loop, and its schedules then.

Under a pooled synchroniser (`paceline.core.pool`) a fast rank's loop has more turns than a slow
one's. Most scripts do not mind. A script minds if its body calls a collective of its own, such as
an all-reduce of the losses, or gathers gradients over several turns. The script can say so
(`Session(uneven_steps=…)`); else ranks look at what it does in a whole epoch.
"""

from __future__ import annotations

import functools
import gc
import logging
import threading
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from paceline.core.errors import PacelineError
from paceline.train import collectives
from paceline.train.ddp import CurrentStep
from paceline.train.parts import Step

logger = logging.getLogger(__name__)

_REFUSED = (
    "{name} in step {step}: not all ranks come to this collective, because under this policy a "
    "fast rank's loop has more turns than a slow one's. Call collectives outside of the loop over "
    "session.loader(), or give Session(uneven_steps=False)"
)


class UnevenSteps:
    """What a script does in the turns of its loop. For the thread that trains.

    Args:
        allowed: what the script said; None: nothing, so its turns are looked at.
        current: the current step.
        world: W.
    """

    def __init__(self, allowed: bool | None, current: CurrentStep, world: int) -> None:
        self._allowed, self._current = allowed, current
        self._thread = threading.get_ident()
        self._reason = "" if world > 1 else "there is one rank"  # why steps must be even
        self._epochs = 0  # whole epochs that have been looked at
        self._logged = False
        self._end = collectives.listen(self._called) if world > 1 else lambda: None

    def turn_over(self, step: Step, *, stepped: bool) -> None:
        """A turn with a batch is over.

        Args:
            step: of the turn.
            stepped: the optimiser has stepped in it.
        """
        if not stepped and step.samples:
            self._mind(f"the optimiser did not step in step {step.step}: gradients accumulate")

    def epoch_over(self) -> None:
        """All turns of an epoch are over."""
        self._epochs += 1

    def are_allowed(self) -> bool:
        """Whether ranks may have different numbers of turns from the next segment on."""
        if self._allowed is not None:
            return self._allowed
        if self._reason and not self._logged:
            self._logged = True
            logger.info(
                "all ranks make equally many steps, also where some are slow: %s "
                "(Session(uneven_steps=True) overrules it)",
                self._reason,
            )
        return not self._reason and self._epochs > 0

    def close(self) -> None:
        """Stops looking."""
        self._end()

    def _mind(self, reason: str) -> None:
        self._reason = self._reason or reason

    def _called(self, name: str) -> None:
        running = self._current.running
        if running is None or not running.in_body or threading.get_ident() != self._thread:
            return
        step = running.step
        if step.pooled:
            raise PacelineError(_REFUSED.format(name=name, step=step.step))
        self._mind(f"the loop's body calls a collective of its own, {name} in step {step.step}")


class Schedules:
    """The script's schedules of learning rates, which follow the work that all ranks have done.

    A script that calls ``scheduler.step()`` in each turn would be at different points of its
    schedule on fast and slow ranks, and beyond its end on fast ones. So while ranks share batches,
    these calls do nothing, and a schedule goes on with the numbers of steps instead: as many calls
    for each step as the script made in a turn before. For one thread.

    Args:
        current: the current step.
    """

    def __init__(self, current: CurrentStep) -> None:
        self._current = current
        self._schedules: dict[int, _Schedule] = {}
        self._wrapped: dict[type, Any] = {}  # classes with a wrapped `step`, and the original one
        self._nested = False  # in a schedule's step, which may call those of others
        self._looked = False

    def look(self, optimiser: torch.optim.Optimizer) -> None:
        """Finds the optimiser's schedules, once, and counts their calls from now on."""
        if self._looked:
            return
        self._looked = True
        for living in gc.get_objects():
            kind = type(living)
            if issubclass(kind, LRScheduler) and getattr(living, "optimizer", None) is optimiser:
                self._schedules[id(living)] = _Schedule(living)
                self._wrap(next(base for base in kind.__mro__ if "step" in vars(base)))

    def turn_over(self, step: Step) -> None:
        """A turn with a batch is over."""
        if not step.pooled:
            for schedule in self._schedules.values():
                schedule.turns += 1

    def reach(self, step: Step, number: int) -> None:
        """The ranks' work has reached a step.

        Args:
            step: a step of the segment.
            number: of the step that is reached.
        """
        for schedule in self._schedules.values():
            for _ in range(schedule.due(step, number)):
                schedule.scheduler.step()

    def close(self) -> None:
        """Gives the script its schedules back."""
        for kind, method in self._wrapped.items():
            kind.step = method  # type: ignore[attr-defined]
        self._wrapped.clear()
        self._schedules.clear()

    def _wrap(self, kind: type) -> None:
        """Wraps a class's `step`. An object's own would be in its ``state_dict``."""
        if kind in self._wrapped:
            return
        original = self._wrapped[kind] = vars(kind)["step"]
        schedules = self

        @functools.wraps(original)
        def step(scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
            schedule = schedules._schedules.get(id(scheduler))
            running = schedules._current.running
            if schedule is None or schedules._nested or args or kwargs:
                return original(scheduler, *args, **kwargs)
            if running is not None and running.in_body:
                if running.step.pooled:
                    return None
                schedule.calls += 1
            schedules._nested = True
            try:
                return original(scheduler)
            finally:
                schedules._nested = False

        kind.step = step  # type: ignore[attr-defined]


class _Schedule:
    """One schedule: how often the script steps it, and how far it is in the segment."""

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler
        self.turns = self.calls = 0  # in steps that all ranks made together, since it was found
        self._segment, self._made = -1, 0  # calls made for this segment

    def due(self, step: Step, number: int) -> int:
        """How many calls it lacks until a step of a segment; they count as made."""
        if step.segment != self._segment:
            self._segment, self._made = step.segment, 0
        if not self.calls:
            return 0
        due = round(self.calls / self.turns * (number - step.segment_first)) - self._made
        self._made += max(due, 0)
        return max(due, 0)
