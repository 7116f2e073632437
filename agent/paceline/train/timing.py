"""When a rank computed in a step, and when it waited for other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from paceline.train.parts import Step
from paceline.train.telling.compiling import recompilations
from paceline.train.telling.metrics import Value, on_host
from paceline.wire import Phase


class CpuClock:
    """A stamp is a time of the monotonic clock, in s."""

    def stamp(self, again: float | None = None) -> float:
        """The present time."""
        return time.perf_counter()

    def between(self, first: float, second: float) -> float:
        """Seconds from one stamp to another."""
        return second - first

    def passed(self, stamp: float) -> bool:
        """Whether the device has passed a stamp."""
        return True

    def wait(self, stamp: float) -> None:
        """Waits until the device has passed a stamp."""


class CudaClock:
    """A stamp is an event in the current stream: the device passes it later than the host.

    Args:
        device: of the model. It may differ from the thread's current device: gloo's threads have
            the first one, and scripts need not set theirs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self, again: torch.cuda.Event | None = None) -> torch.cuda.Event:
        """Marks this point of the current stream; moves the mark `again` if it is given."""
        event = again or torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Seconds from one event to another; both have passed."""
        return float(first.elapsed_time(second)) / 1e3

    def passed(self, stamp: torch.cuda.Event) -> bool:
        """Whether the device has passed a stamp."""
        return bool(stamp.query())  # type: ignore[no-untyped-call]

    def wait(self, stamp: torch.cuda.Event) -> None:
        """Waits until the device has passed a stamp."""
        stamp.synchronize()


Clock = CpuClock | CudaClock


class RunningStep:
    """A step that this rank is in, with its times, its loss and its metrics.

    The stamps alternate: start, gradients computed, reduction ended, gradients computed, … So
    several reductions in one step are told apart from computing as well as a single one.

    Args:
        step: what this rank does in it.
        clock: of the model's device.
        data_s: how long the script waited for the batch.
        hold_s: how long computing takes on the emulated device; None: it is not emulated.
    """

    def __init__(self, step: Step, clock: Clock, data_s: float, hold_s: float | None) -> None:
        self.step = step
        self.data_s = data_s
        self.step_s = 0.0
        self.ended_at = 0.0
        self._clock: Any = clock
        self._hold_s = hold_s
        self._loss: Value | None = None
        self._metrics: dict[str, Value] = {}
        self._compiled = recompilations()  # before it
        self.recompiles = 0  # in it, known once it is over
        self._started = time.perf_counter()
        self._stamps = [self._clock.stamp()]
        self._computes = True  # since the newest stamp, whether or not gradients follow
        self.passes = False  # there was a backward pass
        self._held = False  # the emulated device was waited for
        self._kept: Any = None  # stamp of gradients that no reduction has followed yet
        self._done: Any = None
        self._waited_s = 0.0
        self._waits = False
        self._met_s = 0.0  # in collectives of the passes
        self._exchanged_s = 0.0  # in the body, with a relaxed synchroniser
        self.worked_s = 0.0  # of loading and of the body, without waiting; known once that is done

    @property
    def in_body(self) -> bool:
        """Whether the loop's body has not ended yet."""
        return self._done is None

    @property
    def phase(self) -> Phase:
        """What this rank, or its device, does. Any thread may ask."""
        if self._waits:
            return Phase.SYNC
        stamps = list(self._stamps)
        behind = next((k for k, stamp in enumerate(stamps) if not self._clock.passed(stamp)), None)
        if behind is not None:  # a device does later what the host asked of it
            return Phase.SYNC if behind and behind % 2 == 0 else Phase.COMPUTE
        if self._done is not None:
            return Phase.DATA
        return Phase.SYNC if len(stamps) % 2 == 0 else Phase.COMPUTE

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts time in which this rank waits for others outside of a reduction in the body."""
        self._waits, began = True, time.perf_counter()
        try:
            yield
        finally:
            self._waits = False
            self._waited_s += time.perf_counter() - began

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around what a relaxed synchroniser does in the body, which may wait for other ranks."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._exchanged_s += time.perf_counter() - began

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Around a collective in the forward or the backward pass, which waits for other ranks."""
        if len(self._stamps) % 2 == 0:  # during a reduction, whose time counts as waiting already
            yield
            return
        began = time.perf_counter()
        self._stamps.append(self._clock.stamp())
        self._kept = None  # what was computed until then is counted
        try:
            yield
        finally:
            self._stamps.append(self._clock.stamp())
            self._computes = True
            self._met_s += time.perf_counter() - began

    def gradients_ready(self) -> None:
        """The last gradient of this rank is computed; the reduction begins."""
        self.passes = True
        self._hold()
        self._stamps.append(self._clock.stamp())
        self._kept, self._computes = None, False

    def gradients_offered(self) -> None:
        """The gradients kept so far go to a relaxed synchroniser."""
        kept = self._kept if self._hold_s is None else None
        self._hold()
        self._stamps.append(self._clock.stamp() if kept is None else kept)
        self._kept, self._computes = None, False

    def reduced(self) -> None:
        """The reduction or exchange of the gradients has ended."""
        self._stamps.append(self._clock.stamp())

    def gradients_kept(self) -> None:
        """Gradients are computed, and stay on this rank."""
        self.passes = True
        self._kept = self._clock.stamp(self._kept)

    def log(self, loss: Value, metrics: Mapping[str, Value]) -> None:
        """Keeps the loss and further metrics, without waiting for the device."""
        self._loss = on_host(loss)
        for name, value in metrics.items():
            self._metrics[name] = on_host(value)

    def body_done(self) -> None:
        """The loop's body has ended."""
        if not self._held and self._hold_s is not None:  # nothing was reduced
            self._hold()
            self._kept = None
        self._done = self._clock.stamp()
        self.worked_s = self.data_s + time.perf_counter() - self._started - self._waited_s
        if isinstance(self._clock, CpuClock):
            # On a GPU the host waits for the device there, and that is what a batch takes.
            self.worked_s -= self._exchanged_s
        if self._computes or self._kept is not None:
            self._stamps.append(self._done if self._kept is None else self._kept)

    def over(self) -> None:
        """The next step starts, or the epoch ends."""
        self.step_s = time.perf_counter() - self._started
        self.ended_at = time.time()
        self.recompiles = max(0, recompilations() - self._compiled)

    @property
    def on_cpu(self) -> bool:
        """Whether the host's clock times it."""
        return isinstance(self._clock, CpuClock)

    @property
    def readable(self) -> bool:
        """Whether `read` returns without waiting for the device."""
        return bool(self._clock.passed(self._done))

    def read(self) -> tuple[float, float, float | None]:
        """The step's times in s, and its loss.

        Returns:
            compute_s (T: forward and backward, nothing else), sync_s (from there to the end of the
            reduction), and the loss, if the script logged one.
        """
        self._clock.wait(self._done)
        times = [0.0, 0.0]
        for k, (first, second) in enumerate(pairwise(self._stamps)):
            times[k % 2] += self._clock.between(first, second)
        loss = float(self._loss) if self._loss is not None and self.step.samples else None
        return times[0], times[1] + self._waited_s, loss

    def figures(self) -> dict[str, float]:
        """What this rank did in the step and how long it took, after it is over."""
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
        """Further metrics that the script logged, after `read`; of a filler there are none."""
        if not self.step.samples:
            return {}
        return {name: float(value) for name, value in self._metrics.items()}

    def _hold(self) -> None:
        self._held = True
        if self._hold_s is not None:
            until = self._started + self._hold_s + self._met_s
            time.sleep(max(0.0, until - time.perf_counter()))
