"""The profiling phase: what batches of each size cost a rank, before training (LBB Alg. 1)."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.core.errors import PacelineError
from paceline.core.terms import whole

if TYPE_CHECKING:
    from paceline.train.fsdp.model import Wrapped
    from paceline.train.meeting import Meeting

_TIMINGS = 3  # timings of each batch size; their median counts
_MEMORY_RAN_OUT = ("out of memory", "not enough memory", "defaultcpuallocator", "alloc_failed")

Floats = npt.NDArray[np.float64]
Finish = Callable[[], None]  # waits until the device has done all that it was given
Hold = Callable[[int, float], None]  # called with samples, and when their batch began


class Profile(msgspec.Struct, frozen=True):
    """What one rank measured."""

    times: list[tuple[int, float]]  # samples and seconds, ascending
    limit: int | None = None  # most samples that fit into memory; None: even `most` fitted


def measure(run_batch: Callable[[int], object], most: int, finish: Finish, hold: Hold) -> Profile:
    """Times batches of 2, 4, 8, … samples, until memory runs out, and of `most`.

    Args:
        run_batch: runs forward and backward on a number of samples.
        most: the largest number of samples.
        finish: waits for the model's device.
        hold: waits until the emulated device is done with a batch.

    Raises:
        PacelineError: memory runs out at the first batch.
        whatever `run_batch` raises, unless it says that memory ran out.
    """
    sizes = [min(2**k, most) for k in range(1, max(most - 1, 1).bit_length() + 1)]
    times: list[tuple[int, float]] = []
    timed = partial(_timed, run_batch, finish, hold)
    for samples in sizes:
        try:
            if not times:
                timed(samples)  # allocates, compiles, warms up
            several = [timed(samples) for _ in range(_TIMINGS)]
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
        else:
            times.append((samples, statistics.median(several)))
            continue
        # Not in the handler, whose traceback keeps the batch alive.
        torch.cuda.empty_cache()
        if not times:
            raise PacelineError(f"profile: memory ran out at the first batch, of {samples} samples")
        return Profile(times, times[-1][0])
    return Profile(times)


def _timed(run_batch: Callable[[int], object], finish: Finish, hold: Hold, samples: int) -> float:
    finish()
    began = time.perf_counter()
    run_batch(samples)
    finish()
    hold(samples, began)
    return time.perf_counter() - began


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a CPU or on a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # PyTorch's CPU allocator, cuDNN, cuBLAS, CUDA and MPS raise a plain RuntimeError.
    said = str(error).lower()
    return any(words in said for words in _MEMORY_RAN_OUT)


@contextmanager
def unreduced(models: Iterable[Wrapped]) -> Iterator[None]:
    """Within it wrapped models do not reduce gradients; unless it raises, they have none after."""
    with ExitStack() as local:
        for model in models:
            local.enter_context(model.unreduced())
        yield
    for model in models:
        model.zero_grad()


@contextmanager
def _unstepped(models: Iterable[Wrapped]) -> Iterator[None]:
    """Within it an optimiser that steps wrapped models raises a PacelineError."""
    ours = {id(parameter) for model in models for parameter in model.parameters()}

    def refuse(optimiser: torch.optim.Optimizer, *_: Any) -> None:
        if any(id(p) in ours for group in optimiser.param_groups for p in group["params"]):
            raise PacelineError(
                "profile: run_batch steps an optimiser, and gradients are not reduced meanwhile: "
                "the ranks' models would differ. Leave optimizer.step() out of it"
            )

    hook = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


class _Outcome(msgspec.Struct, frozen=True):
    """What came of measuring on one rank."""

    profile: Profile | None
    error: str = ""


def gather(store: Store, rank: int, world: int, measured: Callable[[], Profile]) -> list[Profile]:
    """Measures on this rank and returns every rank's profile. All ranks call it, equally often.

    Raises:
        PacelineError: another rank failed to measure; the message names that rank.
        whatever `measured` raises on this rank.
    """

    # An earlier call may have failed and left entries that must not be read.
    call = store.add(f"profile/calls/{rank}", 1)
    store = PrefixStore(f"profile/{call}", store)

    def publish(outcome: _Outcome) -> None:
        store.set(str(rank), msgspec.json.encode(outcome).decode())

    try:
        mine = measured()
    except Exception as error:
        publish(_Outcome(None, f"{type(error).__name__}: {error}"))
        _part(store, rank, world)
        raise
    publish(_Outcome(mine))
    outcomes = [msgspec.json.decode(store.get(str(other)), type=_Outcome) for other in range(world)]
    _part(store, rank, world)
    every = []
    for other, outcome in enumerate(outcomes):
        if outcome.profile is None:
            raise PacelineError(f"profile: on rank {other}: {outcome.error}")
        every.append(outcome.profile)
    return every


def profile_ranks(
    meeting: Meeting,
    models: Iterable[Wrapped],
    finish: Finish,
    hold: Callable[[tuple[float, float]], Hold],
    run_batch: Callable[[int], object],
    most: int,
) -> list[Profile]:
    """Measures on each rank; see `Session.profile`. All ranks call it.

    Args:
        meeting: what the ranks know of each other.
        models: which do not reduce gradients meanwhile.
        finish: see `measure`.
        hold: makes what `measure` needs from the means of λ and of λ².
        run_batch: see `measure`.
        most: see `measure`.

    Returns:
        What each rank measured.

    Raises:
        PacelineError, and what `run_batch` raises: see `gather`.
    """
    models = list(models)
    with unreduced(models), _unstepped(models):
        of_sizes = hold(shared_moments(meeting.store, meeting.sizes))
        trial = partial(measure, run_batch, most, finish, of_sizes)
        return gather(meeting.store, meeting.rank, meeting.world, trial)


def _part(store: Store, rank: int, world: int) -> None:
    """This rank has read everything. Rank 0, whose store ends with it, waits for all ranks."""
    store.set(f"read/{rank}", "")
    if rank == 0:
        store.wait([f"read/{other}" for other in range(world)])


def shared_moments(store: Store, sizes: Floats | None) -> tuple[float, float]:
    """Gives all ranks the means of λ and of λ², which rank 0 knows; each rank calls it."""
    if sizes is not None:
        sizes = sizes if len(sizes) else np.ones(1)  # of a stream they are not known yet
        store.set("profile/sizes", json.dumps([float(sizes.mean()), float((sizes**2).mean())]))
    mean, square = json.loads(store.get("profile/sizes"))
    return mean, square


def shared_typical(store: Store, sizes: Floats | None, most: int) -> list[int]:
    """Gives all ranks typical samples, whose sizes rank 0 knows; each rank calls it.

    Returns:
        The places of `most` samples in the data set; their sizes are its quantiles, ascending.
    """
    if sizes is not None:
        order = np.argsort(sizes, kind="stable")
        places = (np.arange(most) + 0.5) * len(order) / most
        store.set("profile/typical", json.dumps(order[places.astype(np.int64)].tolist()))
    typical: list[int] = json.loads(store.get("profile/typical"))
    return typical


def spread(items: list[int], count: int) -> list[int]:
    """So many of the items, at equal distances: the middle one, those at a quarter, and so on."""
    places = (np.arange(count) + 0.5) * len(items) / count
    return [items[int(place)] for place in places]


def listed_limits(limits: Any) -> list[int]:
    """The user's limits as a list: from a number, any kind of sequence, or None (then empty).

    Raises:
        TypeError, ValueError: not whole numbers ≥ 0.
    """
    if limits is None:
        return []
    each = np.atleast_1d(np.asarray(limits, object)).tolist()
    plain = [n.item() if isinstance(n, np.generic) else n for n in each]
    return [whole("limits", limit, 0) for limit in plain]


@dataclass(frozen=True)
class Limits:
    """How many samples fit into the ranks' memory, and what that limits."""

    samples: list[int]  # at once, [W]; empty: not known
    micro_batches: bool = False  # a rank's part of a step may be more, in several micro-batches
    tokens: list[float] = field(default_factory=list)  # size units at once, [W]; empty: not known

    @property
    def cuts(self) -> bool:
        """Whether ranks' parts are cut into micro-batches."""
        return bool(self.of_micro_batches or self.tokens_of_micro_batches)

    @property
    def of_parts(self) -> list[int]:
        """The most samples of each rank's part of a step, [W]; empty: there are no limits."""
        return [] if self.micro_batches else self.samples

    @property
    def of_micro_batches(self) -> list[int]:
        """The most samples of each rank's micro-batches, [W]; empty: parts are not cut."""
        return self.samples if self.micro_batches else []

    @property
    def tokens_of_parts(self) -> list[float]:
        """The most size units of each rank's part of a step, [W]; empty: there are no limits."""
        return [] if self.micro_batches else self.tokens

    @property
    def tokens_of_micro_batches(self) -> list[float]:
        """The most size units of each rank's micro-batches, [W]; empty: parts are not cut."""
        return self.tokens if self.micro_batches else []


def limits_of(
    given: list[int],
    profiles: list[Profile],
    global_batch: int,
    world: int,
    micro_batches: bool = False,
) -> Limits:
    """The most samples of each rank, from the user and from profiles.

    Args:
        given: the user's: one for each rank, or one number for all; empty: none.
        profiles: of each rank; empty: there was no profiling phase.
        global_batch: samples of a step.
        world: W.
        micro_batches: see `Session`.

    Raises:
        ValueError: the number of the user's limits is wrong, or nothing fits into a rank's memory.
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
        raise ValueError(f"limits is {limits}: with micro_batches=True each is at least 1")
    if sum(limits) < global_batch and not micro_batches:
        raise PacelineError(
            f"{limits} samples fit into the ranks' memory, {sum(limits)} together, fewer than the "
            f"global batch of {global_batch}: give Session a smaller global_batch or "
            "micro_batches=True, or more ranks"
        )
    return Limits(limits, micro_batches)
