"""Derives steps from a rank's events, such as the arrival of a batch or the end of a reduction.

The size of a batch is estimated from its tensors (`size_of`), because a script without a session
gives no sizes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.train.compiling import recompilations
from paceline.train.metrics import Value
from paceline.train.timing import Clock
from paceline.wire import Phase

# If the device is more than this many steps behind the host, this thread waits for the device.
_PENDING = 64
# Maximum number of seconds to wait for the device at the end of the script.
_LAST_STEPS_S = 1.0
_POLL_S = 0.01
# Tensors are searched in at most this many levels of nested containers, and in at most this many
# items of each container.
_DEEP = 4
_MANY = 64


@dataclass(frozen=True)
class BatchSize:
    """Size of a batch, or of several batches that were trained in one step.

    Args:
        samples: number of samples n.
        load: number of elements of the largest tensor, padding included.
        squares: Σ over samples of (number of elements of a sample)². All samples of a batch are
            assumed to have the same number of elements.
        longest: number of elements per sample, in the batch with the largest samples.
    """

    samples: int
    load: float
    squares: float
    longest: float

    def __add__(self, other: BatchSize) -> BatchSize:
        return BatchSize(
            self.samples + other.samples,
            self.load + other.load,
            self.squares + other.squares,
            max(self.longest, other.longest),
        )


NOTHING = BatchSize(0, 0.0, 0.0, 0.0)


def size_of(batch: Any, samples: int | None = None) -> BatchSize:
    """Return the size of a batch or of a model's input: tensors in lists, tuples and mappings.

    The number of samples is the length of the first dimension of the first tensor that has one.
    Without such a tensor, it is `samples`, the batch size of the loader's batch sampler, or else 1.
    """
    first, most = None, 0
    for tensor in _tensors(batch, _DEEP):
        if tensor.ndim:
            first = int(tensor.shape[0]) if first is None else first
            most = max(most, tensor.numel())
    count = first or samples or 1
    load = float(most or count)
    return BatchSize(count, load, load * load / count, load / count)


def _tensors(value: Any, deep: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif deep and isinstance(value, Mapping):
        for each in list(value.values())[:_MANY]:
            yield from _tensors(each, deep - 1)
    elif deep and isinstance(value, list | tuple):
        for each in value[:_MANY]:
            yield from _tensors(each, deep - 1)


@dataclass
class ObservedStep:
    """A step of the script's optimiser. Durations are in seconds.

    `data_s` is the wait for the loader. `step_s` is the time from the arrival of the step's batch
    to the arrival of the next step's batch. `began` and `ended` are the times of the batch's
    arrival and of the optimiser's step, on the host's monotonic clock. `spans` has three stamps for
    each period of computing: its start, its end, and the end of the wait for other ranks after it.
    If no wait follows, the last two are equal.
    """

    number: int
    epoch: int = 0
    size: BatchSize = NOTHING
    data_s: float = 0.0
    step_s: float = 0.0
    ended_at: float = 0.0  # Unix time
    loss: Value | None = None
    recompiles: int = 0
    began: float = 0.0
    ended: float = 0.0
    spans: list[tuple[Any, Any, Any]] = field(default_factory=list)

    def readable(self, clock: Any) -> bool:
        """Return whether `read` would not wait for the device."""
        return bool(clock.passed(self.spans[-1][2]))

    def read(self, clock: Any) -> tuple[float, float]:
        """Return the seconds of computing, and the seconds of waiting for ranks or reducing."""
        clock.wait(self.spans[-1][2])
        compute_s = sum(clock.between(since, ready) for since, ready, _ in self.spans)
        sync_s = sum(clock.between(ready, reduced) for _, ready, reduced in self.spans)
        return max(0.0, compute_s), max(0.0, sync_s)


class Timeline:
    """State of a rank between two steps of its optimiser. Not thread-safe, except `activity`.

    A step begins when its batch arrives. Then the rank computes until it waits for other ranks.
    The script's work after the reduction, such as the optimiser's step, logging or an evaluation,
    counts neither as computing nor as waiting. A step lasts until the next one begins. If the
    script reads other data in between, as for an evaluation, the step's duration is the time up to
    its optimiser's step, plus the wait for the next step's batch.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock: Any = clock
        # The start of computing, as a stamp of the device and on the host's clock.
        self._since = self._clock.stamp()
        self._since_s = time.perf_counter()
        # The start of the current wait for other ranks.
        self._ready: Any = None
        self._fetched = NOTHING
        # True if the step's size includes the batch that is being computed.
        self._counted = False
        # True if a batch was counted in a step's size since the loader's newest batch arrived.
        self._sized = False
        self._loads = False
        # True if no batch has been loaded since the optimiser's newest step.
        self._between = True
        # The data set of the newest batch; data sets are identified by their `id`.
        self._data = 0
        # The data sets over which the script has begun a pass since the newest step (`_begun`), and
        # the newest of these data sets (`_fresh`; -1: none).
        self._fresh = -1
        self._begun: set[int] = set()
        # Data sets that the script continued to read after a step of the optimiser.
        self.trained: set[int] = set()
        # The stamp at which the rank stopped computing to load more of the step's data.
        self._paused: Any = None
        self._epoch = -1
        # For each data set: seconds of waiting for its batches that no step has counted yet.
        self._loads_s: dict[int, float] = {}
        self._open = ObservedStep(0)
        # Steps that have ended but are not returned yet. The duration of the newest one is not
        # known before the next step begins.
        self._finished: deque[ObservedStep] = deque()
        self._compiled = recompilations()

    @property
    def activity(self) -> tuple[int, Phase]:
        """Return the current step and the rank's activity in it. Thread-safe."""
        step = self._open.number
        if self._loads:
            return step, Phase.DATA
        if self._ready is not None:
            return step, Phase.SYNC
        return step, Phase.SCRIPT if self._between else Phase.COMPUTE

    @property
    def spans(self) -> int:
        """Return the length of the current step's `ObservedStep.spans`."""
        return len(self._open.spans)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Mark the wait for a loader's next batch."""
        self._loads = True
        # Within a step, the script may load a batch, compute, and load a batch from another loader.
        # Then the time of loading does not count as computing.
        self._paused = self._clock.stamp() if self._counted and self._ready is None else None
        try:
            yield
        finally:
            self._loads = False

    def loaded(self, took_s: float, data: int, size: BatchSize, *, first: bool) -> None:
        """Record a batch from a loader, for which the script waited `took_s` seconds.

        `data` identifies the loader's data set, and `first` marks the start of a pass over it.
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
        """Record the size of a batch with which the model is called."""
        if not self._counted:
            self._counted = self._sized = True
            self._open.size += size

    def waits(self) -> None:
        """Mark the start of a wait for other ranks: to reduce gradients or to gather parameters."""
        if not self._open.spans:
            self._begin()
        self._ready = self._clock.stamp()

    def waited(self) -> None:
        """Mark the end of a wait for other ranks."""
        if self._ready is None:
            return
        now = self._clock.stamp()
        self._open.spans.append((self._since, self._ready, now))
        self._since, self._ready = now, None

    def reduced(self) -> None:
        """Mark the end of a backward pass, whose gradients were reduced or stay on this rank.

        The rank may compute another batch next, or continue with the same batch: reentrant
        activation checkpointing has a backward pass for each checkpointed part.
        """
        self.waited()
        # If no hook ran when the model was called, count the newest batch from a loader.
        if not self._sized:
            self.entered(self._fetched)
        self._counted = False

    def logged(self, loss: Value) -> None:
        """Record a loss for the open step, or for the last step if nothing was computed since."""
        newest = self._finished[-1] if self._finished and not self._open.spans else self._open
        newest.loss = loss

    def stepped(self) -> list[ObservedStep]:
        """Close the step after its optimiser has stepped; return the steps that can be reported."""
        step = self._open
        # If no hook was called in the backward pass, computing ends now.
        if not step.spans:
            self.waits()
        if self._ready is not None:
            self.waited()
        if not step.size.samples:
            self.entered(self._fetched)
        # Micro-batches may have waited for data after the step's start.
        step.data_s += self._waited_s()
        self._begun.clear()
        compiled = recompilations()
        step.recompiles, self._compiled = max(0, compiled - self._compiled), compiled
        step.ended = time.perf_counter()
        step.step_s, step.ended_at = step.ended - step.began, time.time()
        self._between, self._counted = True, False
        self._finished.append(step)
        self._open = ObservedStep(step.number + 1)
        return self._passed(_PENDING)

    def closed(self) -> list[ObservedStep]:
        """Return the completed steps that were not returned before, at the end of the script.

        The wait for the device is short, because after a crash the device may complete no further
        step.
        """
        deadline = time.perf_counter() + _LAST_STEPS_S
        while self._finished and not self._finished[-1].readable(self._clock):
            if time.perf_counter() > deadline:
                break
            time.sleep(_POLL_S)
        return [step for step in self._finished if step.readable(self._clock)]

    def _begin(self) -> None:
        """Begin a step at its first computation; this ends the step before it."""
        step = self._open
        step.began = self._since_s
        self._epoch += self._fresh == self._data or self._epoch < 0
        self._fresh, step.epoch = -1, self._epoch
        step.data_s = self._waited_s()
        # True if the script read other data since the last step, as for an evaluation.
        interrupted = bool(self._loads_s)
        self._loads_s.clear()
        if self._finished:
            last = self._finished[-1]
            until = last.ended + step.data_s if interrupted else step.began
            last.step_s = max(last.step_s, until - last.began)
            last.ended_at = time.time() - (time.perf_counter() - last.began) + last.step_s

    def _waited_s(self) -> float:
        """Return and clear the seconds of waiting for the data that the step trains on.

        A step trains on the newest batch. It also trains on other data sets that the script
        continues to read from step to step, such as unlabelled samples beside labelled ones. An
        evaluation begins to read its data set between two steps, so its waits do not count.
        """
        self.trained |= self._loads_s.keys() - self._begun
        return sum(self._loads_s.pop(data, 0.0) for data in self.trained | {self._data})

    def _passed(self, most: int) -> list[ObservedStep]:
        """Remove and return the closed steps that the device has completed, except the newest.

        The newest step remains, because the script may still log its loss. If more than `most`
        steps would remain, also return the oldest ones; `ObservedStep.read` then waits for the
        device.
        """
        steps = []
        while self._finished and (
            len(self._finished) > most
            or (len(self._finished) > 1 and self._finished[0].readable(self._clock))
        ):
            steps.append(self._finished.popleft())
        return steps
