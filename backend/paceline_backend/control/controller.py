"""Plans one run: follows what is committed about it and offers the leader its next segment."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing
from typing import Any

import redis

from paceline.core.outage import Outage
from paceline.wire import (
    CONTROL_LENGTH,
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
    decode_all,
    live,
)
from paceline.wire.bus import connect, publish
from paceline_backend import policies
from paceline_backend.control.leases import Lease
from paceline_backend.control.turns import Turns
from paceline_backend.planning.feedback import Window
from paceline_backend.planning.history import AHEAD, History
from paceline_backend.planning.load import load
from paceline_backend.planning.offer import Offer, offer
from paceline_backend.policies import Policy
from paceline_backend.server import tracing
from paceline_backend.server.keys import Keys
from paceline_backend.store import Store, StoreUnavailableError, meta, refusals, runs, switches

logger = logging.getLogger(__name__)

_BLOCK_S = 0.25
_RETRY_S = 0.5
_READ = 20  # entries: each may hold megabytes
_AGAIN_S = 5.0  # before a controller that failed starts anew
_REASON_LENGTH, _REASONS = 500, 1_000  # characters of a logged reason, and how many of a run
_SPARE = 5.0  # times the last planning time to let pass before planning the same segment again


class _GapError(Exception):
    """A segment was missed: only the database knows it."""


class Controller:
    """Plans one run until it ends, its lease is lost, or it is told to stop. For one thread.

    It keeps nothing of its own: everything is rebuilt from the database at the start, after an
    outage of bus or database, and when the live stream was trimmed before it was read. Meanwhile
    the leader plans by itself.

    What arrives over the bus never ends it: a message that does not fit is left out, and after any
    other failure it starts anew from the database. Each reason is logged once.

    Args:
        store: the database.
        bus_url: ``redis://…``.
        run_key: the run's key in the database.
        run_id: its public id.
        lease: nothing is proposed unless it is held.
        turns: of all controllers of the process; None: there is no other.
    """

    def __init__(
        self,
        store: Store,
        bus_url: str,
        run_key: int,
        run_id: str,
        lease: Lease,
        turns: Turns | None = None,
    ) -> None:
        self._store = store
        self._bus_url = bus_url
        self._key = run_key
        self._id = run_id
        self._lease = lease
        self._turns = turns or Turns()
        self._signing: bytes | None = None  # the run's key
        self._history: History | None = None
        self._window = Window(0, -1)
        self._policy: Policy | None = None
        self._policy_name = ""
        self._version = -1
        self._offers: list[Offer] = []  # for the next segment, in the order they were made
        self._offered: tuple[int, ...] = ()  # what the last of them was based on
        self._offered_at = 0.0
        self._reported: set[str] = set()  # reasons
        self._plan_s = (0.0, 0.0)  # what the last two plans took, with the wait for their turns

    def run(self, stop: threading.Event) -> None:
        """Works until the run ends, the lease is lost or `stop` is set. Waits out bus and database.

        A policy that does not exist here, or refuses its parameters, plans nothing: the leader
        coasts until another is asked for.
        """
        outage = Outage(
            logger,
            f"run {self._id} is not planned at present",
            f"run {self._id} is planned again",
            first_s=_RETRY_S,
            most_s=_RETRY_S,
        )
        with closing(connect(self._bus_url)) as bus:
            while not stop.is_set() and self._lease.held():
                try:
                    self._follow(bus, stop, outage)
                    return
                except _GapError:
                    continue
                except (redis.RedisError, StoreUnavailableError) as error:
                    stop.wait(outage.failed(error))
                except Exception as error:  # of this run only, and perhaps of one message
                    self._report("its controller starts anew", error)
                    stop.wait(_AGAIN_S)

    def _report(self, what: str, reason: Exception | str) -> None:
        """Logs a reason, once; with where it happened if it is unexpected."""
        words = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
        words = words[:_REASON_LENGTH]
        if words not in self._reported and len(self._reported) < _REASONS:
            self._reported.add(words)
            trace = reason if isinstance(reason, Exception) else None
            logger.warning("run %s: %s: %s", self._id, what, words, exc_info=trace)

    def _follow(self, bus: redis.Redis, stop: threading.Event, outage: Outage) -> None:
        # Positions first: ingest commits before it publishes, so the database has all before them.
        positions: dict[Any, Any] = {live(self._id): _newest(bus, live(self._id))}
        self._load()
        outage.over()
        while not stop.is_set() and self._lease.held():
            self._offer(bus)
            answer: Any = bus.xread(positions, count=_READ, block=int(_BLOCK_S * 1e3))
            for name, entries in answer:
                for entry, fields in entries:
                    positions[name.decode()] = entry
                    for message in self._decoded(fields):
                        if isinstance(message, RunState) and message.state in ENDED:
                            return
                        self._hear(message)

    def _decoded(self, fields: dict[bytes, bytes]) -> list[Message]:
        try:
            run, messages = decode_all(fields)
        except WireError as error:
            self._report("an unreadable message is left out", str(error))
            return []
        return messages if run == self._id else []

    def _load(self) -> None:
        self._history = None
        self._signing = Keys(meta.secret(self._store)).of_run(self._id)
        self._offers, self._offered = [], ()
        with self._store.read() as connection:
            if loaded := load(connection, self._key):
                self._history, self._window = loaded
        self._load_policy()

    def _load_policy(self) -> None:
        with self._store.read() as connection:
            switch = switches.latest(connection, self._key)
        if switch.version != self._version:
            self._version, self._policy = switch.version, None
            self._policy_name = switch.policy
            try:
                self._policy = policies.make(switch.policy, switch.parameters)
            except ValueError as error:
                self._report("its leader coasts", str(error))
                return
            logger.info("run %s: version %d, policy %s", self._id, switch.version, switch.policy)

    def _is_new(self, attempt: int | None) -> bool:
        """Return whether a Hello is of an attempt that the history does not know."""
        if attempt is None:
            return False
        return self._history is None or attempt > self._history.hello.attempt

    def _hear(self, message: Message) -> None:
        if isinstance(message, SwitchRequested):
            self._load_policy()
        elif isinstance(message, RunChanged):
            with self._store.read() as connection:
                attempt = runs.latest_attempt(connection, self._key)
            if self._is_new(attempt):  # its Hello came in parts, and is in the database only
                self._load()
            else:
                self._load_policy()
        elif isinstance(message, Hello):
            if reason := refusals.of_hello(message):
                self._report("a Hello is left out", reason)
            elif self._is_new(message.attempt):
                self._load()
        elif self._history is None:
            return
        elif isinstance(message, StepBatch):
            last = self._history.step + AHEAD
            self._window.add(record for record in message.records if record.step < last)
        elif isinstance(message, Adopted) and message.attempt == self._history.hello.attempt:
            self._adopted(self._history, message.segment)

    def _adopted(self, state: History, segment: Segment) -> None:
        samples = state.hello.samples
        if reason := segment.problem(state.hello.world, samples):
            self._report("an adopted segment is left out", reason)
            return
        late = segment.seq < state.seq
        if late and not state.lost:
            return  # delivered twice
        if late or (segment.seq > state.seq and not state.lost):
            raise _GapError
        epoch = state.epoch
        taken = next((o for o in self._offers if o.segment == segment), None)
        if taken is not None and segment.shuffled:
            state.shuffled(segment.version, taken.plan)
        state.adopt(segment)
        self._offers = []
        if state.epoch != epoch and state.finished:
            logger.info("run %s: all epochs are planned", self._id)

    def _offer(self, bus: redis.Redis) -> None:
        """Proposes the next segment, if something is new since the last proposal."""
        state = self._history
        if state is None or state.lost or state.finished or not self._lease.held():
            return
        if self._policy is None:
            return
        basis = (state.hello.attempt, state.seq, self._version, self._window.newest)
        if basis == self._offered:
            return
        only_feedback = basis[:-1] == self._offered[:-1]
        if only_feedback and time.monotonic() < self._offered_at + _SPARE * self._plan_s[1]:
            return
        try:
            asked_at = time.monotonic()
            # The lesser of two: a policy's first plan may import and compile modules.
            with self._turns.turn(self._key), tracing.now().plan(self._id, self._policy_name):
                made = offer(state, self._window, self._policy, self._version, min(self._plan_s))
            # Why the leader would refuse it.
            reason: Exception | str | None = made.segment.problem(
                state.hello.world, state.hello.samples
            )
        except Exception as error:  # the policy's own, or its stored memory is not what it expects
            reason = error
        if reason is not None:
            self._report("nothing is planned until more is known", reason)
            state.forget_memory()
            self._offered = basis
            return
        # With the wait: where many runs are planned, each is planned less often.
        self._plan_s = (self._plan_s[1], time.monotonic() - asked_at)
        if not self._lease.held():  # planning may take long
            return
        proposal = Proposal(state.hello.attempt, made.segment, self._lease.owner)
        publish(
            bus, control(self._id), proposal, self._id, maxlen=CONTROL_LENGTH, key=self._signing
        )
        self._offers.append(made)
        self._offered = basis
        self._offered_at = time.monotonic()


def _newest(bus: redis.Redis, stream: str) -> bytes:
    entries: Any = bus.xrevrange(stream, count=1)
    return bytes(entries[0][0]) if entries else b"0-0"
