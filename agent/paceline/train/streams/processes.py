"""Reads a rank's samples of a stream in several processes.

Each process reads some of the data that the rank claims (see `paceline.core.streaming.reading`).
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker

from paceline.core.streaming.reading import Claim
from paceline.data.stream import Reading

# Options of a loader that concern its processes.
OPTIONS = (
    *("num_workers", "prefetch_factor", "worker_init_fn", "multiprocessing_context"),
    "timeout",
)
_POLL_S = 0.1
# A reading process checks at this interval, in seconds, whether its rank still runs.
_RANK_CHECK_S = 5.0


class _Pieces(IterableDataset[Any]):
    def __init__(self, reading: Reading, epoch: int, claimed: Any) -> None:
        self._reading, self._epoch, self._claimed = reading, epoch, claimed

    def __iter__(self) -> Iterator[Any]:
        if self._reading.pieces is not None:
            _hide_worker()
        # If the rank has died before this line, `parent` is already the PID of another process, and
        # `os.getppid()` never changes. So `claim` also checks `is_alive`.
        rank, parent = multiprocessing.parent_process(), os.getppid()

        def claim(shards: int) -> Claim | None:
            while True:
                try:
                    piece: Claim | None = self._claimed.get(timeout=_RANK_CHECK_S)
                except queue.Empty:
                    if os.getppid() != parent or rank is None or not rank.is_alive():
                        # The rank was killed, so its remaining samples are not needed.
                        os._exit(1)
                else:
                    return piece

        return self._reading.samples(self._epoch, claim)


def _hide_worker() -> None:
    """Make a source yield all samples of a claim to this process.

    Many sources yield to each process of a DataLoader only a part of their samples, according to
    ``torch.utils.data.get_worker_info``. Here each process has claims of its own, so the samples
    that the source leaves to other processes would be lost.
    """
    worker._worker_info = None


def _as_it_is(sample: Any) -> Any:
    """Return a sample unchanged; the default collate function would convert arrays to tensors."""
    return sample


def in_processes(
    reading: Reading,
    epoch: int,
    claim: Callable[[int], Claim | None],
    options: dict[str, Any],
) -> Iterator[Any]:
    """Yield the samples of a rank in an epoch, as they arrive. Close the iterator at the end.

    A source that yields the rank's own part must split this part among the processes, as any
    ``IterableDataset`` must. `claim` (see `paceline.data.stream.Claiming`) is called in another
    thread of this process. `options` are DataLoader options whose names are in `OPTIONS`.
    """
    count, context = options["num_workers"], options.get("multiprocessing_context")
    if context is None or isinstance(context, str):
        context = multiprocessing.get_context(context)
    # At most one claim is queued, because other ranks cannot read a claimed shard, even if it waits
    # in the queue.
    claimed = context.Queue(1)
    options = options | {"multiprocessing_context": context}
    # Samples arrive out of order, so that a process that waits for a claim does not delay others.
    loader: DataLoader[Any] = DataLoader(
        _Pieces(reading, epoch, claimed),
        batch_size=None,
        in_order=False,
        collate_fn=_as_it_is,
        **options,
    )
    samples, ends = iter(loader), threading.Event()
    failed: list[Exception] = []
    arguments = (claimed, reading.pieces, claim, count, ends, failed)
    feeding = threading.Thread(
        target=_feed, args=arguments, name="paceline-stream-pieces", daemon=True
    )
    feeding.start()
    try:
        yield from samples
        if failed:
            raise failed[0]
    finally:
        ends.set()
        feeding.join()
        claimed.cancel_join_thread()


def _feed(
    claimed: Any,
    pieces: int | None,
    claim: Callable[[int], Claim | None],
    count: int,
    ends: threading.Event,
    failed: list[Exception],
) -> None:
    """Put claims into the processes' queue, then a final None for each process."""
    while pieces is not None and not ends.is_set():
        try:
            piece = claim(pieces)
        except Exception as error:
            failed.append(error)
            break
        if piece is None:
            break
        _put(claimed, piece, ends)
    for _ in range(count):
        _put(claimed, None, ends)
    # Processes that have not received their None may still wait for it.
    if ends.is_set():
        for _ in range(count):
            try:
                claimed.put(None, timeout=_POLL_S)
            except queue.Full:
                return


def _put(claimed: Any, piece: Claim | None, ends: threading.Event) -> None:
    while not ends.is_set():
        try:
            claimed.put(piece, timeout=_POLL_S)
            return
        except queue.Full:
            continue
