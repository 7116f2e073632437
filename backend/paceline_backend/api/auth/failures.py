"""Failed logins: a limit on their rate, and their record in the log and the audit log.

An attacker tries tokens from one network or from many. `LoginThrottle` limits the attempts of each
network, and `FailedLogins` the number of audit rows that all attempts together cause.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from paceline_backend.store import Store, StoreError, audit
from paceline_backend.store.audit import UNKNOWN, Requester
from paceline_backend.store.tokens import Holder

MOST_WRONG = 10
WRONG_S = 60.0  # seconds
# Maximum number of remembered networks, which take about 4 MB of memory.
_MOST_ADDRESSES = 4096

log = logging.getLogger(__name__)

# Maximum number of failed logins that are written to the audit log.
MOST_AUDITED = 60  # per minute
_MINUTE_S = 60.0
# A client that repeats a wrong token is recorded again only after it has not sent the token for
# this time.
_REPEATED_AFTER_S = 600.0  # seconds
# Maximum number of remembered clients.
_MOST_REPEATING = 4096


class LoginThrottle:
    """Rate limit for wrong logins: `MOST_WRONG` per client network in `WRONG_S` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Network → times of its wrong logins. The network with the newest wrong login comes last.
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_s(self, address: str) -> int:
        """Return the seconds until the address may try again; 0: now."""
        times = self._wrong.get(network_of(address), deque())
        if len(times) < MOST_WRONG:
            return 0
        return max(0, math.ceil(times[0] + WRONG_S - self._clock()))

    def wrong(self, address: str) -> None:
        """Count a wrong login."""
        network = network_of(address)
        self._wrong.setdefault(network, deque(maxlen=MOST_WRONG)).append(self._clock())
        self._wrong.move_to_end(network)
        if len(self._wrong) > _MOST_ADDRESSES:
            self._wrong.popitem(last=False)

    def right(self, address: str) -> None:
        """Undo the newest call of `wrong`, because the login that it counted has succeeded.

        Callers count each login as wrong before they check it.
        """
        if times := self._wrong.get(network_of(address)):
            times.pop()


def network_of(address: str) -> str:
    """Return the /64 network of an IPv6 address; return any other address itself.

    An IPv6 client can choose freely among the 2⁶⁴ addresses of its network.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        # The client's address may also be the path of a socket.
        return address[:64]
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((int(parsed), 64), strict=False))


class FailedLogins:
    """Recorder of failed logins. Thread-safe.

    An attacker with many addresses must not fill the database. So at most `MOST_AUDITED` rows are
    written per minute, and the next row has the number of rows that were left out.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._written: deque[float] = deque(maxlen=MOST_AUDITED)
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
        if seen_at is None or now - seen_at > _REPEATED_AFTER_S:
            self.record(address, holder, "request", reason)

    def _admitted(self) -> int | None:
        """Count a row of the audit log before it is written.

        Return the number of rows left out since the last written row, or None if this row must be
        left out, too.
        """
        with self._lock:
            now = self._clock()
            if len(self._written) == MOST_AUDITED and now - self._written[0] < _MINUTE_S:
                self._left_out += 1
                return None
            self._written.append(now)
            left_out, self._left_out = self._left_out, 0
            return left_out
