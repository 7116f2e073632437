"""The profiling phase: what batches of each size cost a rank, before training (LBB Alg. 1)."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from paceline.core.errors import PacelineError
from paceline.core.terms import whole

_TIMINGS = 3  # of each batch size, whose median counts
_MEMORY_RAN_OUT = ("out of memory", "not enough memory", "defaultcpuallocator", "alloc_failed")

Floats = npt.NDArray[np.float64]
Hold = Callable[[int, float], None]  # samples, and when it began


class Profile(msgspec.Struct, frozen=True):
    """What one rank measured."""

    times: list[tuple[int, float]]  # samples and seconds, ascending
    limit: int | None = None  # most samples that fit into its memory; None: no end was met


def measure(run_batch: Callable[[int], object], most: int, hold: Hold) -> Profile:
    """Times batches of 2, 4, 8, … samples, until memory runs out, and of `most`.

    Args:
        run_batch: runs forward and backward on so many samples.
        most: samples.
        hold: waits until an emulated device is done with so many samples that began at that time.

    Raises:
        PacelineError: memory runs out at once.
        whatever `run_batch` raises, unless it tells that memory ran out.
    """
    sizes = [min(2**k, most) for k in range(1, max(most - 1, 1).bit_length() + 1)]
    times: list[tuple[int, float]] = []
    for samples in sizes:
        try:
            if not times:
                _timed(run_batch, samples, hold)  # allocates, compiles, warms up
            several = [_timed(run_batch, samples, hold) for _ in range(_TIMINGS)]
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
        else:
            times.append((samples, statistics.median(several)))
            continue
        # Out of the handler: until here its traceback held on to the batch.
        torch.cuda.empty_cache()
        if not times:
            raise PacelineError(f"profile: memory ran out at the first batch, of {samples} samples")
        return Profile(times, times[-1][0])
    return Profile(times)


def _timed(run_batch: Callable[[int], object], samples: int, hold: Hold) -> float:
    _finish()
    began = time.perf_counter()
    run_batch(samples)
    _finish()
    hold(samples, began)
    return time.perf_counter() - began


def _finish() -> None:
    """Waits for the device, where one is in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # A plain RuntimeError: of PyTorch's CPU allocator, of cuDNN and cuBLAS, of CUDA, of MPS.
    said = str(error).lower()
    return any(words in said for words in _MEMORY_RAN_OUT)


class _Told(msgspec.Struct, frozen=True):
    profile: Profile | None
    error: str = ""


def gather(store: Store, rank: int, world: int, measured: Callable[[], Profile]) -> list[Profile]:
    """Measures on each rank; what all of them measured. Each calls it, as often as the others.

    Raises:
        PacelineError: it failed on another rank; the message names it.
        whatever `measured` raises: on this rank.
    """

    # What an earlier call left, which may have failed, must not be read.
    call = store.add(f"profile/calls/{rank}", 1)
    store = PrefixStore(f"profile/{call}", store)

    def tell(told: _Told) -> None:
        store.set(str(rank), msgspec.json.encode(told).decode())

    try:
        mine = measured()
    except Exception as error:
        tell(_Told(None, f"{type(error).__name__}: {error}"))
        _part(store, rank, world)
        raise
    tell(_Told(mine))
    told = [msgspec.json.decode(store.get(str(other)), type=_Told) for other in range(world)]
    _part(store, rank, world)
    every = []
    for other, word in enumerate(told):
        if word.profile is None:
            raise PacelineError(f"profile: on rank {other}: {word.error}")
        every.append(word.profile)
    return every


def _part(store: Store, rank: int, world: int) -> None:
    """This rank reads no more; rank 0, with whom the store goes, waits until that is so of all."""
    store.set(f"read/{rank}", "")
    if rank == 0:
        store.wait([f"read/{other}" for other in range(world)])


def shared_moments(store: Store, sizes: Floats | None) -> tuple[float, float]:
    """Mean of λ and of λ², which rank 0 knows, for all; each calls it."""
    if sizes is not None:
        store.set("profile/sizes", json.dumps([float(sizes.mean()), float((sizes**2).mean())]))
    mean, square = json.loads(store.get("profile/sizes"))
    return mean, square


def listed_limits(limits: Any) -> list[int]:
    """What the user gave as limits: a number, several in any kind of sequence, or None.

    Raises:
        TypeError, ValueError: not whole numbers ≥ 0.
    """
    if limits is None:
        return []
    each = np.atleast_1d(np.asarray(limits, object)).tolist()
    plain = [n.item() if isinstance(n, np.generic) else n for n in each]
    return [whole("limits", limit, 0) for limit in plain]


def limits_of(
    given: list[int], profiles: list[Profile], global_batch: int, world: int
) -> list[int]:
    """The most samples of each rank, from the user and from profiles; empty: none is known.

    Args:
        given: by the user: of each rank, or one number for all; empty: nothing.
        profiles: of each rank; empty: there was no profiling phase.
        global_batch: samples of a step.
        world: W.

    Raises:
        ValueError: the user did not give one for each rank.
        PacelineError: they do not hold a global batch.
    """
    if len(given) not in (0, 1, world):
        raise ValueError(f"limits is {given}: give one number, or one for each of {world} ranks")
    given = given * world if len(given) == 1 else given
    measured = [p.limit for p in profiles]
    if not given and not any(limit is not None for limit in measured):
        return []
    known = [given or [global_batch] * world]
    if profiles:
        known.append([global_batch if limit is None else limit for limit in measured])
    limits = [min(of_rank) for of_rank in zip(*known, strict=True)]
    if sum(limits) < global_batch:
        raise PacelineError(
            f"{limits} samples fit into the ranks' memory, {sum(limits)} together, fewer than the "
            f"global batch of {global_batch}: give Session a smaller global_batch, or more ranks"
        )
    return limits
