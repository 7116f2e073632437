"""The cases of `gpu_check.py` about memory: copies to the host, and running out of memory."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from gpu_cases import WIDTH, Place, mlp, session_over, sgd
from torch import nn
from torch.nn.functional import mse_loss

from paceline.train.sync.gradients import Flat, Gradient


@dataclass(frozen=True)
class Copying:
    """Steps with and without a copy of the gradient to the host.

    Args:
        hidden: width of the layers, which have no biases.
        layers: how many layers the model has.
        steps: steps of a block.
        blocks: how many blocks of steps there are for each way of copying.
    """

    hidden: int
    layers: int
    steps: int
    blocks: int


class Copier:
    """A model on one device whose gradients are copied as relaxed synchronisers copy them."""

    def __init__(self, place: Place, work: Copying) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(work.hidden, work.hidden, bias=False) for _ in range(work.layers)]
        self.place, self.work = place, work
        self.network = nn.Sequential(*layers).to(place.device)
        self.optimizer = torch.optim.SGD(self.network.parameters(), 0.0)
        self.flat = Flat([*self.network.parameters()], self.optimizer)
        self.rows = 256
        self.copied_s: list[float] = []
        self._pool = ThreadPoolExecutor(1)
        self._under_way: deque[Future[float]] = deque()

    @property
    def bytes(self) -> int:
        """Size of the model's parameters."""
        return sum(p.numel() * p.element_size() for p in self.network.parameters())

    def step(self, scale: float = 1.0) -> None:
        """Computes gradients into the memory of the step before."""
        self.optimizer.zero_grad(set_to_none=False)
        x = torch.full((self.rows, self.work.hidden), scale, device=self.place.device)
        self.network(x).square().mean().backward()

    def read(self) -> Gradient:
        """Begins to copy the gradients, times 0.5."""
        return self.flat.read(self.optimizer, 0.5, 1.0, 1)

    def alone(self) -> None:
        """A step without a copy."""
        self.step()

    def waiting(self) -> None:
        """A step whose copy is awaited at once."""
        self.step()
        self.copied_s.append(_arrived(self.read()))

    def beside(self) -> None:
        """A step whose copy is awaited after the next step."""
        self.step()
        self._under_way.append(self._pool.submit(_arrived, self.read()))
        if len(self._under_way) > 1:
            self.copied_s.append(self._under_way.popleft().result())

    def seconds(self, way: Callable[[], None]) -> float:
        """Time of a block of steps."""
        self.place.synchronize()
        began = time.perf_counter()
        for _ in range(self.work.steps):
            way()
        while self._under_way:
            self.copied_s.append(self._under_way.popleft().result())
        self.place.synchronize()
        return time.perf_counter() - began

    def calibrate(self) -> None:
        """Makes batches larger until a step takes 1.5 times as long as a copy.

        Then a copy fits behind a step, and a copy in a step's way is seen in the step's time.
        """
        for _ in range(8):
            self.seconds(self.waiting)
            copy_s = statistics.median(self.copied_s[-self.work.steps :])
            if self.seconds(self.alone) / self.work.steps >= 1.5 * copy_s:
                return
            self.rows *= 2


def copied(kind: str, work: Copying) -> dict[str, Any]:
    """Times of blocks of steps for each way, and whether a copy holds what was computed."""
    copier = Copier(Place(kind), work)
    copier.step()
    right = all(_holds(copier, float(scale)) for scale in range(1, 4))
    if kind == "cuda":
        copier.calibrate()
    copier.copied_s.clear()
    ways = {"alone": copier.alone, "beside": copier.beside, "waiting": copier.waiting}
    for way in ways.values():
        copier.seconds(way)  # warms up the allocator of page-locked memory
    copier.copied_s.clear()
    blocks = [{n: copier.seconds(way) for n, way in ways.items()} for _ in range(work.blocks)]
    copied_s = statistics.median(copier.copied_s)
    return {
        "right": right,
        "blocks": blocks,
        "copied_s": copied_s,
        "bytes": copier.bytes,
        "rows": copier.rows,
        "bandwidth": copier.bytes / copied_s,
    }


def _holds(copier: Copier, scale: float) -> bool:
    """Whether a copy holds its own step's gradients after two more steps overwrote them."""
    copier.step(scale)
    grads = [p.grad for p in copier.network.parameters() if p.grad is not None]
    expected = torch.cat([grad.flatten() for grad in grads]) * 0.5
    gradient = copier.read()
    for further in (10.0, 20.0):
        copier.step(scale * further)
    _arrived(gradient)
    equal: bool = torch.equal(gradient.vector[: len(expected)], expected.cpu())
    return equal


def _arrived(gradient: Gradient) -> float:
    """Waits for a copy, and returns how many seconds the copy took."""
    return gradient.arrive() if gradient.arrive is not None else gradient.copied_s


# Memory

FITS = 32  # samples that shall fit into memory
SAMPLE_BYTES = 16 << 20


def profiled(kind: str) -> dict[str, int]:
    """How many samples fit, by profiling, and the largest batch of the training after that."""
    place = Place(kind)
    network = mlp(32, place.device)
    with session_over(4 * 64, 64) as session, _room(place, FITS * SAMPLE_BYTES * 3 // 2):
        model, optimizer = session.wrap(network), sgd(network)

        def run_batch(samples: int) -> None:
            if kind == "cpu" and samples > FITS:
                raise MemoryError
            size = samples * SAMPLE_BYTES if kind == "cuda" else 1
            held = torch.empty(size, dtype=torch.uint8, device=place.device)
            model(torch.ones(samples, WIDTH, device=place.device)).mean().backward()
            del held

        profile = session.profile(run_batch)
        largest = 0
        for _, x, y in session.loader():
            largest = max(largest, session.batch.samples)
            optimizer.zero_grad()
            mse_loss(model(x.to(place.device)), y.to(place.device)).backward()
            optimizer.step()
    return {"limit": profile.limit or 0, "largest": largest}


@contextlib.contextmanager
def _room(place: Place, room_bytes: int) -> Iterator[None]:
    """Lets this process allocate at most `room_bytes` more on the GPU than it holds already."""
    if place.kind == "cpu":
        yield
        return
    torch.cuda.empty_cache()
    allowed = torch.cuda.memory_reserved(place.device) + room_bytes
    whole = torch.cuda.get_device_properties(place.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / whole), place.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, place.device)
