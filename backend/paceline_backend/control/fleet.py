"""Stored verdicts and progress of all active runs, for the fleet page.

Each worker calls `FleetWatch.look` every few seconds, but only one updates verdicts and progress:
the worker that holds the lease "fleet".
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline_backend.insight import hangs
from paceline_backend.insight.fleet import judged
from paceline_backend.store import Connection, Store, StoreUnavailableError, coverage, leases
from paceline_backend.store.database import now
from paceline_backend.store.fleet import progress, verdicts
from paceline_backend.store.fleet.progress import Running

log = logging.getLogger(__name__)

# A worker that has not acted for this long loses the lease.
HOLD_S = 30.0
VERDICT_INTERVAL_S = 10.0
# Minimum time between two counts of a run's inexact epochs: epochs that did not use each sample
# exactly once. Each count reads the whole run.
COVERAGE_S = 60.0
VERDICTS_KEPT_S = 400 * 86_400.0

_FORGET_EVERY_S = 3_600.0
# The period of a stored verdict ends if no other verdict follows within this multiple of the pause
# between two verdicts.
_GAPS = 12
# A verdict is extended for at least this time even if no new step completes.
_OVERDUE_S = 600.0  # seconds
# Maximum fraction of this process's time that the verdicts of a run take.
_VERDICT_SHARE = 0.05
# Maximum time in seconds for the verdicts of one `look`, unless a single verdict takes longer.
_TURN_S = 1.0


@dataclass(frozen=True)
class _Judged:
    """Last verdict about a run. Times are on the worker's clock."""

    # Attempt and newest step of the run when the verdict was made.
    place: tuple[int, int] = (-1, -1)
    # Earliest time of the next verdict. If the run has no new step by then, this verdict is
    # extended.
    due_at: float = 0.0
    # If no other verdict follows within this time, the period of this verdict has ended.
    gap_s: float = 0.0
    # If the run has no new step by this time, a step is overdue, and this verdict is no longer
    # extended.
    overdue_at: float = 0.0


class FleetWatch:
    """Task that updates the verdicts and the progress of all active runs. Not thread-safe."""

    def __init__(
        self, store: Store, owner: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._owner = owner
        self._clock = clock
        self._forget_at = clock()
        self._judged: dict[int, _Judged] = {}
        # By key of the run: time of the next count of its inexact epochs.
        self._covered: dict[int, float] = {}

    def end(self) -> None:
        """Give the lease back, so that another worker can take it at once."""
        leases.give_back(self._store, self._owner, "fleet")

    def look(self, stop: threading.Event) -> bool:
        """Update the progress of all runs and the verdicts that are due.

        Return False if another worker holds the lease.
        """
        seen = self._note_progress()
        if seen is None:
            return False
        keys = {run.key for run in seen}
        self._judged = {key: last for key, last in self._judged.items() if key in keys}
        self._covered = {key: at for key, at in self._covered.items() if key in keys}
        began = self._clock()
        for run in sorted(seen, key=lambda run: self._last(run).due_at):
            if stop.is_set() or self._clock() - began > _TURN_S:
                break
            self._guarded(run)
        self._forget()
        return True

    def _holds(self, connection: Connection) -> bool:
        """Take or renew the lease in the caller's transaction; False: another worker holds it."""
        return leases.take(connection, leases.ALL_RUNS, self._owner, HOLD_S, "fleet")

    def _forget(self) -> None:
        if self._clock() < self._forget_at:
            return
        self._forget_at = self._clock() + _FORGET_EVERY_S
        with self._store.write() as connection:
            verdicts.forget(connection, now(connection) - VERDICTS_KEPT_S)

    def _note_progress(self) -> list[Running] | None:
        """Store the runs' progress; return the active runs, or None if the lease is not held."""
        with self._store.write() as connection:
            if not self._holds(connection):
                return None
            at = now(connection)
            seen, known = progress.running(connection), progress.known(connection)
            for run in seen:
                progress.note(connection, run, known.get(run.key), at)
        return seen

    def _guarded(self, run: Running) -> None:
        try:
            self._judge(run)
            self._cover(run)
        except StoreUnavailableError:
            raise
        # A failed verdict must not end the worker, which also plans runs.
        except Exception:
            log.exception("run %s: updating its verdict failed", run.id)

    def _last(self, run: Running) -> _Judged:
        return self._judged.get(run.key, _Judged())

    def _judge(self, run: Running) -> None:
        place, last = (run.attempt, run.step), self._last(run)
        if run.step < 0 or self._clock() < last.due_at:
            return
        if place == last.place:
            self._extend(run, last)
            return
        began = self._clock()
        with self._store.read() as connection:
            at = now(connection)
        made = judged(self._store, run, at)
        ended = self._clock()
        pause_s = max(VERDICT_INTERVAL_S, (ended - began) / _VERDICT_SHARE)
        step_s = 0.0 if made is None else made.body["step_time_s"] or 0.0
        lasts_s = 0.0 if made is None else max(_OVERDUE_S, hangs.HANG_STEPS * step_s)
        self._judged[run.key] = _Judged(place, ended + pause_s, _GAPS * pause_s, ended + lasts_s)
        if made is not None:
            with self._store.write() as connection:
                if self._holds(connection):
                    verdicts.keep(connection, made, max(last.gap_s, _GAPS * pause_s))

    def _extend(self, run: Running, last: _Judged) -> None:
        """Extend the period of the last verdict to now, unless a step is overdue.

        An overdue step may mean a hang, whose cause the last verdict does not name.
        """
        self._judged[run.key] = replace(last, due_at=self._clock() + VERDICT_INTERVAL_S)
        if self._clock() >= last.overdue_at:
            return
        with self._store.write() as connection:
            if self._holds(connection):
                verdicts.go_on(connection, run.id, now(connection), last.gap_s)

    def _cover(self, run: Running) -> None:
        if run.step < 0 or self._clock() < self._covered.get(run.key, 0.0):
            return
        began = self._clock()
        with self._store.read() as connection:
            epochs = coverage.coverage(connection, run.key)["epochs"]
        took_s = self._clock() - began
        self._covered[run.key] = self._clock() + max(COVERAGE_S, took_s / _VERDICT_SHARE)
        inexact = sum(not epoch["exact"] for epoch in epochs)
        with self._store.write() as connection:
            progress.change(connection, run.key, {"inexact": inexact if epochs else None})
