"""The leader's part in a stream: it takes in what ranks tell, until a segment can be planned."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import PacelineError
from paceline.core.streaming.ledger import StreamLedger
from paceline.core.streaming.picking import Ints
from paceline.core.terms import Terms
from paceline.data.stream import Stream
from paceline.train.streams import news
from paceline.train.streams.news import Room

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

_LOOK_S = 0.002
_LONG_S = 60.0  # after so long it is said for whom the leader waits


class Gathering:
    """What rank 0's leader knows of a stream. For one thread.

    Args:
        stream: that the ranks read.
        terms: of the run.
        world: W.
        store: the ranks' store.
        limits: the most samples that each rank gets in a step, [W]; None: there are no limits.
    """

    def __init__(
        self, stream: Stream, terms: Terms, world: int, store: Store, limits: Ints | None
    ) -> None:
        self._stream, self._terms, self._world = stream, terms, world
        self._store, self._limits = store, limits
        self._numbers = [0] * world  # of each rank's next news
        self._rooms: list[int] = []  # that the ranks know of
        self.ledger = self.begin(0)  # of the epoch that is planned

    def begin(self, epoch: int) -> StreamLedger:
        """The ledger of an epoch that begins."""
        self._numbers = [0] * self._world
        seed = self._terms.seed if self._stream.shuffle else None
        batch, drop_last = self._terms.global_batch, self._terms.drop_last
        self.ledger = StreamLedger(
            epoch, self._world, batch, drop_last, self._stream.buffer, seed, self._limits
        )
        return self.ledger

    def gather(self, stops: Callable[[], bool]) -> str:
        """Waits until the next segment can be planned.

        Args:
            stops: whether nobody wants a plan any more.

        Returns:
            Why there is none: a rank could not read, or read nothing. Empty: there is one.
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
                    self._hear(ledger, rank)
            self._answer(ledger)
            if ledger.ready():
                break
            if not said and time.monotonic() > began + _LONG_S:
                said = True
                logger.warning("the plan waits for ranks to read: %s samples so far", ledger.known)
            time.sleep(_LOOK_S)
        if ledger.over:
            raise PacelineError(
                f"the stream gave {sum(ledger.known)} samples in epoch {ledger.epoch}, which is "
                "not one step: give a source that begins anew in each epoch, or, with drop_last, "
                "a smaller global_batch"
            )

    def _hear(self, ledger: StreamLedger, rank: int) -> None:
        """Takes in a rank's news."""
        while True:
            key = news.news_key(ledger.epoch, rank, self._numbers[rank])
            if not self._store.check([key]):
                return
            word = news.decode_news(self._store.get(key))
            self._store.delete_key(key)
            self._numbers[rank] += 1
            if word.error:
                raise PacelineError(f"rank {rank} cannot read the stream: {word.error}")
            ledger.tell(rank, np.array(word.sizes, np.float64), ended=word.ended)
            if word.ended:
                return

    def _answer(self, ledger: StreamLedger) -> None:
        """Tells ranks how much room their buffers have, where that has changed."""
        rooms = ledger.rooms
        if rooms == self._rooms:
            return
        total = sum(rooms)
        for rank, room in enumerate(rooms):
            if room and (not self._rooms or room != self._rooms[rank]):
                word = Room(room, room / total)
                self._store.set(news.room_key(rank), news.encode(word))  # type: ignore[arg-type]
        self._rooms = rooms
