"""Collects the ranks' reports (`News`) of a stream until the leader can plan a segment."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import PacelineError
from paceline.core.ledger import BatchRules
from paceline.core.streaming.ledger import StreamLedger
from paceline.data.stream import Stream
from paceline.train.streams import news
from paceline.train.streams.news import BufferSize

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

_POLL_S = 0.002
# Once the leader has waited this many seconds for ranks, a warning is logged.
_LONG_GATHERING_S = 60.0


class Gathering:
    """Collector of the ranks' reports of a stream, on rank 0. Not thread-safe.

    If the stream is shuffled, the order in which samples leave the buffers depends on `seed`.
    """

    def __init__(
        self, stream: Stream, rules: BatchRules, seed: int, world: int, store: Store
    ) -> None:
        self._stream, self._rules, self._world, self._store = stream, rules, world, store
        self._seed = seed if stream.shuffle else None
        # Number of the next report (`News`) from each rank.
        self._numbers = [0] * world
        # Buffer sizes that were last sent to the ranks.
        self._rooms: list[int] = []
        self.ledger = self.begin(0)

    def begin(self, epoch: int) -> StreamLedger:
        """Begin an epoch; return its ledger."""
        self._numbers = [0] * self._world
        buffer = self._stream.buffer
        self.ledger = StreamLedger(epoch, self._world, self._rules, buffer, self._seed)
        return self.ledger

    def gather(self, stops: Callable[[], bool]) -> str:
        """Wait until the next segment can be planned, or until `stops` returns True.

        Return an empty text, or the reason why no plan is possible: a rank cannot read the stream,
        or the stream has too few samples.
        """
        try:
            self._gather(self.ledger, stops)
        except PacelineError as error:
            return str(error)
        return ""

    def _gather(self, ledger: StreamLedger, stops: Callable[[], bool]) -> None:
        began, said = time.monotonic(), False
        while not stops():
            for rank, ended in enumerate(ledger.ended_ranks):
                if not ended:
                    self._receive(ledger, rank)
            self._answer(ledger)
            if ledger.ready():
                break
            if not said and time.monotonic() > began + _LONG_GATHERING_S:
                said = True
                logger.warning(
                    "planning waits for ranks to read the stream; samples read so far, by rank: %s",
                    ledger.known,
                )
            time.sleep(_POLL_S)
        if ledger.finished:
            raise PacelineError(
                f"the stream returned {sum(ledger.known)} samples in epoch {ledger.epoch}, less "
                "than one step: give a source that can be iterated again in each epoch, or, with "
                "drop_last, a smaller global_batch"
            )

    def _receive(self, ledger: StreamLedger, rank: int) -> None:
        while True:
            key = news.news_key(ledger.epoch, rank, self._numbers[rank])
            if not self._store.check([key]):
                return
            word = news.decode_news(self._store.get(key))
            self._store.delete_key(key)
            self._numbers[rank] += 1
            if word.error:
                raise PacelineError(f"rank {rank} cannot read the stream: {word.error}")
            ledger.record(rank, np.array(word.sizes, np.float64), ended=word.ended)
            if word.ended:
                return

    def _answer(self, ledger: StreamLedger) -> None:
        rooms = ledger.rooms
        if rooms == self._rooms:
            return
        total = sum(rooms)
        for rank, room in enumerate(rooms):
            if room and (not self._rooms or room != self._rooms[rank]):
                word = BufferSize(room, room / total)
                self._store.set(news.room_key(rank), news.encode(word))  # type: ignore[arg-type]
        self._rooms = rooms
