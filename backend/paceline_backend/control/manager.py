"""Assignment of controllers to runs: each active run has at most one controller anywhere.

The worker calls `ControllerManager.look` several times a second. Leases in the database ensure that
no two workers plan the same run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline import policies
from paceline_backend import backends
from paceline_backend.control import leases
from paceline_backend.control.controller import Controller
from paceline_backend.control.leases import Lease
from paceline_backend.control.turns import Turns
from paceline_backend.store import Store, StoreUnavailableError, runs
from paceline_backend.store.leases import reap

logger = logging.getLogger(__name__)

# Duration of a lease. It is so short that after a worker's death, another worker makes its first
# plan for the run within 5 s.
LEASE_S = 3.0

# Pause before a run whose controller failed gets another controller.
_NEXT_CONTROLLER_S = 5.0


@dataclass(frozen=True)
class _Owned:
    id: str
    lease: Lease
    thread: threading.Thread
    stop: threading.Event


class ControllerManager:
    """Manager of this worker's controllers; it takes the leases of runs that no worker plans yet.

    Args:
        lease_s: duration of a lease in seconds, after which another worker may take over.
        busy: returns True while ingest on this machine is behind.
    """

    def __init__(
        self,
        store: Store,
        bus_url: str,
        owner: str,
        *,
        lease_s: float = LEASE_S,
        busy: Callable[[], bool] = lambda: False,
    ) -> None:
        # Number of leases taken since this process started.
        self.taken = 0
        # Number of leases that another worker took over.
        self.lost = 0
        self._store = store
        self._bus_url = bus_url
        self._owner = owner
        self._lease_s = lease_s
        self._turns = Turns(busy)
        self._owned: dict[int, _Owned] = {}
        self._extended = 0.0
        # By run: monotonic time before which a failed controller is not restarted.
        self._not_before: dict[int, float] = {}
        self._warming: threading.Thread | None = None
        self._reaped = False

    def look(self) -> None:
        """Extend leases, and stop and start controllers."""
        if not self._reaped:
            # Remove expired leases on runs that have ended or were deleted.
            reap(self._store)
            self._reaped = True
        self._extend()
        self._scan()

    def end(self) -> None:
        """Stop all controllers and give their leases back."""
        for owned in self._owned.values():
            owned.stop.set()
        for owned in self._owned.values():
            owned.thread.join()
            try:
                leases.release(self._store, owned.lease)
            except StoreUnavailableError as error:
                logger.warning("run %s: its lease is held until it expires: %s", owned.id, error)
        self._owned.clear()
        if self._warming is not None:
            self._warming.join()

    def _extend(self) -> None:
        now = time.monotonic()
        if now < self._extended + self._lease_s / 3:
            return
        held = [owned.lease for owned in self._owned.values() if not owned.stop.is_set()]
        for lease in leases.extend(self._store, held, self._lease_s):
            owned = self._owned[lease.run]
            logger.warning("run %s: another control plane plans it now", owned.id)
            owned.stop.set()
            self.lost += 1
        self._extended = now

    def _scan(self) -> None:
        with self._store.read() as connection:
            active = runs.active(connection, backends.planned())
        for key, owned in list(self._owned.items()):
            if key not in active:
                owned.stop.set()
            if not owned.thread.is_alive():
                leases.release(self._store, owned.lease)
                del self._owned[key]
        if active and self._warming is None:
            # Kernels that are not cached yet take half a minute to compile, so compile them in a
            # thread. Runs under `bsp` need no kernels and are planned meanwhile.
            self._warming = threading.Thread(target=policies.warm_up, name="warm-up")
            self._warming.start()
        now = time.monotonic()
        for key, run_id in active.items():
            if key in self._owned or now < self._not_before.get(key, now):
                continue
            lease = leases.acquire(self._store, key, self._owner, self._lease_s)
            if lease is not None:
                self.taken += 1
                self._start(key, run_id, lease)

    def _start(self, key: int, run_id: str, lease: Lease) -> None:
        controller = Controller(self._store, self._bus_url, key, run_id, lease, self._turns)
        stop = threading.Event()

        def work() -> None:
            try:
                controller.run(stop)
            except Exception:
                logger.exception(
                    "the controller of run %s failed; its leader repeats the last split", run_id
                )
                self._not_before[key] = time.monotonic() + _NEXT_CONTROLLER_S

        thread = threading.Thread(target=work, name=f"controller-{run_id}")
        self._owned[key] = _Owned(run_id, lease, thread, stop)
        thread.start()
