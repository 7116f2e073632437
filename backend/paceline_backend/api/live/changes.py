"""From entries of the bus to what a client is told."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from paceline.wire import (
    ENDED,
    Adopted,
    DataEpoch,
    Evaluation,
    Fallback,
    LongPhase,
    Message,
    StepBatch,
    SwitchRequested,
    WireError,
    decode,
)
from paceline_backend.store import Connection, Store, attempts, reads, segments, switches, views
from paceline_backend.store import runs as runs_store
from paceline_backend.store.quality import evaluations

log = logging.getLogger(__name__)

_STEPS_PER_EVENT = 500
_REMEMBERED = 10_000  # steps that are not sent again

# Messages that change nothing in the run's row.
_NOT_OF_RUN = (StepBatch, Adopted, Fallback, LongPhase, DataEpoch)

Event = dict[str, Any]
Entry = tuple[bytes, dict[bytes, bytes]]


class Changes:
    """Makes events of a run's entries, in the entries' order.

    Args:
        store: the database, which knows what the entries are about.
        run: the run's id.
        world: ranks of the run, as far as that is known.
        ended: whether the run has ended.
    """

    def __init__(self, store: Store, run: str, world: int | None, ended: bool) -> None:
        self.store = store
        self.run = run
        self.world = world
        self.ended = ended
        self.version: int | None = None  # of the last segment seen
        self._sent: dict[int, float] = {}  # step → its end: a later attempt may run it again

    def forget(self) -> None:
        """Sends steps and switches again when more comes about them: a new client may lack them."""
        self._sent.clear()
        self.version = None

    def of(self, entries: Sequence[Entry], missed: bool) -> list[Event]:
        """The events of some entries, and the run itself if something about it was `missed`.

        Raises:
            StoreUnavailableError: the database is away; the same entries may be given again.
        """
        messages = list(_decoded(entries))
        happened: list[Event] = []
        with self.store.read() as connection:
            key = runs_store.key_of(connection, self.run)
            happened += self._steps(connection, key, messages)
            happened += self._segments(connection, key, messages)
        switched = False
        for message in messages:
            if isinstance(message, Adopted):
                switched |= message.segment.version != self.version
                self.version = message.segment.version
            switched |= isinstance(message, SwitchRequested)
        if switched:
            rows = switches.rows(self.store, self.run)
            happened += [{"type": "switch", **row} for row in rows]
        if missed or any(not isinstance(message, _NOT_OF_RUN) for message in messages):
            row = runs_store.get(self.store, self.run)
            self.ended, self.world = row["state"] in ENDED, row["world"]
            happened += self._evaluations(row, messages)
            happened.append({"type": "run", **row})
        return happened

    def _evaluations(self, row: dict[str, Any], messages: list[Message]) -> Iterator[Event]:
        """The evaluations of some messages as they are stored: combined over ranks."""
        named = {message.step for message in messages if isinstance(message, Evaluation)}
        if not named:
            return
        with self.store.read() as connection:
            key = runs_store.key_of(connection, self.run)
            spans = attempts.spans(connection, key, row["attempt"])
            made = evaluations.read(connection, key, spans, since=min(named))
        for each in made:
            if each.step in named:
                yield {"type": "evaluation", **evaluations.shown(each, row["started_at"])}

    def _segments(
        self, connection: Connection, key: int, messages: list[Message]
    ) -> Iterator[Event]:
        """The segments of some messages as they are stored: the database knows their fallbacks."""
        named = [
            (message.attempt, message.segment.seq)
            if isinstance(message, Adopted)
            else (message.attempt, message.segment)
            for message in messages
            if isinstance(message, Adopted | Fallback)
        ]
        for row in segments.shown(connection, key, named):
            yield {"type": "segment", **row}

    def _steps(self, connection: Connection, key: int, messages: list[Message]) -> Iterator[Event]:
        named = {
            record.step
            for message in messages
            if isinstance(message, StepBatch)
            for record in message.records
        }
        order = sorted(named)
        at_once = reads.shown_steps(self.world, _STEPS_PER_EVENT)
        every = reads.shown_every(self.world)
        for i in range(0, len(order), at_once):
            wanted = order[i : i + at_once]
            complete, cells = reads.new_steps(connection, key, wanted, self._sent, every)
            if complete["step"]:
                self._sent.update(zip(complete["step"], complete["ended_at"], strict=True))
                yield {"type": "steps", **complete}
                yield {"type": "worker_steps", **cells}
                if every > 1:  # the cells are not of all ranks
                    heat = views.heat_at(connection, key, self.world or 1, complete["step"])
                    yield {"type": "heat", **heat}
        while len(self._sent) > _REMEMBERED:
            del self._sent[next(iter(self._sent))]


def encoded(happened: Sequence[Event], before: str, after: str) -> list[bytes]:
    """As server-sent events: a client that has them all goes on at `after`, any other `before`."""
    last = len(happened) - 1
    return [
        b"event: message\nid: %s\ndata: %s\n\n"
        % ((after if i == last else before).encode(), orjson.dumps(event))
        for i, event in enumerate(happened)
    ]


def _decoded(entries: Sequence[Entry]) -> Iterator[Message]:
    for number, fields in entries:
        try:
            yield decode(fields)[1]
        except WireError as error:
            log.warning("entry %s is left out: %s", number.decode(), error)
