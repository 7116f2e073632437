"""Runs of which nothing comes any more are failed, and no others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias, TypeVar

import redis

from paceline.wire import TELEMETRY, State, node_telemetry, run_telemetry
from paceline.wire.bus import connect
from paceline_backend import backends
from paceline_backend.control.listening import ListeningClock
from paceline_backend.requests import streams
from paceline_backend.store import Store, jobs, nodes, runs, telemetry
from paceline_backend.store.nodes import run_nodes

K = TypeVar("K")
_Silences: TypeAlias = dict[K, tuple[float | None, float]]  # last sign, clock's time

log = logging.getLogger(__name__)

SILENT_S = 30.0

LOOK_S = 5.0
_STILL_S = 4.0  # ranks that come to no new step within that, or within two steps, do not train
_LATE_S = 5.0  # an entry that lies on the bus for longer: ingest is behind
_NEVER_S = 30 * 86_400.0  # no entry lies for longer: who writes may give any number to it
_BACKLOG = 1_000  # entries


class Sweep:
    """Fails the runs of which nothing has come for so long.

    No clock that may be set counts: a run is silent for as long as look after look found the same
    time at which something of it came. A pause of the server between two looks counts as `LOOK_S`
    at most: it did not listen. Looks count only while signs of life can arrive: the bus
    takes them, or else all silences begin anew; and ingest stores what comes of the run and of its
    node, or else the silence of this run begins anew. So no run holds up the sweep for others.

    Args:
        store: the database.
        bus_url: ``redis://…``.
        silent_s: see above.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        store: Store,
        bus_url: str,
        silent_s: float = SILENT_S,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._bus_url = bus_url
        self._silent_s = silent_s
        self._listened = ListeningClock(LOOK_S, clock)
        self._since: _Silences[str] = {}  # of runs
        self._steps: dict[tuple[str, str], tuple[int, float]] = {}  # as `_trains` last saw them
        self._agents_since: _Silences[tuple[str, str]] = {}  # of run and node
        self._launches_since: _Silences[tuple[str, str]] = {}  # as these, while nothing came

    def look(self) -> list[str]:
        """Looks at all runs once; the ids of those that it failed.

        Raises:
            StoreError: or one of its kinds.
            redis.RedisError: the bus is away, or takes nothing.
        """
        known, self._since = self._since, {}  # forgotten unless this look comes to its end
        known_agents, self._agents_since = self._agents_since, {}
        known_launches, self._launches_since = self._launches_since, {}
        at = self._listened()
        with connect(self._bus_url) as client:
            behind = _behind(client, self._store)
            # After the question above: what came long before it is in the database now.
            with self._store.read() as connection:
                unfinished = [run for run in runs.unfinished(connection) if not _waits(run)]
                heartbeats = run_nodes.heartbeats(connection)
                pending = run_nodes.pending(connection)
            signs = {run.id: (run.seen_at, _speaks_on(run)) for run in unfinished}
            since = _silences(known, signs, behind, at)
            agents_since = _silences(known_agents, _of_nodes(heartbeats), behind, at)
            heard = {(run_id, node): sign for run_id, node, sign in heartbeats}
            quiet = [name for name, (_, since_at) in agents_since.items() if since_at < at]
            training = {name for name in quiet if self._trains(*name, at)}
            self._steps = {name: self._steps[name] for name in quiet if name in self._steps}
            for (run_id, node), (_, silent_since) in agents_since.items():
                if at - silent_since >= nodes.ALIVE_S and (run_id, node) not in training:
                    self._lose(client, run_id, node, _unanswered(heard[run_id, node]))
            silent = [run for run in unfinished if at - since[run.id][1] >= self._silent_s]
            failed = [run.id for run in silent if self._failed(client, run)]
            # After the runs of which no node was started: those have failed as a whole.
            launches_since = _silences(known_launches, _of_nodes(pending), behind, at)
            for (run_id, node), (_, silent_since) in launches_since.items():
                if at - silent_since >= self._silent_s:
                    why = f"its agent did not start it within {self._silent_s:g} s"
                    self._lose(client, run_id, node, why)
        self._since, self._agents_since = since, agents_since
        self._launches_since = launches_since
        return failed

    def _trains(self, run: str, node: str, at: float) -> bool:
        """Whether ranks of a node whose agent is silent train: it only lost its way to the bus.

        No rank comes further for long than the others. So another rank's later step of the same
        attempt is a sign of life of this node's ranks, too.
        """
        with self._store.read() as connection:
            newest = run_nodes.newest_step(connection, run, node)
        if newest is None:
            return False
        step, step_s = newest
        before, since = self._steps.get((run, node), (-1, at))
        since = at if step > before else since
        self._steps[run, node] = step, since
        return at - since < max(_STILL_S, 2 * step_s)

    def _lose(self, client: redis.Redis, run: str, node: str, why: str) -> None:
        """Fails one of several nodes of a run, of which nothing is heard."""
        with self._store.write() as connection:
            state = telemetry.lose(connection, run, node, why)
        if state is not None:
            log.warning("run %s on %s: %s", run, node, why)
            streams.tell_change(client, run)
            if State(state).final:
                streams.tell_end(client, run)

    def _failed(self, client: redis.Redis, run: runs.Unfinished) -> bool:
        """Fails a run, unless something of it came just now."""
        for_s = f"{self._silent_s:g} s"
        where = ", ".join(run.nodes) or "its node"
        why = f"nothing was heard of it for {for_s}: {where} went away"
        if run.state == "pending":
            why = f"nobody started it within {for_s}"
        with self._store.write() as connection:
            if not runs.end_silent(connection, run, why):
                return False
        log.warning("run %s: %s", run.id, why)
        streams.tell_end(client, run.id)
        return True


def _unanswered(heard_at: float | None) -> str:
    """Why a node is lost, by the Unix time at which its agent was heard last."""
    if not heard_at:
        return "its agent does not answer"
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(heard_at))
    return f"its agent has not answered since {at}"


def _waits(run: runs.Unfinished) -> bool:
    """Whether a run waits for an engine: nobody can speak for it yet."""
    return run.state in jobs.WAITING and backends.engine(run.backend) is not None


def _speaks_on(run: runs.Unfinished) -> list[str]:
    """The streams on which signs of a run's life come."""
    own = run_telemetry(run.id) if run.signed else TELEMETRY
    return [own, *map(node_telemetry, run.nodes)]


def _of_nodes(
    rows: Iterable[tuple[str, str, float | None]],
) -> dict[tuple[str, str], tuple[float | None, list[str]]]:
    """The last sign of each node of a run, and where further ones would come."""
    return {(run, node): (sign, [node_telemetry(node)]) for run, node, sign in rows}


def _silences(
    known: _Silences[K],
    signs: Mapping[K, tuple[float | None, list[str]]],
    behind: set[str],
    at: float,
) -> _Silences[K]:
    """Since when whoever should give signs has given none.

    Args:
        known: what this returned at the look before.
        signs: the last sign of each, and the streams on which further ones would come.
        behind: streams of which ingest has not stored all: silence there begins anew.
        at: the clock's time.
    """
    silences = {}
    for name, (sign, speaks_on) in signs.items():
        before, since = known.get(name, (None, at))
        goes_on = before == sign and behind.isdisjoint(speaks_on)
        silences[name] = (sign, since if goes_on else at)
    return silences


def _behind(client: redis.Redis, store: Store) -> set[str]:
    """The streams on which signs of life may lie: then silence in the database means nothing.

    Raises:
        redis.RedisError: the bus is away, or takes nothing, for example because its disk is full.
        StoreError: or one of its kinds.
    """
    client.set(streams.PROBE, b"", ex=60)
    names = streams.telemetry_streams(store)
    pipeline = client.pipeline(transaction=False)
    for name in names:
        pipeline.xrange(name, count=1)
    for name in names:
        pipeline.xlen(name)
    seconds, _ = client.time()
    answers = pipeline.execute()
    behind = set()
    for name, oldest, length in zip(names, answers, answers[len(names) :], strict=False):
        age_s = seconds - int(oldest[0][0].partition(b"-")[0]) / 1e3 if oldest else 0.0
        if length > _BACKLOG or _LATE_S < age_s < _NEVER_S:
            behind.add(name)
    return behind
