"""Reading a stream in processes, which take what their rank has claimed, piece by piece."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import worker

from paceline.core.streaming.claiming import Claim
from paceline.data.stream import Reading

# Options of a loader that are about its processes.
OPTIONS = (
    *("num_workers", "prefetch_factor", "worker_init_fn", "multiprocessing_context"),
    "timeout",
)
_LOOK_S = 0.1
_ALIVE_S = 5.0  # between two looks of a process whether its rank still runs


class _Pieces(IterableDataset[Any]):
    """What one of a rank's processes reads."""

    def __init__(self, reading: Reading, epoch: int, claimed: Any) -> None:
        self._reading, self._epoch, self._claimed = reading, epoch, claimed

    def __iter__(self) -> Iterator[Any]:
        if self._reading.pieces is not None:
            _hide_worker()
        # Of a rank that is dead by now, the parent's number is another one already.
        rank, parent = multiprocessing.parent_process(), os.getppid()

        def claim(shards: int) -> Claim | None:
            while True:
                try:
                    piece: Claim | None = self._claimed.get(timeout=_ALIVE_S)
                except queue.Empty:
                    if os.getppid() != parent or rank is None or not rank.is_alive():
                        os._exit(1)  # the rank was killed: nobody takes what is left
                else:
                    return piece

        return self._reading.samples(self._epoch, claim)


def _hide_worker() -> None:
    """Makes a source give this process all that it has of a piece.

    Many sources share their samples among a loader's processes. Here each process has pieces of its
    own: what a source left to the other processes, nobody would read.
    """
    worker._worker_info = None


def _as_it_is(sample: Any) -> Any:
    """Without this, a loader would make tensors of arrays, which it does not without processes."""
    return sample


def in_processes(
    reading: Reading,
    epoch: int,
    claim: Callable[[int], Claim | None],
    options: dict[str, Any],
) -> Iterator[Any]:
    """The samples of a rank in an epoch, as they come. Close it in the end.

    A source that yields the rank's own part must share it among its processes, as that of any
    ``IterableDataset`` must.

    Args:
        reading: how to read.
        epoch: its number.
        claim: see `paceline.data.stream.Claiming`; called in another thread of this process.
        options: of a DataLoader; `OPTIONS` alone.
    """
    count, context = options["num_workers"], options.get("multiprocessing_context")
    if context is None or isinstance(context, str):
        context = multiprocessing.get_context(context)
    # One piece waits at most: what is claimed too early, other ranks cannot read.
    claimed = context.Queue(1)
    options = options | {"multiprocessing_context": context}
    # In no order: who waits for a piece must not hold up the other processes.
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
    """Gives pieces to processes, and the word that there are no more to each of them.

    Why claiming failed goes into `failed`; then there are no more pieces either.
    """
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
    if ends.is_set():  # processes may wait that were not told
        for _ in range(count):
            try:
                claimed.put(None, timeout=_LOOK_S)
            except queue.Full:
                return


def _put(claimed: Any, piece: Claim | None, ends: threading.Event) -> None:
    while not ends.is_set():
        try:
            claimed.put(piece, timeout=_LOOK_S)
            return
        except queue.Full:
            continue
