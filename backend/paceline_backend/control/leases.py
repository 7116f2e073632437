"""Who may plan a run, or act for its jobs: at most one owner at a time, for a limited time.

`store.leases` keeps the leases and judges their expiry by the database's clock. This module adds
what a process knows about its own leases without asking the database.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from paceline_backend.store import Store
from paceline_backend.store import leases as stored
from paceline_backend.store.leases import Purpose

reap = stored.reap


@dataclass
class Lease:
    """This process's claim on a run, as far as it knows without asking. Thread-safe.

    Args:
        run: key of the run.
        owner: who holds it.
        until: monotonic time; before this nobody else can have acquired it.
        purpose: what it allows.
    """

    run: int
    owner: str
    until: float
    purpose: Purpose = "plan"
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def held(self) -> bool:
        """Whether it is certainly still ours."""
        with self._lock:
            return time.monotonic() < self.until

    def prolong(self, until: float) -> None:
        """Notes an extension; a time in the past gives the lease up."""
        with self._lock:
            self.until = until


def acquire(
    store: Store, run: int, owner: str, lease_s: float, purpose: Purpose = "plan"
) -> Lease | None:
    """Takes a lease that is free, expired, or this owner's already; None if another holds it.

    Raises:
        StoreError: the database did not answer.
    """
    asked = time.monotonic()  # before the database's now: the lease is never trusted for too long
    taken = stored.acquire(store, run, owner, lease_s, purpose)
    return Lease(run, owner, asked + lease_s, purpose) if taken else None


def extend(
    store: Store, held: Collection[Lease], lease_s: float, purpose: Purpose = "plan"
) -> list[Lease]:
    """Prolongs leases of one purpose; returns those that were lost to another owner.

    Raises:
        StoreError: the database did not answer; the leases run on until they expire.
    """
    if not held:
        return []
    asked = time.monotonic()
    kept = stored.extend(store, [(lease.run, lease.owner) for lease in held], lease_s, purpose)
    for lease in held:
        lease.prolong(asked + lease_s if lease.run in kept else 0.0)
    return [lease for lease in held if lease.run not in kept]


def release(store: Store, lease: Lease) -> None:
    """Gives a lease back, so that others need not wait for its expiry.

    Raises:
        StoreError: the database did not answer; the lease expires by itself.
    """
    lease.prolong(0.0)
    stored.release(store, lease.run, lease.owner, lease.purpose)
