"""Leases with which one worker at a time manages the engine jobs of a run.

They are separate from the leases for planning, although `control.leases` keeps both. So the end of
a controller does not affect them, and any worker may plan a run whose jobs another one manages.
Methods raise `StoreError` if the database does not answer.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from contextlib import suppress

from paceline_backend.control import leases
from paceline_backend.control.leases import Lease
from paceline_backend.store import Store, StoreError

# When a worker is killed, another takes over its runs after this time.
LEASE_S = 10.0


class EngineClaims:
    """Claims of one worker.

    One thread takes them. Another extends them with `keep`, because a call to an engine may take
    longer than a lease lasts.
    """

    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._lock = threading.Lock()
        # By public id of the run.
        self._held: dict[str, Lease] = {}
        # Claims held since before the engine was queried.
        self._before: dict[str, Lease] = {}

    def take(self, keys: Mapping[str, int]) -> None:
        """Claim runs. Call it before querying their engine.

        Args:
            keys: database keys of the runs, by public id.
        """
        self._before = {}
        taken = [run for run, key in keys.items() if self.hold(run, key)]
        self._before = {run: self._held[run] for run in taken}

    def alone(self, run: str) -> bool:
        """Return True if no other worker has acted for a run since before the engine's query."""
        lease = self._before.get(run)
        return lease is not None and lease.held()

    def hold(self, run: str, key: int) -> bool:
        """Return True if this worker may act for a run now, and claim the run if it is free."""
        lease = self._held.get(run)
        if lease is not None and lease.held():
            return True
        lease = leases.acquire(self._store, key, self._owner, LEASE_S, "jobs")
        with self._lock:
            self._held.pop(run, None)
            if lease is not None:
                self._held[run] = lease
        return lease is not None

    def forget_others(self, ids: Collection[str]) -> None:
        """Let the claims on all other runs expire."""
        with self._lock:
            self._held = {run: lease for run, lease in self._held.items() if run in ids}

    def keep(self) -> None:
        """Extend the claims."""
        with self._lock:
            held = list(self._held.values())
        leases.extend(self._store, held, LEASE_S, "jobs")

    def give_back(self) -> None:
        """Release all claims, so that the next worker need not wait for their expiry."""
        with self._lock:
            held, self._held, self._before = list(self._held.values()), {}, {}
        # Claims that cannot be released expire.
        with suppress(StoreError):
            for lease in held:
                leases.release(self._store, lease)
