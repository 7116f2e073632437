"""Record of failed logins in the log and, at a bounded rate, in the audit log."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from paceline_backend.api.limits import network_of
from paceline_backend.store import Store, StoreError, audit
from paceline_backend.store.audit import UNKNOWN, Requester
from paceline_backend.store.tokens import Holder

log = logging.getLogger(__name__)

MOST_ROWS = 60  # per minute
_MINUTE_S = 60.0
# A client that repeats a wrong token is recorded again after this time.
_QUIET_S = 600.0  # seconds
# Maximum number of remembered clients.
_MOST_REPEATING = 4096


class FailedLogins:
    """Recorder of failed logins. Thread-safe.

    An attacker with many addresses must not fill the database. At most `MOST_ROWS` rows are
    therefore written per minute; the next row counts those that were left out.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._written: deque[float] = deque(maxlen=MOST_ROWS)
        self._left_out = 0
        self._repeating: OrderedDict[tuple[str, str, str], float] = OrderedDict()

    def record(self, address: str, holder: Holder | None, way: str, reason: str) -> None:
        """Record a failed login. An error of the database is only logged.

        `holder` is None for an unknown token. `way` is `login page`, `link` or `request`.
        """
        left_out = self._admitted()
        if left_out is None:
            return
        name, scope = (UNKNOWN, "") if holder is None else (holder.name, holder.scope)
        log.warning("failed login from %s (%s): %s, by %s", address, way, reason, name)
        details = {"way": way, "reason": reason, **({"left_out": left_out} if left_out else {})}
        try:
            with self._store.write() as connection:
                by = Requester(name, scope, address)
                audit.record(connection, by, "login.failed", details=details)
        except StoreError as error:
            log.warning("cannot record the failed login in the audit log: %s", error)

    def record_request(self, address: str, holder: Holder | None, reason: str) -> None:
        """Record a request with a wrong token, but only once while a client repeats the token."""
        key = (network_of(address), "" if holder is None else holder.id, reason)
        with self._lock:
            now = self._clock()
            seen_at = self._repeating.pop(key, None)
            self._repeating[key] = now
            if len(self._repeating) > _MOST_REPEATING:
                self._repeating.popitem(last=False)
        if seen_at is None or now - seen_at > _QUIET_S:
            self.record(address, holder, "request", reason)

    def _admitted(self) -> int | None:
        """Return the number of rows left out before this one; None: leave this one out, too."""
        with self._lock:
            now = self._clock()
            if len(self._written) == MOST_ROWS and now - self._written[0] < _MINUTE_S:
                self._left_out += 1
                return None
            self._written.append(now)
            left_out, self._left_out = self._left_out, 0
            return left_out
