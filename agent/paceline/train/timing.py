"""Timing of a rank's step: the time of computing, and the time of waiting for other ranks.

The loop makes a `RunningStep` for each iteration of the script's loop. Gradient hooks and the
synchronisation record times in the `RunningStep`, called stamps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from paceline.train.compiling import recompilations
from paceline.train.metrics import Value, on_host
from paceline.train.plan_shard import LocalStep
from paceline.wire import Phase


class CpuClock:
    """Clock of the host. A stamp is a time of the monotonic clock, in s."""

    # Function that returns the present time. It is not wrapped in a method, because a step calls it
    # several times.
    stamp: Callable[[], float] = staticmethod(time.perf_counter)

    def restamp(self, stamp: float | None) -> float:
        """Return the present time."""
        return time.perf_counter()

    def between(self, first: float, second: float) -> float:
        """Return the seconds from one stamp to another."""
        return second - first

    def passed(self, stamp: float) -> bool:
        """Return True: the host has passed each stamp."""
        return True

    def wait(self, stamp: float) -> None:
        """Do nothing: the host has passed each stamp."""


class CudaClock:
    """Clock of a GPU. A stamp is an event in the current stream, which the device passes later.

    Events are recorded in the current stream of the model's device. The thread's current device may
    be another one: gloo's threads use the first device, and scripts need not set a current device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> torch.cuda.Event:
        """Record an event at this point of the current stream."""
        return self.restamp(None)

    def restamp(self, stamp: torch.cuda.Event | None) -> torch.cuda.Event:
        """Record an event, as `stamp` does; reuse the event `stamp` if there is one."""
        event = stamp or torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Return the seconds from one event to another; the device must have passed both."""
        return float(first.elapsed_time(second)) / 1e3

    def passed(self, stamp: torch.cuda.Event) -> bool:
        """Return True if the device has passed a stamp."""
        return bool(stamp.query())  # type: ignore[no-untyped-call]

    def wait(self, stamp: torch.cuda.Event) -> None:
        """Wait until the device has passed a stamp."""
        stamp.synchronize()


Clock = CpuClock | CudaClock


class RunningStep:
    """Step that this rank is in, with its times, its loss and its metrics.

    The stamps alternate: start, gradients computed, reduction ended, gradients computed, … So
    computing and reducing are timed separately even with several reductions in one step. `data_s`
    is the time that the script waited for the batch. `hold_s` is the compute time on the emulated
    device; None: no device is emulated.
    """

    def __init__(self, step: LocalStep, clock: Clock, data_s: float, hold_s: float | None) -> None:
        self.step = step
        self.data_s = data_s
        self.step_s = 0.0
        self.ended_at = 0.0
        self._clock: Any = clock
        self.on_cpu = isinstance(clock, CpuClock)
        self._hold_s = hold_s
        self._loss: Value | None = None
        self._metrics: dict[str, Value] = {}
        # Number of recompilations in this process before the step, and during the step. `finish`
        # sets the second number.
        self._compiled = recompilations()
        self.recompiles = 0
        first: Any = self._clock.stamp()
        self._started: float = first if self.on_cpu else time.perf_counter()
        self._stamps = [first]
        # True if the time since the newest stamp counts as computing even if no gradients follow.
        self._computes = True
        # True if the step has had a backward pass.
        self.passes = False
        # True once this step has waited for the emulated device.
        self._held = False
        # Stamp of the newest gradients that no reduction has followed yet.
        self._kept: Any = None
        # Stamp of the end of the loop's body; None before.
        self._done: Any = None
        self._waited_s = 0.0
        self._waits = False
        # Seconds in collectives of the forward and backward passes.
        self._collectives_s = 0.0
        # Seconds in exchanges of relaxed synchronisation within the loop's body.
        self._exchanged_s = 0.0
        # Seconds of loading and of the loop's body, without waits; known once the body is done.
        self.worked_s = 0.0

    @property
    def in_body(self) -> bool:
        """Return True if the loop's body has not ended yet."""
        return self._done is None

    @property
    def phase(self) -> Phase:
        """Return this rank's phase, or its device's phase if the device is behind. Thread-safe."""
        if self._waits:
            return Phase.SYNC
        stamps = list(self._stamps)
        behind = next((k for k, stamp in enumerate(stamps) if not self._clock.passed(stamp)), None)
        if behind is not None:
            return Phase.SYNC if behind and behind % 2 == 0 else Phase.COMPUTE
        if self._done is not None:
            return Phase.DATA
        return Phase.SYNC if len(stamps) % 2 == 0 else Phase.COMPUTE

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count this context's time as waiting. Do not use it for reductions, which have stamps."""
        self._waits, began = True, time.perf_counter()
        try:
            yield
        finally:
            self._waits = False
            self._waited_s += time.perf_counter() - began

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Count this context, in the loop's body, as an exchange of relaxed synchronisation."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._exchanged_s += time.perf_counter() - began

    @contextmanager
    def in_collective(self) -> Iterator[None]:
        """Count a collective in the forward or the backward pass as waiting for other ranks."""
        # Within a reduction or exchange, the time counts as waiting already.
        if len(self._stamps) % 2 == 0:
            yield
            return
        began = time.perf_counter()
        self._stamps.append(self._clock.stamp())
        # The new stamp ends the computing time, so the stamp in `_kept` is not needed.
        self._kept = None
        try:
            yield
        finally:
            self._stamps.append(self._clock.stamp())
            self._computes = True
            self._collectives_s += time.perf_counter() - began

    def gradients_ready(self) -> None:
        """Record the time of this rank's last gradient, at which the reduction begins."""
        self.passes = self._held = True
        if self._hold_s is not None:
            self._hold()
        self._stamps.append(self._clock.stamp())
        self._kept, self._computes = None, False

    def gradients_offered(self) -> None:
        """Record the start of a relaxed exchange: the time at which its gradients were computed."""
        kept = self._kept if self._hold_s is None else None
        self._hold()
        self._stamps.append(self._clock.stamp() if kept is None else kept)
        self._kept, self._computes = None, False

    def reduced(self) -> None:
        """Record the time at which the gradients' reduction or exchange ends."""
        self._stamps.append(self._clock.stamp())

    def gradients_kept(self) -> None:
        """Record the time of newly computed gradients that stay on this rank."""
        self.passes = True
        self._kept = self._clock.restamp(self._kept)

    def log(self, loss: Value, metrics: Mapping[str, Value]) -> None:
        """Keep the loss and further metrics, without waiting for the device."""
        self._loss = on_host(loss)
        for name, value in metrics.items():
            self._metrics[name] = on_host(value)

    def body_done(self) -> None:
        """Record the time at which the loop's body ends."""
        # If nothing was reduced, the step has not waited for the emulated device yet.
        if not self._held and self._hold_s is not None:
            self._hold()
            self._kept = None
        self._done = self._clock.stamp()
        now: float = self._done if self.on_cpu else time.perf_counter()
        self.worked_s = self.data_s + now - self._started - self._waited_s
        if self.on_cpu:
            # Do this only on a CPU. On a GPU the host waits in an exchange until the device has
            # computed the batch, and that time counts as work.
            self.worked_s -= self._exchanged_s
        if self._computes or self._kept is not None:
            self._stamps.append(self._done if self._kept is None else self._kept)

    def finish(self) -> None:
        """Record that the step is over: the next step starts, or the epoch ends."""
        self.step_s = time.perf_counter() - self._started
        self.ended_at = time.time()
        self.recompiles = max(0, recompilations() - self._compiled)

    @property
    def readable(self) -> bool:
        """Return True if `read` returns without waiting for the device."""
        return bool(self._clock.passed(self._done))

    def read(self) -> tuple[float, float, float | None]:
        """Wait for the device; return compute_s, sync_s, and the loss (None: not logged).

        `compute_s` is the time of the forward and backward passes. `sync_s` is the time from the
        last gradient to the end of the reduction, plus other waits for ranks.
        """
        self._clock.wait(self._done)
        times = [0.0, 0.0]
        for k, (first, second) in enumerate(pairwise(self._stamps)):
            times[k % 2] += self._clock.between(first, second)
        loss = float(self._loss) if self._loss is not None and self.step.samples else None
        return times[0], times[1] + self._waited_s, loss

    def figures(self) -> dict[str, float]:
        """Return the values of `Session.figures`; call it after the end of the step."""
        compute_s, sync_s, _ = self.read()
        return {
            "paceline/samples": float(self.step.samples),
            "paceline/load": self.step.load,
            "paceline/data_s": self.data_s,
            "paceline/compute_s": compute_s,
            "paceline/sync_s": sync_s,
            "paceline/step_s": self.step_s,
        }

    def metrics(self) -> dict[str, float]:
        """Return the logged metrics without the loss. Call it after `read`.

        The result is empty for a filler, the batch of a rank without samples.
        """
        if not self.step.samples:
            return {}
        return {name: float(value) for name, value in self._metrics.items()}

    def _hold(self) -> None:
        self._held = True
        if self._hold_s is not None:
            until = self._started + self._hold_s + self._collectives_s
            time.sleep(max(0.0, until - time.perf_counter()))
