"""Planning of one run: follows its committed telemetry and offers the leader its next segment.

`ControllerManager` starts one `Controller` thread per run. The thread reads the run's live stream,
to which ingest copies messages after it has stored them. The thread adds their step records to the
`Window` from which the policy plans, and publishes a `Proposal` on the run's control stream
whenever it has new information.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing
from typing import Any

import redis

from paceline import policies
from paceline.core.outage import Outage
from paceline.planning.planner import GapError, InvalidPlanError, Planner
from paceline.policies import Policy
from paceline.wire import (
    CONTROL_LENGTH,
    ENDED,
    Adopted,
    Message,
    Proposal,
    RunChanged,
    RunState,
    StepBatch,
    WireError,
    control,
    decode_all,
    live,
)
from paceline.wire.bus import connect, publish
from paceline_backend.control.leases import Lease
from paceline_backend.control.turns import Turns
from paceline_backend.server import tracing
from paceline_backend.server.keys import Keys
from paceline_backend.store import Store, StoreUnavailableError, meta, runs, switches
from paceline_backend.store.planning import load

logger = logging.getLogger(__name__)

_READ_BLOCK_S = 0.25
_RETRY_S = 0.5
# Maximum number of entries per read. It is low, because each entry can hold megabytes.
_MOST_ENTRIES_READ = 20
_CONTROLLER_RESTART_S = 5.0
# Maximum length of a logged reason in characters, and maximum number of reasons logged for a run.
_REASON_LENGTH, _REASONS = 500, 1_000


class Controller:
    """Planner of one run, until the run ends, its lease is lost or `stop` is set. Not thread-safe.

    A controller needs no state that is not in the database: it rebuilds everything at the start,
    after an outage of bus or database, and when the live stream was trimmed before it was read.
    Meanwhile the leader coasts (plans its segments itself).

    No message on the bus can end a controller: it skips messages that are invalid for the run, and
    restarts from the database after any other failure. It logs each distinct reason once.

    Args:
        lease: the controller proposes segments only while it holds this lease.
        turns: the object by which the controllers of this process plan one after the other. None if
            there is no other controller.
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
        self._signing: bytes | None = None
        # None before the run's first Hello.
        self._planner: Planner | None = None
        self._switch: switches.Switch | None = None
        self._policy: Policy | None = None
        self._reported: set[str] = set()

    def run(self, stop: threading.Event) -> None:
        """Plan until the run ends, the lease is lost or `stop` is set.

        During an outage of bus or database, the controller waits and retries. If the run's policy
        is not installed here, or refuses its parameters, the leader coasts until an operator
        requests another policy.
        """
        outage = Outage(
            logger,
            f"run {self._id}: planning is interrupted",
            f"run {self._id}: planning continues",
            first_s=_RETRY_S,
            most_s=_RETRY_S,
        )
        with closing(connect(self._bus_url)) as bus:
            while not stop.is_set() and self._lease.held():
                try:
                    self._follow(bus, stop, outage)
                    return
                except GapError:
                    continue
                except (redis.RedisError, StoreUnavailableError) as error:
                    stop.wait(outage.failed(error))
                # The failure concerns only this run, and perhaps only one message.
                except Exception as error:
                    self._report("its controller restarts", error)
                    stop.wait(_CONTROLLER_RESTART_S)

    def _report(self, what: str, reason: Exception | str) -> None:
        words = reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"
        words = words[:_REASON_LENGTH]
        if words not in self._reported and len(self._reported) < _REASONS:
            self._reported.add(words)
            trace = reason if isinstance(reason, Exception) else None
            logger.warning("run %s: %s: %s", self._id, what, words, exc_info=trace)

    def _follow(self, bus: redis.Redis, stop: threading.Event, outage: Outage) -> None:
        # Read the live stream's newest position before the database: ingest commits before it
        # publishes, so the database holds every message up to that position.
        positions: dict[Any, Any] = {live(self._id): _newest(bus, live(self._id))}
        self._load()
        outage.succeeded()
        while not stop.is_set() and self._lease.held():
            self._offer(bus)
            answer: Any = bus.xread(
                positions, count=_MOST_ENTRIES_READ, block=int(_READ_BLOCK_S * 1e3)
            )
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
            self._report("an unreadable message is ignored", str(error))
            return []
        return messages if run == self._id else []

    def _load(self) -> None:
        self._planner = None
        self._signing = Keys(meta.secret(self._store)).of_run(self._id)
        with self._store.read() as connection:
            if loaded := load(connection, self._key):
                self._planner = Planner(*loaded)
        self._load_policy()

    def _load_policy(self) -> None:
        with self._store.read() as connection:
            switch = switches.latest(connection, self._key)
        if self._switch is None or switch.version != self._switch.version:
            self._switch, self._policy = switch, None
            try:
                self._policy = policies.make(switch.policy, switch.parameters)
            except ValueError as error:
                self._report("planner offline: the leader repeats the last split", str(error))
            else:
                logger.info(
                    "run %s: version %d, policy %s", self._id, switch.version, switch.policy
                )
        if self._planner is not None:
            self._planner.use(self._policy, switch.version)

    def _hear(self, message: Message) -> None:
        planner = self._planner
        if isinstance(message, RunChanged):
            with self._store.read() as connection:
                attempt = runs.latest_attempt(connection, self._key)
            known = -1 if planner is None else planner.history.hello.attempt
            if attempt is not None and attempt > known:
                self._load()
            else:
                self._load_policy()
        elif planner is None:
            return
        elif isinstance(message, StepBatch):
            planner.add(message.records)
        elif isinstance(message, Adopted) and message.attempt == planner.history.hello.attempt:
            epoch = planner.history.epoch
            try:
                planner.adopt(message.plan)
            except ValueError as error:
                self._report("an adopted segment is ignored", str(error))
            if planner.history.epoch != epoch and planner.history.finished:
                logger.info("run %s: all epochs are planned", self._id)

    def _offer(self, bus: redis.Redis) -> None:
        """Propose the next segment, unless nothing has changed since the last proposal."""
        planner, switch = self._planner, self._switch
        if planner is None or switch is None or not self._lease.held() or not planner.is_due():
            return
        since = time.monotonic()
        try:
            # The wait for the turn counts as planning time, because `since` was read before it.
            # With many runs, each is therefore planned less often (see `Planner.is_due`).
            with self._turns.turn(self._key), tracing.now().plan(self._id, switch.policy):
                plan = planner.plan(since)
        except Exception as error:
            reason = str(error) if isinstance(error, InvalidPlanError) else error
            self._report("planning is paused until new telemetry arrives", reason)
            return
        # The lease may have expired while the policy planned.
        if not self._lease.held():
            return
        attempt = planner.history.hello.attempt
        proposal = Proposal(attempt, plan, self._lease.owner, switch.parameters)
        publish(
            bus, control(self._id), proposal, self._id, maxlen=CONTROL_LENGTH, key=self._signing
        )


def _newest(bus: redis.Redis, stream: str) -> bytes:
    entries: Any = bus.xrevrange(stream, count=1)
    return bytes(entries[0][0]) if entries else b"0-0"
