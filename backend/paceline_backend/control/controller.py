"""Plans one run: follows what is committed about it and offers the leader its next segment."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing
from typing import Any

import redis
import sqlalchemy as sa

from paceline.wire import (
    ENDED,
    Adopted,
    Hello,
    Message,
    Proposal,
    RunChanged,
    RunState,
    Segment,
    StepBatch,
    SwitchRequested,
    WireError,
    control,
    decode,
    live,
)
from paceline.wire.bus import connect, publish
from paceline_backend import policies
from paceline_backend.control.leases import Lease
from paceline_backend.planning import history
from paceline_backend.planning.history import History, Window
from paceline_backend.planning.offer import Offer, offer
from paceline_backend.policies import Policy
from paceline_backend.store import Store, StoreUnavailableError
from paceline_backend.store.schema import switches

logger = logging.getLogger(__name__)

_BLOCK_S = 0.25
_RETRY_S = 0.5
_READ = 1_000  # entries
_SPARE = 5.0  # times the last planning time to let pass before planning the same segment again
_CONTROL_LENGTH = 64


class _GapError(Exception):
    """A segment was missed: only the database knows it."""


class Controller:
    """Plans one run until it ends, its lease is lost, or it is told to stop. For one thread.

    It keeps nothing of its own: everything is rebuilt from the database at the start, after an
    outage of bus or database, and when the live stream was trimmed before it was read. Meanwhile
    the leader plans by itself.

    Args:
        store: the database.
        bus_url: ``redis://…``.
        run_key: the run's key in the database.
        run_id: its public id.
        lease: nothing is proposed unless it is held.
    """

    def __init__(self, store: Store, bus_url: str, run_key: int, run_id: str, lease: Lease) -> None:
        self._store = store
        self._bus_url = bus_url
        self._key = run_key
        self._id = run_id
        self._lease = lease
        self._history: History | None = None
        self._window = Window(0, -1)
        self._policy: Policy | None = None
        self._version = -1
        self._offers: list[Offer] = []  # for the next segment, in the order they were made
        self._offered: tuple[int, ...] = ()  # what the last of them was based on
        self._offered_at = 0.0
        self._plan_s = (0.0, 0.0)  # what the last two plans took

    def run(self, stop: threading.Event) -> None:
        """Works until the run ends, the lease is lost or `stop` is set. Waits out bus and database.

        Raises:
            ValueError: the run's policy does not exist here, or refuses its parameters.
        """
        away = False
        with closing(connect(self._bus_url)) as bus:
            while not stop.is_set() and self._lease.held():
                try:
                    self._follow(bus, stop)
                    return
                except _GapError:
                    continue
                except (redis.RedisError, StoreUnavailableError) as error:
                    if not away:
                        logger.warning("run %s is not planned for now: %s", self._id, error)
                    away = True
                    stop.wait(_RETRY_S)

    def _follow(self, bus: redis.Redis, stop: threading.Event) -> None:
        # Positions first: ingest commits before it publishes, so the database has all before them.
        positions: dict[Any, Any] = {live(self._id): _newest(bus, live(self._id))}
        self._load()
        while not stop.is_set() and self._lease.held():
            self._offer(bus)
            answer: Any = bus.xread(positions, count=_READ, block=int(_BLOCK_S * 1e3))
            for name, entries in answer:
                for entry, fields in entries:
                    positions[name.decode()] = entry
                    message = self._decoded(fields)
                    if isinstance(message, RunState) and message.state in ENDED:
                        return
                    if message is not None:
                        self._hear(message)

    def _decoded(self, fields: dict[bytes, bytes]) -> Message | None:
        try:
            run, message = decode(fields)
        except WireError as error:
            logger.warning("run %s: unreadable message: %s", self._id, error)
            return None
        return message if run == self._id else None

    def _load(self) -> None:
        self._history = None
        self._offers, self._offered = [], ()
        with self._store.read() as connection:
            if loaded := history.load(connection, self._key):
                self._history, self._window = loaded
        self._load_policy()

    def _load_policy(self) -> None:
        query = (
            sa.select(switches.c.version, switches.c.policy, switches.c.parameters)
            .where(switches.c.run == self._key)
            .order_by(switches.c.version.desc())
            .limit(1)
        )
        with self._store.read() as connection:
            version, name, parameters = connection.execute(query).one()
        if version != self._version:
            self._policy = policies.make(name, parameters)
            self._version = version
            logger.info("run %s: version %d, policy %s", self._id, version, name)

    def _hear(self, message: Message) -> None:
        if isinstance(message, SwitchRequested | RunChanged):
            self._load_policy()
        elif isinstance(message, Hello):
            if self._history is None or message.attempt > self._history.hello.attempt:
                self._load()
        elif self._history is None:
            return
        elif isinstance(message, StepBatch):
            self._window.add(message.records)
        elif isinstance(message, Adopted) and message.attempt == self._history.hello.attempt:
            self._adopted(self._history, message.segment)

    def _adopted(self, state: History, segment: Segment) -> None:
        late = segment.seq < state.seq
        if late and not state.lost:
            return  # delivered twice
        if late or (segment.seq > state.seq and not state.lost):
            raise _GapError
        epoch = state.epoch
        taken = next((o for o in self._offers if o.segment == segment), None)
        if taken is not None and segment.shuffled:
            state.shuffled(segment.version, taken.plan)
        elif taken is None and segment.source == "controller":
            state.forget_placement()
        state.adopt(segment)
        self._offers = []
        if state.epoch != epoch and state.finished:
            logger.info("run %s: all epochs are planned", self._id)

    def _offer(self, bus: redis.Redis) -> None:
        """Proposes the next segment, if something is new since the last proposal."""
        state = self._history
        if state is None or state.lost or state.finished or not self._lease.held():
            return
        basis = (state.hello.attempt, state.seq, self._version, self._window.newest)
        if basis == self._offered:
            return
        only_feedback = basis[:-1] == self._offered[:-1]
        if only_feedback and time.monotonic() < self._offered_at + _SPARE * self._plan_s[1]:
            return
        assert self._policy is not None
        # The lesser: a policy's first plan may import and compile what later ones find ready.
        made = offer(state, self._window, self._policy, self._version, min(self._plan_s))
        self._plan_s = (self._plan_s[1], made.segment.plan_s)
        if not self._lease.held():  # planning may take long
            return
        proposal = Proposal(state.hello.attempt, made.segment, self._lease.owner)
        publish(bus, control(self._id), proposal, self._id, maxlen=_CONTROL_LENGTH)
        self._offers.append(made)
        self._offered = basis
        self._offered_at = time.monotonic()


def _newest(bus: redis.Redis, stream: str) -> bytes:
    entries: Any = bus.xrevrange(stream, count=1)
    return bytes(entries[0][0]) if entries else b"0-0"
