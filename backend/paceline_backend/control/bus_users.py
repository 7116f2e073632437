"""Users of the bus: reconciled with the database's nodes and runs, disabled if they flood the bus.

The worker calls `UserReconciler.look` every second. `look` recreates users that a restart of the
bus lost, and removes users whose node or run no longer has a session. `look_for_floods` disables
users that flood the bus (`server.floods`), and describes the flood of a run's user in the run's
`message`, which the API shows.
"""

from __future__ import annotations

import contextlib
import logging
import time

import redis

from paceline.wire import run_telemetry, writer_of
from paceline.wire.bus import connect, without_password
from paceline_backend.server import bus_limits, users
from paceline_backend.server.floods import Bounds, Flood, Guard, user_of
from paceline_backend.server.keys import Keys
from paceline_backend.server.users import User
from paceline_backend.store import Store, StoreError, meta, nodes, runs, tokens
from paceline_backend.store.telemetry import writers

log = logging.getLogger(__name__)

# Lifetime of a stream after its run has lost its session.
_LEFT_S = 3_600  # seconds
# Pause before the next attempt to create users, after the bus refused to create them.
_REFUSED_S = 60.0


class UserReconciler:
    """Reconciler of the users of nodes and runs on the bus. Not thread-safe.

    Args:
        bus_url: ``redis://…``, with a user that may create other users.
    """

    def __init__(self, store: Store, bus_url: str) -> None:
        self._store = store
        self._bus_url = bus_url
        # Names of the users that this reconciler has created.
        self._made: set[str] = set()
        # True once this reconciler has recreated existing users, whose passwords may have changed.
        self._made_all = False
        self._refused: str | None = None
        self._again_at = 0.0
        # Runs that had a session at the last reconciliation.
        self._runs: set[str] | None = None
        self._tried_door = False

    def look(self, client: redis.Redis) -> None:
        """Reconcile the users. The first call also checks the bus's password and memory limits."""
        self.keep(client)
        self.try_door()

    def keep(self, client: redis.Redis) -> None:
        """Compare the bus's users with the database once; create and delete users accordingly."""
        due = time.monotonic() >= self._again_at
        # Read the bus before the database, so that a node or run that gets a session in between is
        # not mistaken for a leftover.
        on_bus = _known(client) if due else set()
        secret = meta.secret(self._store)
        with self._store.read() as connection:
            seeds = nodes.seeds(connection, writers.signed_nodes(connection))
            runs = set(writers.signed_runs(connection))
            over = writers.unrevoked_runs(connection)
        if over:
            with self._store.write() as connection:
                for run in over:
                    tokens.revoke_of_run(connection, run)
        keys = Keys(secret, seeds)
        wanted = [users.of_node(keys, node) for node in seeds]
        wanted += [users.of_run(keys, run) for run in runs]
        known = self._left_over(client) if self._runs is None else self._runs
        gone = known - runs
        if due:
            gone |= self._make(client, wanted, on_bus)
        for run in gone:
            client.expire(run_telemetry(run), _LEFT_S, nx=True)
        # A run can continue after its end, for example when an operator resumes it, so its stream
        # must no longer expire.
        for run in runs - (self._runs or set()):
            client.persist(run_telemetry(run))
        self._runs = runs

    def _left_over(self, client: redis.Redis) -> set[str]:
        """Return this control plane's runs that have streams on the bus.

        Some of these runs may have ended while no worker was running.
        """
        kinds = (writer_of(stream) for stream in Guard(client).streams())
        with self._store.read() as connection:
            return set(
                writers.permitted_writers(
                    connection, [name for kind, name in kinds if kind == "run"]
                )
            )

    def try_door(self) -> None:
        """Warn once about a bus without a password or without memory limits for clients."""
        if self._tried_door:
            return
        self._try_limits()
        self._tried_door = True
        place = without_password(self._bus_url)
        with connect(place) as stranger, contextlib.suppress(redis.RedisError):
            stranger.ping()
            log.warning(
                "the bus %s answers without a password: every client that reaches it has full "
                "access, and can start programs on nodes whose agent has no key. Set a password "
                "(requirepass) and give it in --bus",
                place,
            )

    def _try_limits(self) -> None:
        with connect(self._bus_url) as client:
            missing = bus_limits.missing(client)
        if missing:
            log.warning(
                "the bus %s does not limit its clients' memory: set %s, as in docs/deploying.md",
                without_password(self._bus_url),
                ", ".join(missing),
            )

    def _make(self, client: redis.Redis, wanted: list[User], known: set[str]) -> set[str]:
        """Create missing users, remove obsolete ones, and return the runs of the removed users.

        `known` are the names of users that the bus had before `wanted` was read.
        """
        missing = [user for user in wanted if not self._made_all or user.name not in known]
        reason = users.make(client, missing)
        if reason is not None:
            self._again_at = time.monotonic() + _REFUSED_S
            self._warn(reason)
            return set()
        # A session may have been renewed since `wanted` was read. The user created here then has
        # the old password, and the next call of `keep` recreates all users.
        self._made_all = bool(wanted) and (not missing or not self._made_all)
        self._made |= {user.name for user in missing}
        over = known - {user.name for user in wanted}
        # Remove only users of this control plane, because another one may share the bus.
        with self._store.read() as connection:
            runs = set(writers.permitted_writers(connection, users.runs(over)))
            names = nodes.registered(connection, users.nodes(over))
        ended = {*map(users.name_of_run, runs), *map(users.name_of_node, names)}
        users.forget(client, ended | (over & self._made))
        self._made -= over
        return runs

    def _warn(self, reason: str) -> None:
        if reason != self._refused:
            self._refused = reason
            outcome = (
                "get the URL of the control plane itself (--share-bus-password), which can read "
                "and write everything on the bus"
                if users.shared()
                else "get no credentials, so nothing can be launched"
            )
            log.warning(
                "the control plane cannot create users on the bus (%s): nodes and runs %s. Grant "
                "its user %s; this needs Valkey, or Redis 7.0 or later",
                reason,
                outcome,
                users.RIGHTS,
            )


def _known(client: redis.Redis) -> set[str]:
    try:
        return users.names(client)
    except redis.ResponseError:
        return set()


def look_for_floods(store: Store, guard: Guard) -> None:
    """Disable users that flood the bus, and enable them again later; see `Guard.switch_on`.

    The flood of a run's stream is described in the run's `message`.
    """
    for flood in guard.look_at_all():
        if flood.news:
            _record(store, flood, guard.bounds)
    for user in guard.switch_on():
        log.info("%s may write to the bus again", user)


def _record(store: Store, flood: Flood, bounds: Bounds) -> None:
    words = (
        f"{flood.entries:,} entries ({flood.bytes:,} bytes) were waiting on the bus; the limits "
        f"are {bounds.entries:,} entries and {bounds.bytes:,} bytes"
    )
    if flood.dropped:
        words += f"; {flood.dropped:,} of them were dropped"
    if flood.off:
        words += f"; their sender is blocked for {bounds.off_s:g} s"
    log.warning("%s floods the bus: %s", user_of(flood.stream), words)
    if flood.run is None:
        return
    try:
        with store.write() as connection:
            runs.tell(connection, flood.run, f"its telemetry flooded the bus: {words}")
    except StoreError as error:
        log.warning("run %s: the flood could not be recorded: %s", flood.run, error)
