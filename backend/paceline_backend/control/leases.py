"""Leases on runs: at most one worker at a time may plan a run, or manage its engine jobs.

`store.leases` keeps the leases and judges their expiry by the database's clock. This module adds
the copy that a process keeps of its own leases, so that it need not query the database before each
action.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from paceline_backend.store import Store
from paceline_backend.store import leases as stored
from paceline_backend.store.leases import Purpose


@dataclass
class Lease:
    """This process's lease on a run, as far as known without a query. Thread-safe.

    Args:
        until: monotonic time before which no other worker can have acquired the lease.
        purpose: "plan", or "jobs" for engine jobs.
    """

    run: int
    owner: str
    until: float
    purpose: Purpose = "plan"
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def held(self) -> bool:
        """Return True while this process certainly holds the lease."""
        with self._lock:
            return time.monotonic() < self.until

    def prolong(self, until: float) -> None:
        """Record an extension. A time in the past gives the lease up."""
        with self._lock:
            self.until = until


def acquire(
    store: Store, run: int, owner: str, lease_s: float, purpose: Purpose = "plan"
) -> Lease | None:
    """Take a lease that is free, expired or already held by this owner, or return None."""
    # Read the clock before the query, so that this process never trusts the lease for too long.
    asked = time.monotonic()
    taken = stored.acquire(store, run, owner, lease_s, purpose)
    return Lease(run, owner, asked + lease_s, purpose) if taken else None


def extend(
    store: Store, held: Collection[Lease], lease_s: float, purpose: Purpose = "plan"
) -> list[Lease]:
    """Extend leases of one purpose, and return those that another owner has taken.

    After a `StoreError` the leases stay valid until they expire.
    """
    if not held:
        return []
    asked = time.monotonic()
    kept = stored.extend(store, [(lease.run, lease.owner) for lease in held], lease_s, purpose)
    for lease in held:
        lease.prolong(asked + lease_s if lease.run in kept else 0.0)
    return [lease for lease in held if lease.run not in kept]


def release(store: Store, lease: Lease) -> None:
    """Give a lease back, so that other workers need not wait for its expiry.

    After a `StoreError` the lease expires on its own.
    """
    lease.prolong(0.0)
    stored.release(store, lease.run, lease.owner, lease.purpose)
