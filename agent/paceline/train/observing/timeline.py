"""Makes steps of what happens in a rank: batches come, gradients are computed and reduced."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from paceline.train.observing.batches import NOTHING, BatchSize
from paceline.train.telling.compiling import recompilations
from paceline.train.telling.metrics import Value
from paceline.train.timing import Clock
from paceline.wire import Phase

_PENDING = 64  # steps that a device may be behind until it is waited for
_CLOSING_S = 1.0
_POLL_S = 0.01


@dataclass
class ObservedStep:
    """A step of the script's optimiser.

    `spans` has three stamps for each part of the step: since when this rank computed, when it began
    to wait for others, and when it had waited. Times in s.
    """

    number: int
    epoch: int = 0
    size: BatchSize = NOTHING
    data_s: float = 0.0  # waiting for the loader
    step_s: float = 0.0  # until the next step's batch was there
    ended_at: float = 0.0  # Unix time
    loss: Value | None = None
    recompiles: int = 0
    began: float = 0.0  # host's clock, when the batch was there
    ended: float = 0.0
    spans: list[tuple[Any, Any, Any]] = field(default_factory=list)

    def readable(self, clock: Any) -> bool:
        """Whether `read` returns without waiting for the device."""
        return bool(clock.passed(self.spans[-1][2]))

    def read(self, clock: Any) -> tuple[float, float]:
        """Seconds of computing, and of waiting for other ranks with the reduction."""
        clock.wait(self.spans[-1][2])
        compute_s = sum(clock.between(since, ready) for since, ready, _ in self.spans)
        sync_s = sum(clock.between(ready, reduced) for _, ready, reduced in self.spans)
        return max(0.0, compute_s), max(0.0, sync_s)


class Timeline:
    """Where a rank is between two steps of its optimiser. For one thread at a time.

    A step begins when its batch is there. Then the rank computes, until it waits for others. What
    the script does after the reduction, such as the optimiser's step, logging or an evaluation, is
    neither. A step takes until the next one begins; where the script reads other data in between,
    as for an evaluation, it ends with its optimiser's step and the loading of the next batch.

    Args:
        clock: of the model's device.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock: Any = clock
        self._since = self._clock.stamp()  # this rank computes since then,
        self._since_s = time.perf_counter()  # or would, by the host's clock
        self._ready: Any = None  # when it began to wait; None: it does not
        self._fetched = NOTHING  # the size of the newest batch from a loader
        self._counted = False  # the batch that is computed now is in the step's size
        self._sized = False  # a batch was counted since the loader's newest one
        self._loads = False
        self._between = True  # no batch came since the optimiser's newest step
        self._data = 0  # the data set of the newest batch
        self._fresh = -1  # the data set that the script began to read since the newest step
        self._begun: set[int] = set()  # all of them
        self.trained: set[int] = set()  # data sets whose passes go on from step to step
        self._paused: Any = None  # when the rank stopped computing, to load more of the step's data
        self._epoch = -1
        self._loads_s: dict[int, float] = {}  # data set → waiting for its batches, not counted yet
        self._open = ObservedStep(0)
        self._over: deque[ObservedStep] = deque()  # steps that have ended, but for the time to next
        self._compiled = recompilations()

    @property
    def activity(self) -> tuple[int, Phase]:
        """The step that the rank is in, and what it does. Any thread may ask."""
        step = self._open.number
        if self._loads:
            return step, Phase.DATA
        if self._ready is not None:
            return step, Phase.SYNC
        return step, Phase.SCRIPT if self._between else Phase.COMPUTE

    @property
    def spans(self) -> int:
        """How many parts the step has that the rank is in."""
        return len(self._open.spans)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around the wait for a loader's next batch."""
        self._loads = True
        # A step may load from one loader, compute, and load from another one.
        self._paused = self._clock.stamp() if self._counted and self._ready is None else None
        try:
            yield
        finally:
            self._loads = False

    def loaded(self, took_s: float, data: int, size: BatchSize, *, first: bool) -> None:
        """A loader gave a batch.

        Args:
            took_s: how long the script waited for it, in s.
            data: names the loader's data set.
            size: of the batch.
            first: it begins a pass over the data.
        """
        if self._paused is not None:
            if not self._open.spans:
                self._begin()
            self._open.spans.append((self._since, self._paused, self._paused))
            self._paused = None
        if first:
            self._fresh = data
            self._begun.add(data)
        self._data = data
        self._loads_s[data] = self._loads_s.get(data, 0.0) + took_s
        self._fetched, self._counted, self._sized, self._between = size, False, False, False
        self._since, self._since_s = self._clock.stamp(), time.perf_counter()

    def entered(self, size: BatchSize) -> None:
        """The model got a batch to train on."""
        if not self._counted:
            self._counted = self._sized = True
            self._open.size += size

    def waits(self) -> None:
        """This rank begins to wait for others: gradients are computed, or parameters are needed."""
        if not self._open.spans:
            self._begin()
        self._ready = self._clock.stamp()

    def waited(self) -> None:
        """What this rank waited for is there."""
        if self._ready is None:
            return
        now = self._clock.stamp()
        self._open.spans.append((self._since, self._ready, now))
        self._since, self._ready = now, None

    def reduced(self) -> None:
        """The gradients of a batch are reduced, or kept. What follows is another batch's.

        Or more of the same one's: reentrant checkpointing has a backward pass for each part.
        """
        self.waited()
        if not self._sized:  # nobody saw the model get its batch
            self.entered(self._fetched)
        self._counted = False

    def logged(self, loss: Value) -> None:
        """The script logged a loss: of this step if it has computed since the newest one ended."""
        newest = self._over[-1] if self._over and not self._open.spans else self._open
        newest.loss = loss

    def stepped(self) -> list[ObservedStep]:
        """The optimiser has stepped. Returns the steps that can be reported."""
        step = self._open
        if not step.spans:  # nobody saw the gradients being computed
            self.waits()
        if self._ready is not None:
            self.waited()
        if not step.size.samples:
            self.entered(self._fetched)
        step.data_s += self._waited_s()  # for micro-batches
        self._begun.clear()
        compiled = recompilations()
        step.recompiles, self._compiled = max(0, compiled - self._compiled), compiled
        step.ended = time.perf_counter()
        step.step_s, step.ended_at = step.ended - step.began, time.time()
        self._between, self._counted = True, False
        self._over.append(step)
        self._open = ObservedStep(step.number + 1)
        return self._passed(_PENDING)

    def closed(self) -> list[ObservedStep]:
        """The script is over. Returns the steps that are left and that the device has passed.

        A device on which a training crashed may pass nothing any more.
        """
        deadline = time.perf_counter() + _CLOSING_S
        while self._over and not self._over[-1].readable(self._clock):
            if time.perf_counter() > deadline:
                break
            time.sleep(_POLL_S)
        return [step for step in self._over if step.readable(self._clock)]

    def _begin(self) -> None:
        """A step begins, with its first computing: the step before it took until now."""
        step = self._open
        step.began = self._since_s
        self._epoch += self._fresh == self._data or self._epoch < 0
        self._fresh, step.epoch = -1, self._epoch
        step.data_s = self._waited_s()
        interrupted = bool(self._loads_s)  # the script read other data, as for an evaluation
        self._loads_s.clear()
        if self._over:
            last = self._over[-1]
            until = last.ended + step.data_s if interrupted else step.began
            last.step_s = max(last.step_s, until - last.began)
            last.ended_at = time.time() - (time.perf_counter() - last.began) + last.step_s

    def _waited_s(self) -> float:
        """How long the script waited for the data that the step trains on; told once.

        The newest batch is trained on. So is other data whose pass goes on from step to step, such
        as unlabelled samples beside labelled ones. An evaluation begins its pass between two steps.
        """
        self.trained |= self._loads_s.keys() - self._begun
        return sum(self._loads_s.pop(data, 0.0) for data in self.trained | {self._data})

    def _passed(self, most: int) -> list[ObservedStep]:
        """Steps that are over and that the device has passed. The newest may still get its loss.

        Args:
            most: so many may be left, until the device is waited for.
        """
        steps = []
        while self._over and (
            len(self._over) > most or (len(self._over) > 1 and self._over[0].readable(self._clock))
        ):
            steps.append(self._over.popleft())
        return steps
