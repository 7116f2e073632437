"""Measurement of the effects of policy switches.

The worker calls `Effects.look` every few seconds. It stores the effect of each switch once enough
steps have followed, or at the run's end.
"""

from __future__ import annotations

import logging
import threading

from paceline_backend.insight import effects
from paceline_backend.store import Store, StoreError
from paceline_backend.store.outcomes import effects as kept
from paceline_backend.store.outcomes import forecasts
from paceline_backend.store.outcomes.effects import Due

log = logging.getLogger(__name__)

# Minimum number of steps between two checks of an active run.
LOOK_STEPS = 20

# Maximum number of ended runs per round. There can be many after an upgrade of the database.
_MOST_ENDED = 20


class Effects:
    """Updater of the effects of switches that are not final yet. Not thread-safe.

    A check reads at most 400 steps of a switch in one short transaction, so it does not block
    planning or ingest.
    """

    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._owner = owner
        # By active run: its newest step at the last check.
        self._looked: dict[int, int] = {}

    def look(self, stop: threading.Event) -> None:
        """Store the effects in all runs that are due."""
        with self._store.read() as connection:
            due = kept.due(connection, self._owner, _MOST_ENDED)
            newest = {run.key: forecasts.newest_step(connection, run.key) for run in due}
        active = {run.key for run in due if not run.ended}
        self._looked = {key: step for key, step in self._looked.items() if key in active}
        for run in due:
            if stop.is_set():
                return
            # Fewer steps than before mean that a new attempt has started.
            before, step = self._looked.get(run.key, -LOOK_STEPS), newest[run.key]
            if run.ended or not before <= step < before + LOOK_STEPS:
                if not run.ended:
                    self._looked[run.key] = step
                self._guarded(run)

    def _guarded(self, run: Due) -> None:
        try:
            effects.note(self._store, run.key, ended=run.ended)
        except StoreError:
            raise
        # A failure here must not end the worker, which also plans runs.
        except Exception:
            log.exception("run %s: measuring the effects of changes failed", run.id)
