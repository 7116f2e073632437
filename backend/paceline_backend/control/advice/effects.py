"""Keeps what switches changed, once it is known, and at the run's end."""

from __future__ import annotations

import logging
import threading

from paceline_backend.insight import effects
from paceline_backend.store import Store, StoreError
from paceline_backend.store.outcomes import effects as kept
from paceline_backend.store.outcomes import forecasts
from paceline_backend.store.outcomes.effects import Due

log = logging.getLogger(__name__)

LOOK_STEPS = 20  # between two looks at an active run, at least

_MOST_ENDED = 20  # ended runs in one look, as after an upgrade of a database with many


class Effects:
    """Looks at runs whose switches have no final effect yet. For one thread.

    A look reads at most 400 steps of a switch, in one short transaction. Plans, ingest and other
    parts do not wait for it.

    Args:
        store: the database.
        owner: this worker; runs that another one plans are that one's.
    """

    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._looked: dict[int, int] = {}  # active run → its newest step at the last look

    def look(self, stop: threading.Event) -> None:
        """Keeps the effects of all runs that are due.

        Raises:
            StoreError: the database did not answer.
        """
        with self._store.read() as connection:
            due = kept.due(connection, self._owner, _MOST_ENDED)
            newest = {run.key: forecasts.newest_step(connection, run.key) for run in due}
        active = {run.key for run in due if not run.ended}
        self._looked = {key: step for key, step in self._looked.items() if key in active}
        for run in due:
            if stop.is_set():
                return
            # Fewer steps than before: another attempt.
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
        except Exception:  # an effect is not worth a worker, which plans runs
            log.exception("run %s: no effects", run.id)
