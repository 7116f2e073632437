"""Device that a rank computes on, and emulation of slower devices."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import psutil
import torch
from msgspec.structs import replace

from paceline.core.cost import Features
from paceline.core.emulation import Emulation
from paceline.node import machine
from paceline.train.plan_shard import LocalStep
from paceline.train.profile import Hold
from paceline.train.timing import Clock, CpuClock, CudaClock
from paceline.wire import RankDevice
from paceline.wire.messages import MOST_DEVICE_NAME

logger = logging.getLogger(__name__)

# Duration in seconds of a trial, which measures a device's FLOP/s if no data sheet gives it. The
# paper "Taming Resource Heterogeneity In Distributed ML Training With Dynamic Batching", §III-B,
# compares servers of different kinds by their half-precision FLOP/s.
TRIAL_S = 1.0
# Number of rows and columns, and precision, of the matrices that a trial multiplies, by kind of
# device. CPUs train in single precision, and few of them support half precision.
_SIDES = {"cpu": (512, torch.float32)}
_OTHERS = (4096, torch.float16)


class Device:
    """One rank's device: the real one, or a slower one that it emulates. Not thread-safe.

    `emulate` is the value of PACELINE_EMULATE, or None for the real device. A ValueError is raised
    if the value is not valid for `world` ranks.
    """

    def __init__(self, emulate: str | None, rank: int, world: int) -> None:
        self._rank = rank
        self._emulation = Emulation.parse(emulate, world) if emulate is not None else None
        # The script's own number of CPU threads, while the plan's number is in use; else None.
        self._own_threads: int | None = None
        # True if `begin` must be called even for a step without a planned number of threads.
        self.changes_steps = emulate is not None
        self.clock: Clock = CpuClock()
        # The model's device. In `_model`, each device that is not a CUDA device is replaced by the
        # CPU.
        self.place = self._model = torch.device("cpu")
        self._process = psutil.Process()
        if emulate is not None and rank == 0:
            logger.warning("device speeds are emulated: %s", emulate)

    def use(self, device: torch.device) -> None:
        """Set the device that the model is on."""
        self.place = device
        if device.type == "cuda":
            self._model, self.clock = device, CudaClock(device)

    def finish(self) -> None:
        """Wait until the model's device has completed all queued work."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # A model that is not wrapped yet is assumed to be on the current device.
            torch.cuda.synchronize(self._model if self._model.type == "cuda" else None)

    def memory(self) -> int:
        """Return bytes of memory in use: the GPU's peak, or this process's RSS. Thread-safe."""
        if self._model.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._model))
        return int(self._process.memory_info().rss)

    def described(self) -> RankDevice:
        """Return the rank's device, real or emulated, for `wire.Hello.devices`."""
        kind, memory = self.place.type, psutil.virtual_memory().total
        name = machine.processor() if kind == "cpu" else kind
        if kind == "cuda":
            name = torch.cuda.get_device_name(self._model)
            memory = torch.cuda.get_device_properties(self._model).total_memory
        name = "".join(filter(str.isprintable, name))[:MOST_DEVICE_NAME] or kind
        real = RankDevice(kind, name, machine.cores(), memory, threads=torch.get_num_threads())
        devices = [] if self._emulation is None else self._emulation.devices
        return devices[self._rank].of(real) if devices else real

    @property
    def on_cuda(self) -> bool:
        """Return True if the model is on a CUDA device."""
        return self._model.type == "cuda"

    @property
    def emulated(self) -> dict[str, Any] | None:
        """Return the emulation for `wire.Hello.emulated`."""
        return self._emulation.as_dict() if self._emulation is not None else None

    @property
    def loading_s(self) -> float:
        """Return the seconds that the emulation adds to the loading of a batch."""
        emulation = self._emulation
        return emulation.data_s[self._rank] if emulation is not None and emulation.data_s else 0.0

    def begin(self, step: LocalStep) -> float | None:
        """Set the step's number of CPU threads; return its emulated compute time in seconds.

        Return None if no device is emulated, or if the rank has no samples in the step.
        """
        emulation = self._emulation
        # `serial` is the fraction of a step that threads cannot speed up. If it is below 1, the
        # plan's number of threads changes only the emulated time, not the real number of threads.
        if emulation is None or emulation.serial == 1:
            self._take_threads(step.threads)
        if emulation is None or not step.samples:
            return None
        batch: Any = (step.samples, step.load, step.squares, step.longest)
        # A batch that was taken over from another rank has `planned`, the step for which it was
        # planned. That step's emulated delays apply to the batch.
        at = step.step if step.planned is None else step.planned
        return self._seconds(at, Features(*batch), step.threads, delayed=step.micro_index == 0)

    def trial(self, step: int, moments: tuple[float, float], *, overhead: bool = True) -> Hold:
        """Return a function that waits until the emulated device would have computed a trial batch.

        The first call of the returned function uses the emulated slowdowns and noise of `step`, and
        each later call those of the next step. `moments` are the means of λ and of λ² over the data
        set, where λ is a sample's size. Without `overhead`, the constant time per step and the
        delays are left out.
        """
        mean, square = moments
        steps = count(step)

        def hold(samples: int, began: float) -> None:
            if self._emulation is not None:
                batch: Any = (samples, samples * mean, samples * square, mean)
                of = (next(steps), Features(*batch), 1)
                seconds = self._seconds(*of, delayed=overhead, overhead=overhead)
                time.sleep(max(0.0, began + seconds - time.perf_counter()))

        return hold

    def measured_flops(self, step: int, moments: tuple[float, float], samples: int) -> float | None:
        """Measure the device's FLOP/s; return None on failure. See `trial` for the arguments.

        An emulated device takes as long for a matrix product as for a batch of `samples` samples.
        """
        return flops(self.place, partial(self.trial(step, moments, overhead=False), samples))

    def _seconds(
        self,
        step: int,
        batch: Features,
        threads: int,
        *,
        delayed: bool = True,
        overhead: bool = True,
    ) -> float:
        emulation = self._emulation
        assert emulation is not None
        if not overhead:
            emulation = replace(emulation, b_s=[0.0] * len(emulation.b_s))
        # A step is delayed only once, for any number of micro-batches.
        if not delayed:
            emulation = replace(emulation, delay_s=(0.0, 0.0))
        return emulation.rank_s(self._rank, step, batch, threads)

    def _take_threads(self, wanted: int) -> None:
        if wanted == 0:
            if self._own_threads is None:
                return
            wanted, self._own_threads = self._own_threads, None
        elif self._own_threads is None:
            self._own_threads, self.changes_steps = torch.get_num_threads(), True
        if wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)


def flops(device: torch.device, hold: Callable[[float], None]) -> float | None:
    """Measure the FLOP/s of products of square matrices during `TRIAL_S` seconds.

    `hold` is called after each product with the product's start time; if a device is emulated, it
    waits until that device would be done. Return None if the real device failed, for example
    because its memory is full.
    """
    side, dtype = _SIDES.get(device.type, _OTHERS)
    try:
        with torch.no_grad():
            # Constant values do not change the state of the script's random generator.
            factor = torch.full((side, side), 0.5, dtype=dtype, device=device)
            product = torch.empty_like(factor)
            # The first product allocates memory and wakes the device.
            _multiply(factor, product)
            began = ended = time.perf_counter()
            done = 0
            while not done or ended < began + TRIAL_S:
                start = time.perf_counter()
                _multiply(factor, product)
                hold(start)
                done, ended = done + 1, time.perf_counter()
    except RuntimeError as error:
        logger.warning("the FLOP/s of %s could not be measured: %s", device, error)
        return None
    return 2 * side**3 * done / (ended - began)


def _multiply(factor: torch.Tensor, product: torch.Tensor) -> None:
    torch.mm(factor, factor, out=product)
    # Read a value, to wait until the device has computed the product.
    float(product[0, 0])
