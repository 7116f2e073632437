"""Profiling phase before training: times by batch size, and memory limits (paper LBB, Alg. 1).

`Limits` are the numbers of samples, or the total sizes, that fit into each rank's memory, according
to the user or to profiles.
"""

from __future__ import annotations

import json
import math
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.core.errors import PacelineError
from paceline.core.terms import whole
from paceline.core.trials import TIMINGS, trial_sizes

if TYPE_CHECKING:
    from paceline.train.fsdp.model import Wrapped
    from paceline.train.startup import Startup

_MEMORY_RAN_OUT = ("out of memory", "not enough memory", "defaultcpuallocator", "alloc_failed")

Floats = npt.NDArray[np.float64]
# Function that waits until the device has completed all queued work.
Finish = Callable[[], None]
# Function that is called with a batch's number of samples and its start time; see `measure`.
Hold = Callable[[int, float], None]
# Function that computes a batch of a number of samples, and returns the seconds it took.
TimeBatch = Callable[[int], float]
# Function from the last and the next number of samples to True if the next one fits into memory.
HasRoom = Callable[[int, int], bool]


class Profile(msgspec.Struct, frozen=True):
    """Measured times of batches on one rank, and the rank's memory limit."""

    # Number of samples and seconds of each batch, by ascending number of samples.
    times: list[tuple[int, float]]
    # Maximum number of samples that fit into memory; None: memory never ran out.
    limit: int | None = None


def measure(run_batch: Callable[[int], object], most: int, finish: Finish, hold: Hold) -> Profile:
    """Time batches of 2, 4, 8, … samples, until memory runs out, and one of `most` samples.

    `finish` waits for the model's device. `hold` waits until the emulated device, if there is one,
    would be done. Errors are as those of `measure_with`.
    """
    return measure_with(partial(_timed, run_batch, finish, hold), most)


def measure_with(
    time_batch: TimeBatch,
    most: int,
    *,
    share: int = 0,
    most_s: float = math.inf,
    has_room: HasRoom = lambda _last, _following: True,
) -> Profile:
    """Return the profile of 2, 4, 8, … and `most` samples, until memory or time runs out.

    If memory runs out at a size above `share`, that number of samples is tried as well. The profile
    ends before a size that would probably be done more than `most_s` seconds after the start,
    reading included, or for which `has_room` is False. It also ends after a pass that is done later
    than that. So it may have no times. A PacelineError means that memory ran out at the first
    batch. Other errors of `time_batch` are raised unchanged.
    """
    sizes, times = deque(trial_sizes(most)), list[tuple[int, float]]()
    began, ran_out, expected_s = time.perf_counter(), False, 0.0
    while sizes:
        samples, started = sizes.popleft(), time.perf_counter()
        if times:
            last, _ = times[-1]
            if started - began + expected_s * samples / last > most_s:
                break
            if not has_room(last, samples):
                break
        passes: list[float] = []
        try:
            # The first pass of all is not timed, because it allocates, compiles and warms up.
            for _ in range(TIMINGS if times else TIMINGS + 1):
                if time.perf_counter() - began > most_s:
                    break
                passes.append(time_batch(samples))
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
        else:
            if len(passes) < TIMINGS:
                break
            time_s = statistics.median(passes[-TIMINGS:])
            reading_s = time.perf_counter() - started - sum(passes)
            times.append((samples, time_s))
            # Time of the passes of this size, without the first pass of all.
            expected_s = reading_s + TIMINGS * time_s
            continue
        # Empty the cache only after the exception handler, in which the traceback would still refer
        # to the batch.
        torch.cuda.empty_cache()
        if not times:
            raise PacelineError(f"profile: memory ran out at the first batch, of {samples} samples")
        ran_out = True
        sizes = deque([share] if times[-1][0] < share < samples else [])
    return Profile(times, times[-1][0] if ran_out else None)


class FreeMemory:
    """Estimate of whether trial batches fit into the machine's main memory.

    On Linux an allocation succeeds even if the machine has too little memory, and the kernel then
    ends a process. `ranks` is the number of ranks on the machine, which share the memory.
    """

    def __init__(self, ranks: int) -> None:
        self._free = psutil.virtual_memory().available / ranks
        self._used, self._peak = psutil.Process().memory_info().rss, _peak_bytes()
        # True once a size did not fit.
        self.is_short = False

    def has_room(self, last: int, following: int) -> bool:
        """Return True if a batch of `following` samples probably fits after one of `last` samples.

        The memory by which the process has grown in the trials counts as proportional to the number
        of samples. A process that was larger before the trials than in them counts as not grown.
        """
        peak = _peak_bytes()
        grown = peak - self._used if peak > self._peak else 0
        self.is_short = grown * following / last > self._free
        return not self.is_short


def _peak_bytes() -> int:
    """Return the most memory that this process has had, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _timed(run_batch: Callable[[int], object], finish: Finish, hold: Hold, samples: int) -> float:
    finish()
    began = time.perf_counter()
    run_batch(samples)
    finish()
    hold(samples, began)
    return time.perf_counter() - began


def out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that memory ran out, on a CPU or on a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # PyTorch's CPU allocator, cuDNN, cuBLAS, CUDA and MPS raise a plain RuntimeError.
    said = str(error).lower()
    return any(words in said for words in _MEMORY_RAN_OUT)


@contextmanager
def unreduced(models: Iterable[Wrapped]) -> Iterator[None]:
    """Keep wrapped models from reducing gradients; clear gradients on exit, except on an error."""
    with ExitStack() as local:
        for model in models:
            local.enter_context(model.unreduced())
        yield
    for model in models:
        model.zero_grad()


@contextmanager
def _unstepped(models: Iterable[Wrapped]) -> Iterator[None]:
    ours = {id(parameter) for model in models for parameter in model.parameters()}

    def refuse(optimiser: torch.optim.Optimizer, *_: Any) -> None:
        if any(id(p) in ours for group in optimiser.param_groups for p in group["params"]):
            raise PacelineError(
                "profile: run_batch steps an optimiser, but profiling does not reduce gradients, "
                "so the ranks' models would differ: leave optimizer.step() out of run_batch"
            )

    hook = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


class Outcome(msgspec.Struct, frozen=True):
    """A rank's profile, or why it has none."""

    profile: Profile | None
    error: str = ""


def gather(store: Store, rank: int, world: int, measured: Callable[[], Profile]) -> list[Profile]:
    """Measure on this rank; return every rank's profile. All ranks must call this equally often.

    An error of `measured` is raised unchanged on its own rank. The other ranks raise a
    PacelineError that names the failed rank.
    """
    failure: Exception | None = None
    try:
        mine = Outcome(measured())
    except Exception as error:
        mine, failure = Outcome(None, f"{type(error).__name__}: {error}"), error
    outcomes = exchange(store, rank, world, mine)
    if failure is not None:
        raise failure
    every = []
    for other, outcome in enumerate(outcomes):
        if outcome.profile is None:
            raise PacelineError(f"profile: on rank {other}: {outcome.error}")
        every.append(outcome.profile)
    return every


def exchange(store: Store, rank: int, world: int, mine: Outcome) -> list[Outcome]:
    """Return every rank's outcome, [W]. All ranks must call this equally often."""
    # Each call has keys of its own, because an earlier call may have failed and left its entries.
    call = store.add(f"profile/calls/{rank}", 1)
    store = PrefixStore(f"profile/{call}", store)
    store.set(str(rank), msgspec.json.encode(mine).decode())
    outcomes = [msgspec.json.decode(store.get(str(other)), type=Outcome) for other in range(world)]
    _wait_for_readers(store, rank, world)
    return outcomes


def profile_ranks(
    startup: Startup,
    models: Iterable[Wrapped],
    finish: Finish,
    hold: Callable[[tuple[float, float]], Hold],
    run_batch: Callable[[int], object],
    most: int,
) -> list[Profile]:
    """Measure on each rank; see `Session.profile`. All ranks must call this equally often.

    `run_batch`, `most` and `finish` are passed to `measure`. `hold` returns the `hold` argument of
    `measure`, given the means of λ and of λ², where λ is a sample's size. The models do not reduce
    gradients during the call. Errors are raised as `gather` raises them.
    """
    models = list(models)
    with unreduced(models), _unstepped(models):
        of_sizes = hold(shared_moments(startup.store, startup.sizes))
        trial = partial(measure, run_batch, most, finish, of_sizes)
        return gather(startup.store, startup.rank, startup.world, trial)


def _wait_for_readers(store: Store, rank: int, world: int) -> None:
    """Record that this rank needs no more profiles; on rank 0, wait until all ranks have done so.

    Without this wait, rank 0, which hosts the store, could end before other ranks have read the
    profiles.
    """
    store.set(f"read/{rank}", "")
    if rank == 0:
        store.wait([f"read/{other}" for other in range(world)])


def shared_moments(store: Store, sizes: Floats | None) -> tuple[float, float]:
    """Return the means of λ and of λ². All ranks call this; only rank 0 has the `sizes` λ."""
    if sizes is not None:
        # The sizes of a stream are not known yet, so all count as 1.
        sizes = sizes if len(sizes) else np.ones(1)
        store.set("profile/sizes", json.dumps([float(sizes.mean()), float((sizes**2).mean())]))
    mean, square = json.loads(store.get("profile/sizes"))
    return mean, square


def shared_typical(store: Store, sizes: Floats | None, most: int) -> list[int]:
    """Return the indices of `most` typical samples, which rank 0 chooses. All ranks call this.

    The sizes of the chosen samples are quantiles of all sizes, in ascending order.
    """
    if sizes is not None:
        order = np.argsort(sizes, kind="stable")
        places = (np.arange(most) + 0.5) * len(order) / most
        store.set("profile/typical", json.dumps(order[places.astype(np.int64)].tolist()))
    typical: list[int] = json.loads(store.get("profile/typical"))
    return typical


def spread(items: list[int], count: int) -> list[int]:
    """Return `count` items at equal distances; if `count` is 1, return the middle item."""
    places = (np.arange(count) + 0.5) * len(items) / count
    return [items[int(place)] for place in places]


def listed_limits(limits: Any) -> list[int]:
    """Return the user's limits as a list: an empty list for None, a list of one for a number.

    Limits that are not whole numbers ≥ 0 raise a TypeError or a ValueError.
    """
    if limits is None:
        return []
    each = np.atleast_1d(np.asarray(limits, object)).tolist()
    plain = [n.item() if isinstance(n, np.generic) else n for n in each]
    return [whole("limits", limit, 0) for limit in plain]


@dataclass(frozen=True)
class Limits:
    """Limits of the memory of W ranks, and whether they limit local batches or micro-batches."""

    # Number of samples that fit into each rank's memory at once, [W]; empty: unknown.
    samples: list[int]
    # True if a local batch may exceed the rank's limit, because it is cut into micro-batches.
    micro_batches: bool = False
    # Total size that fits into each rank's memory at once, [W]; empty: unknown.
    tokens: list[float] = field(default_factory=list)

    @property
    def cuts(self) -> bool:
        """Return True if local batches are cut into micro-batches."""
        return bool(self.of_micro_batches or self.tokens_of_micro_batches)

    @property
    def of_parts(self) -> list[int]:
        """Return the maximum number of samples of each rank's local batch, [W]; empty: no limit."""
        return [] if self.micro_batches else self.samples

    @property
    def of_micro_batches(self) -> list[int]:
        """Return each rank's micro-batch limit in samples, [W].

        The result is empty if there is no limit, or if local batches are not cut.
        """
        return self.samples if self.micro_batches else []

    @property
    def tokens_of_parts(self) -> list[float]:
        """Return the maximum total size of each rank's local batch, [W]; empty: no limit."""
        return [] if self.micro_batches else self.tokens

    @property
    def tokens_of_micro_batches(self) -> list[float]:
        """Return each rank's micro-batch limit in total size, [W].

        The result is empty if there is no limit, or if local batches are not cut.
        """
        return self.tokens if self.micro_batches else []


def limits_of(
    given: list[int],
    profiles: list[Profile],
    global_batch: int,
    world: int,
    micro_batches: bool = False,
) -> Limits:
    """Return the ranks' limits in samples, from the user's limits and from profiles.

    `given` has one limit for each rank, or one for all, or none.

    Raises:
        ValueError: the number of the user's limits is wrong, or a limit is 0 with `micro_batches`.
        PacelineError: the ranks together cannot hold a global batch.
    """
    if len(given) not in (0, 1, world):
        raise ValueError(f"limits is {given}: give one number, or one for each of {world} ranks")
    given = given * world if len(given) == 1 else given
    measured = [p.limit for p in profiles]
    if not given and not any(limit is not None for limit in measured):
        return Limits([], micro_batches)
    known = [given or [global_batch] * world]
    if profiles:
        known.append([global_batch if limit is None else limit for limit in measured])
    limits = [min(of_rank) for of_rank in zip(*known, strict=True)]
    if micro_batches and min(limits) < 1:
        raise ValueError(f"limits is {limits}: with micro_batches=True each must be at least 1")
    if sum(limits) < global_batch and not micro_batches:
        raise PacelineError(
            f"{limits} samples fit into the ranks' memory, {sum(limits)} together, fewer than the "
            f"global batch of {global_batch}: give Session a smaller global_batch or "
            "micro_batches=True, or more ranks"
        )
    return Limits(limits, micro_batches)
