"""Cases that ranks run on a GPU or on the CPU, for tests and for `benchmarks/gpu_check.py`."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import paceline
from paceline.train.sync.gradients import Flat, Gradient
from paceline.wire import ALLREDUCE
from paceline.wire.synchronisation import Synchronisation
from support.relaxing import planned

WIDTH = 16  # values of a sample
MOST_VALUES = 4096  # most values of a replica that a case returns
WARM = 5  # first pairs of steps, which do not count


@dataclass(frozen=True)
class Place:
    """Where models are.

    Args:
        kind: "cuda" or "cpu"; all ranks share the first GPU.
    """

    kind: str

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.kind == "cuda" else torch.device("cpu")

    def synchronize(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize(self.device)


class Data(torch.utils.data.Dataset[tuple[int, Tensor, Tensor]]):
    """Sample i is (i, an input [WIDTH], a target [1]). Sizes are 1, 2, 3, 1, 2, 3, …"""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, WIDTH, generator=generator)
        self.y = self.x.sum(1, keepdim=True) / WIDTH**0.5
        self.sizes = [1.0 + index % 3 for index in range(count)]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.y[index]


class Sequences(nn.Module):
    """A convolution and a recurrent layer over a sample as 8 steps of 2 values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(2, 8, 3, padding=1)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, WIDTH] → [B, 1]."""
        hidden = torch.relu(self.first(x.view(len(x), 2, -1)))
        outputs: Tensor = self.gru(hidden.transpose(1, 2))[0]
        return self.last(outputs.mean(1))  # type: ignore[no-any-return]


def mlp(hidden: int, device: torch.device, layers: int = 1) -> nn.Module:
    """A network [B, WIDTH] → [B, 1] with the same parameters on all ranks."""
    torch.manual_seed(0)
    deep = [m for _ in range(layers) for m in (nn.Linear(hidden, hidden), nn.Tanh())]
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.Tanh(), *deep, nn.Linear(hidden, 1)).to(
        device
    )


def sgd(network: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    """The optimiser of every case. Wide models would diverge, so their learning rate is lower."""
    width = max(max(p.shape) for p in network.parameters())
    return torch.optim.SGD(network.parameters(), min(0.01, 1 / width), momentum=0.5, fused=fused)


@contextlib.contextmanager
def session_over(count: int, batch: int, **options: Any) -> Iterator[paceline.Session]:
    """A session over `Data`, closed in the end."""
    with contextlib.closing(paceline.Session(Data(count), global_batch=batch, **options)) as made:
        yield made


# Timing


@dataclass(frozen=True)
class Timing:
    """Steps whose computing is measured twice.

    Args:
        steps: steps of the case; the stopwatch watches every second step.
        repeats: how often the device repeats each sample.
        slow_rank: rank that gets extra work from the middle on; -1: no rank.
        extra: matrix products of the extra work in a step.
    """

    steps: int
    hidden: int
    repeats: int
    slow_rank: int
    extra: int


class Stopwatch:
    """Synchronised times of watched steps, from their start to their last gradient."""

    def __init__(self, place: Place, network: nn.Module) -> None:
        self.times_s: dict[int, float] = {}  # step → seconds
        self._place, self._step = place, -1
        self._began = 0.0
        register_multi_grad_hook([*network.parameters()], self._computed)

    def begin(self, step: int) -> None:
        """Watches even steps only: synchronising the device changes how fast a step is."""
        self._step = step if step % 2 == 0 else -1
        if self._step >= 0:
            self._place.synchronize()
            self._began = time.perf_counter()

    def _computed(self, _: Sequence[Tensor | None]) -> None:
        # DDP's hook runs later: it is on the accumulated gradient.
        if self._step >= 0:
            self._place.synchronize()
            self.times_s[self._step] = time.perf_counter() - self._began


def timed(kind: str, work: Timing) -> dict[int, float]:
    """Synchronised seconds of watched steps. The session reports its own seconds in telemetry."""
    place, world = Place(kind), dist.get_world_size()
    network = mlp(work.hidden, place.device, layers=2)
    matrix = torch.eye(work.hidden, device=place.device)
    with session_over(work.steps * 8 * world, 8 * world) as session:
        model, optimizer = session.wrap(network), sgd(network)
        watch = Stopwatch(place, network)
        for _, x, y in session.loader():
            step = session.batch.step
            watch.begin(step)
            x, y = (t.to(place.device).repeat(work.repeats, 1) for t in (x, y))
            if session.rank == work.slow_rank and step >= work.steps // 2:
                for _ in range(work.extra):
                    matrix = matrix @ matrix
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
    return watch.times_s


# Weighted gradients


def weighted(
    kind: str, loss_mean: str, shares: list[float], model_kind: str, backend: str | None = None
) -> dict[str, Any]:
    """Gradients beside those of one process that has the global batch.

    Args:
        loss_mean: "samples" or "size".
        shares: each rank's share of the load after the first segment; empty: equal shares.
        model_kind: "sequences" or "mlp".
        backend: the backend of ``torch.compile``; None: the model is not compiled.

    Returns:
        the relative errors of all steps, and how many of this rank's batches were empty; or why
        models cannot be compiled here.
    """
    place, data = Place(kind), Data(96)
    torch.manual_seed(0)
    network: nn.Module = Sequences() if model_kind == "sequences" else mlp(32, place.device)
    reference = copy.deepcopy(network).to(place.device)
    network = network.to(place.device)
    errors, empty = [], 0
    if backend is not None and (why := _not_compiled(reference, data, place, backend)):
        return {"unavailable": why}
    with (
        torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False),
        planned([ALLREDUCE], shares),
        session_over(len(data), 12, loss_mean=loss_mean) as session,
    ):
        given = network if backend is None else torch.compile(network, backend=backend)
        model, optimizer = session.wrap(given), sgd(network)
        for indices, _, _ in session.loader():
            used = [] if session.batch.empty else indices.tolist()
            empty += session.batch.empty
            reference.load_state_dict(network.state_dict())
            for trained_model, rows in ((model, indices.tolist()), (reference, _gathered(used))):
                trained_model.zero_grad()
                _loss(trained_model, data, rows, loss_mean, place.device).backward()
            errors.append(_difference(network, reference))
            optimizer.step()
    return {"errors": errors, "empty": empty}


def _not_compiled(network: nn.Module, data: Data, place: Place, backend: str) -> str:
    try:
        compiled = torch.compile(network, backend=backend)
        _loss(compiled, data, [0, 1], "samples", place.device).backward()
    except Exception as error:  # compilers and Triton raise any kind of error
        return f"{type(error).__name__}: {error}"[:500]
    return ""


def _gathered(used: list[int]) -> list[int]:
    parts: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(parts, used)
    return [index for part in parts for index in part]


def _loss(
    model: Callable[[Tensor], Tensor],
    data: Data,
    rows: list[int],
    loss_mean: str,
    device: torch.device,
) -> Tensor:
    x, y = data.x[rows].to(device), data.y[rows].to(device)
    size = torch.tensor([data.sizes[row] for row in rows], device=device)[:, None]
    weight = size if loss_mean == "size" else torch.ones_like(size)
    return ((model(x) - y) ** 2 * weight).sum() / weight.sum()


def _difference(network: nn.Module, reference: nn.Module) -> float:
    got, want = (
        torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]).double()
        for m in (network, reference)
    )
    return float((got - want).norm() / want.norm())


# Synchronisers, also with mixed precision


@dataclass(frozen=True)
class Training:
    """Some epochs under several synchronisers in turn.

    Args:
        chain: synchronisers from the second segment on; the first segment is all-reduced.
        layers: hidden layers, each `hidden` by `hidden`.
        amp: whether the case trains with autocast and a gradient scaler.
        fused: whether the optimiser unscales gradients by itself.
        overflow: step and rank whose loss is infinite.
        cpu_ranks: ranks whose replica is on the CPU, whatever the kind of device.
    """

    chain: tuple[Synchronisation, ...]
    hidden: int = 32
    layers: int = 1
    amp: bool = False
    fused: bool = False
    overflow: tuple[int, int] | None = None
    cpu_ranks: tuple[int, ...] = ()
    samples: int = 16 * 12
    batch: int = 12
    segment: int = 4
    epochs: int = 2


def trained(kind: str, work: Training) -> dict[str, Any]:
    """This rank's replica after training, the samples that it used, and its scaler's scale."""
    rank = dist.get_rank()
    place = Place("cpu" if rank in work.cpu_ranks else kind)
    network = mlp(work.hidden, place.device, work.layers)
    optimizer = sgd(network, fused=work.fused)
    scaler = torch.amp.GradScaler(place.kind, init_scale=256.0, enabled=work.amp)
    used: list[list[int]] = [[] for _ in range(work.epochs)]
    with (
        planned(list(work.chain), steps=work.segment),
        session_over(work.samples, work.batch, seed=3) as session,
    ):
        model = session.wrap(network)
        loader = session.loader(pin_memory=place.kind == "cuda")
        for epoch in range(work.epochs):
            for indices, x, y in loader:
                used[epoch] += [] if session.batch.empty else indices.tolist()
                _train_step(session, model, optimizer, scaler, work, x, y)
    return _replica(network, optimizer) | {"used": used, "scale": scaler.get_scale()}


def _train_step(
    session: paceline.Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    work: Training,
    x: Tensor,
    y: Tensor,
) -> None:
    device = next(model.parameters()).device
    precision = torch.float16 if device.type == "cuda" else torch.bfloat16
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=precision, enabled=work.amp):
        outputs = model(x.to(device, non_blocking=True))
    loss = mse_loss(outputs.float(), y.to(device, non_blocking=True))
    session.log(loss=loss)
    if work.overflow == (session.batch.step, session.rank):
        loss = loss * torch.inf
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def _replica(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Digest of the parameters and the optimiser's state, and some of the values."""
    state = [p.detach() for p in network.parameters()]
    for kept in optimizer.state.values():
        state += [value for _, value in sorted(kept.items()) if torch.is_tensor(value)]
    vector = torch.cat([part.flatten().float().cpu() for part in state])
    stride = -(-len(vector) // MOST_VALUES)
    return {
        "digest": hashlib.sha256(vector.numpy().tobytes()).hexdigest(),
        "finite": bool(torch.isfinite(vector).all()),
        "values": vector[::stride].tolist(),
        "bytes": sum(p.numel() * p.element_size() for p in network.parameters()),
    }


# Overhead


class Pair(NamedTuple):
    """A plain DDP step and a session's step, with their loading, one after the other.

    Args:
        plain_s, paced_s: from the step's begin until the device is through with it.
        plain_cpu_s, paced_cpu_s: processor time of the script's thread in that.
    """

    plain_s: float
    paced_s: float
    plain_cpu_s: float
    paced_cpu_s: float


def paired(kind: str, pairs: int, hidden: int) -> list[Pair]:
    """Times of a plain DDP step and of a session's step, in turn."""
    place, world = Place(kind), dist.get_world_size()
    data, batch = Data((pairs + WARM) * 8 * world), 8 * world
    networks = [mlp(hidden, place.device) for _ in range(2)]
    sampler: Any = DistributedSampler(data)
    plain = _stepper(
        iter(DataLoader(data, 8, sampler=sampler)),
        DistributedDataParallel(networks[0]),
        place,
    )
    times: list[Pair] = []
    with contextlib.closing(paceline.Session(data, global_batch=batch)) as session:
        batches = iter(session.loader())
        paced = _stepper(batches, session.wrap(networks[1]), place)
        for turn in range(pairs + WARM):
            order = (plain, paced) if turn % 2 else (paced, plain)
            took = {step: _seconds(step, place) for step in order}
            (plain_s, plain_cpu_s), (paced_s, paced_cpu_s) = took[plain], took[paced]
            times.append(Pair(plain_s, paced_s, plain_cpu_s, paced_cpu_s))
        for _ in batches:  # ends the loop as a script would
            pass
    return times[WARM:]


def _stepper(batches: Iterator[Any], model: nn.Module, place: Place) -> Callable[[], None]:
    optimizer = sgd(model)

    def step() -> None:
        _, x, y = next(batches)
        optimizer.zero_grad()
        mse_loss(model(x.to(place.device)), y.to(place.device)).backward()
        optimizer.step()

    return step


def _seconds(step: Callable[[], None], place: Place) -> tuple[float, float]:
    """Time of a step, and processor time of this thread in it."""
    place.synchronize()
    if dist.get_world_size() > 1:  # not for one rank: NCCL's barrier is a reduction on the device
        dist.barrier()
    began, worked = time.perf_counter(), time.thread_time()
    step()
    place.synchronize()
    return time.perf_counter() - began, time.thread_time() - worked


# Copies to the host


@dataclass(frozen=True)
class Copying:
    """Steps with and without a copy of the gradient to the host.

    Args:
        hidden: width of the layers, which have no biases.
        layers: how many layers the model has.
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
