"""Detection of silent runs and nodes: if nothing arrives from them any longer, they have failed.

The worker calls `SilentRuns.look` every `SILENCE_CHECK_S` seconds. `look` must not mark a run as
failed only because the server itself was suspended, the bus was unavailable or ingest was behind.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias, TypeVar

import redis

from paceline.wire import TELEMETRY, State, node_telemetry, run_telemetry
from paceline.wire.states import WAITING
from paceline_backend import backends
from paceline_backend.control.listening import ListeningClock
from paceline_backend.requests import streams
from paceline_backend.store import Store, nodes, runs, telemetry
from paceline_backend.store.nodes import run_nodes

K = TypeVar("K")
# A key is a run or node. Its value is the time of its last sign of life, and the time on the
# `ListeningClock` since which no newer sign has arrived.
_Silences: TypeAlias = dict[K, tuple[float | None, float]]

log = logging.getLogger(__name__)

# Silence after which a run fails.
SILENT_S = 30.0  # seconds

SILENCE_CHECK_S = 5.0
# Ranks count as training if they start a new step within this time, or within two step times.
_NEW_STEP_S = 4.0
# Ingest counts as behind on a stream whose oldest entry is older than this.
_LATE_S = 5.0
# Maximum age of an entry. Entries that look older are ignored, because a writer can choose any
# entry number.
_NEVER_S = 30 * 86_400.0
# Ingest counts as behind on a stream that is longer than this.
_BACKLOG = 1_000  # entries


class SilentRuns:
    """Checker that marks runs, and nodes of runs, as failed after too long a silence.

    Wall clocks are not used, because they can be set: a run is silent for as long as consecutive
    checks find the same time of its last message. A pause of the server between two checks counts
    as `SILENCE_CHECK_S` at most, because the server could not receive anything meanwhile. Silence
    counts only while messages can arrive. If the bus accepts no writes, all silences are counted
    from zero again. If ingest is behind on the streams of a run or of its nodes, only the silence
    of this run is counted from zero again.

    Args:
        silent_s: silence in seconds after which a run fails.
    """

    def __init__(
        self,
        store: Store,
        silent_s: float = SILENT_S,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._silent_s = silent_s
        self._listened = ListeningClock(SILENCE_CHECK_S, clock)
        self._since: _Silences[str] = {}
        # By run and node: newest step, and the time at which `_trains` first saw it.
        self._steps: dict[tuple[str, str], tuple[int, float]] = {}
        # Silences of agents, by run and node.
        self._agents_since: _Silences[tuple[str, str]] = {}
        # Silences by run and node, for launches from which nothing has arrived yet.
        self._launches_since: _Silences[tuple[str, str]] = {}

    def look(self, client: redis.Redis) -> list[str]:
        """Check all runs once, and return the ids of the runs that it marked as failed.

        Raises:
            redis.RedisError: the bus is unavailable, or accepts no writes.
        """
        # If this check fails halfway, all silences are counted from zero again.
        known, self._since = self._since, {}
        known_agents, self._agents_since = self._agents_since, {}
        known_launches, self._launches_since = self._launches_since, {}
        at = self._listened()
        behind = _behind(client, self._store)
        # Read the database after the bus: if ingest is not behind on a stream, the messages
        # that arrived on it more than `_LATE_S` before are stored by now.
        with self._store.read() as connection:
            unfinished = [run for run in runs.unfinished(connection) if not _waits(run)]
            heartbeats = run_nodes.heartbeats(connection)
            pending = run_nodes.pending(connection)
        signs = {run.id: (run.seen_at, _streams_of(run)) for run in unfinished}
        since = _silences(known, signs, behind, at)
        agents_since = _silences(known_agents, _of_nodes(heartbeats), behind, at)
        heard = {(run_id, node): sign for run_id, node, sign in heartbeats}
        quiet = [name for name, (_, since_at) in agents_since.items() if since_at < at]
        training = {name for name in quiet if self._trains(*name, at)}
        self._steps = {name: self._steps[name] for name in quiet if name in self._steps}
        for (run_id, node), (_, silent_since) in agents_since.items():
            if at - silent_since >= nodes.NODE_ALIVE_S and (run_id, node) not in training:
                self._lose(client, run_id, node, _unanswered(heard[run_id, node]))
        silent = [run for run in unfinished if at - since[run.id][1] >= self._silent_s]
        failed = [run.id for run in silent if self._failed(client, run)]
        # Check last which nodes have not started their run. A run that no node has started was
        # marked as failed above.
        launches_since = _silences(known_launches, _of_nodes(pending), behind, at)
        for (run_id, node), (_, silent_since) in launches_since.items():
            if at - silent_since >= self._silent_s:
                why = f"its agent did not start it within {self._silent_s:g} s"
                self._lose(client, run_id, node, why)
        self._since, self._agents_since = since, agents_since
        self._launches_since = launches_since
        return failed

    def _trains(self, run: str, node: str, at: float) -> bool:
        """Return True if ranks train on a node whose agent is silent, as after a lost connection.

        Ranks synchronise, so none can stay ahead of the others for long. If any rank of the same
        attempt reports new steps, this node's ranks therefore train, too.
        """
        with self._store.read() as connection:
            newest = run_nodes.newest_step(connection, run, node)
        if newest is None:
            return False
        step, step_s = newest
        before, since = self._steps.get((run, node), (-1, at))
        since = at if step > before else since
        self._steps[run, node] = step, since
        return at - since < max(_NEW_STEP_S, 2 * step_s)

    def _lose(self, client: redis.Redis, run: str, node: str, why: str) -> None:
        with self._store.write() as connection:
            state = telemetry.lose(connection, run, node, why)
        if state is not None:
            log.warning("run %s on %s: %s", run, node, why)
            streams.tell_change(client, run)
            if State(state).final:
                streams.tell_end(client, run)

    def _failed(self, client: redis.Redis, run: runs.Unfinished) -> bool:
        """Mark a run as failed; if a message of it has just arrived, only return False."""
        for_s = f"{self._silent_s:g} s"
        where = ", ".join(run.nodes) or "its node"
        why = f"no telemetry for {for_s}: lost contact with {where}"
        if run.state == State.PENDING:
            why = f"no agent started it within {for_s}"
        with self._store.write() as connection:
            if not runs.end_silent(connection, run, why):
                return False
        log.warning("run %s: %s", run.id, why)
        streams.tell_end(client, run.id)
        return True


def _unanswered(heard_at: float | None) -> str:
    if not heard_at:
        return "its agent does not answer"
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(heard_at))
    return f"its agent has not answered since {at}"


def _waits(run: runs.Unfinished) -> bool:
    # A run that waits for an engine cannot report before the engine starts its job.
    return run.state in WAITING and backends.engine(run.backend) is not None


def _streams_of(run: runs.Unfinished) -> list[str]:
    own = run_telemetry(run.id) if run.signed else TELEMETRY
    return [own, *map(node_telemetry, run.nodes)]


def _of_nodes(
    rows: Iterable[tuple[str, str, float | None]],
) -> dict[tuple[str, str], tuple[float | None, list[str]]]:
    return {(run, node): (sign, [node_telemetry(node)]) for run, node, sign in rows}


def _silences(
    known: _Silences[K],
    signs: Mapping[K, tuple[float | None, list[str]]],
    behind: set[str],
    at: float,
) -> _Silences[K]:
    """Return each name's last sign of life, and the time since which no newer one has arrived.

    A name is a run, or a node of a run.

    Args:
        known: result of the previous check.
        signs: time of the last sign of life of each name, and the streams on which the next ones
            would arrive.
        behind: streams on which ingest is behind. A silence on one of them is counted from zero.
        at: time of this check, on the clock of the silences.
    """
    silences = {}
    for name, (sign, on_streams) in signs.items():
        before, since = known.get(name, (None, at))
        continues = before == sign and behind.isdisjoint(on_streams)
        silences[name] = (sign, since if continues else at)
    return silences


def _behind(client: redis.Redis, store: Store) -> set[str]:
    """Return the streams on which ingest is behind: signs of life there may not be stored yet.

    Raises:
        redis.RedisError: the bus is unavailable, or accepts no writes (its disk may be full).
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
