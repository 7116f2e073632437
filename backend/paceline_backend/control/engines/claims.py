"""Runs for whose jobs a worker acts: it holds a lease of each, which no other worker has meanwhile.

These leases are apart from those of controllers (`control.leases`): a controller that ends takes
none away, and a run whose jobs wait is planned by whoever is free to.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from contextlib import suppress

from paceline_backend.control import leases
from paceline_backend.control.leases import Lease
from paceline_backend.store import Store, StoreError

LEASE_S = 10.0  # so long after a worker was killed, another acts for its runs


class Claims:
    """The claims of one worker.

    One thread takes them. Another prolongs them with `keep`, because a verb of an engine may take
    longer than a lease lasts.

    Args:
        store: the database.
        owner: this worker's name.
    """

    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._lock = threading.Lock()
        self._held: dict[str, Lease] = {}  # by run
        self._before: dict[str, Lease] = {}  # those held since before the engine was asked

    def take(self, keys: Mapping[str, int]) -> None:
        """Claims runs, before their engine is asked about them.

        Args:
            keys: of the runs, by public id.

        Raises:
            StoreError: the database did not answer.
        """
        self._before = {}
        taken = [run for run, key in keys.items() if self.hold(run, key)]
        self._before = {run: self._held[run] for run in taken}

    def alone(self, run: str) -> bool:
        """Whether no other worker has acted for a run since before its engine was asked."""
        lease = self._before.get(run)
        return lease is not None and lease.held()

    def hold(self, run: str, key: int) -> bool:
        """Whether this worker may act for a run now; claims the run if nobody has.

        Raises:
            StoreError: the database did not answer.
        """
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
        """Lets claims expire of runs that nobody has to look after any more."""
        with self._lock:
            self._held = {run: lease for run, lease in self._held.items() if run in ids}

    def keep(self) -> None:
        """Extend the claims.

        Raises:
            StoreError: the database did not answer; claims expire.
        """
        with self._lock:
            held = list(self._held.values())
        leases.extend(self._store, held, LEASE_S, "jobs")

    def give_back(self) -> None:
        """Releases all claims: the next worker need not wait."""
        with self._lock:
            held, self._held, self._before = list(self._held.values()), {}, {}
        with suppress(StoreError):  # they expire
            for lease in held:
                leases.release(self._store, lease)
