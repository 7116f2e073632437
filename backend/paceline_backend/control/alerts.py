"""Alerts: raised and resolved by rules, and delivered to webhooks.

Each worker calls `AlertWatch.look` every few seconds, but only one evaluates the rules: the worker
that holds the lease "alerts". Any worker may send a delivery (`Sender.send`), because it claims the
delivery first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from paceline_backend.insight.alerts import Condition, Lookout, Rule, Timing, debounce, rules_with
from paceline_backend.requests import webhooks
from paceline_backend.server.keys import Keys
from paceline_backend.server.origins import Origins
from paceline_backend.store import Connection, Store, leases, meta
from paceline_backend.store.alerts import rows
from paceline_backend.store.alerts import rules as changed_rules
from paceline_backend.store.alerts.webhooks import DueDelivery, claim, note, queue
from paceline_backend.store.database import now

log = logging.getLogger(__name__)

# A worker that has not acted for this long loses the lease.
HOLD_S = 30.0
ALERTS_KEPT_S = 90 * 86_400.0

_FORGET_EVERY_S = 3_600.0

# Time for which a worker claims a delivery. It is longer than the delivery takes.
CLAIM_S = 60.0
# Maximum number of tries of a delivery. The last try is made about 3.4 hours after the first.
MOST_TRIES = 12
# The pause between two tries doubles from `FIRST_RETRY_S` up to `LONGEST_RETRY_S`.
FIRST_RETRY_S = 10.0
LONGEST_RETRY_S = 3_600.0


class AlertWatch:
    """Evaluator of the alert rules, which updates the alerts. Not thread-safe.

    An alert and its webhook deliveries are written in one transaction, in which this worker holds
    the lease. So two workers never raise the same alert, and never queue its deliveries twice.
    """

    def __init__(self, store: Store, owner: str) -> None:
        self._store = store
        self._owner = owner
        self._lookout = Lookout(store)
        self._forget_at = time.monotonic()

    def end(self) -> None:
        """Give the lease back, so that another worker can take it at once."""
        leases.give_back(self._store, self._owner, "alerts")

    def look(self, at: float | None = None) -> bool:
        """Evaluate all rules once; return False if another worker holds the lease.

        Args:
            at: Unix time of the evaluation. None means now, by the database's clock.
        """
        with self._store.write() as connection:
            if not self._holds(connection):
                return False
            at = now(connection) if at is None else at
            rules = rules_with(changed_rules.changed(connection))
        conditions, running = self._lookout.look(rules, at)
        with self._store.write() as connection:
            if not self._holds(connection):
                return False
            _apply(connection, rules, conditions, running, at)
        self._forget(at)
        return True

    def _holds(self, connection: Connection) -> bool:
        """Take or renew the lease in the caller's transaction; False: another worker holds it."""
        return leases.take(connection, leases.ALL_RUNS, self._owner, HOLD_S, "alerts")

    def _forget(self, at: float) -> None:
        if time.monotonic() < self._forget_at:
            return
        self._forget_at = time.monotonic() + _FORGET_EVERY_S
        with self._store.write() as connection:
            rows.forget(connection, at - ALERTS_KEPT_S)


def _apply(
    connection: Connection,
    rules: Mapping[str, Rule],
    conditions: list[Condition],
    running: set[str],
    at: float,
) -> None:
    present = {(row["rule"], row["run"]): row for row in rows.unresolved(connection)}
    seen = {(condition.rule, condition.run): condition for condition in conditions}
    for subject, condition in seen.items():
        _change(connection, rules[condition.rule], present.get(subject), condition, at)
    for (name, run), row in present.items():
        rule = rules.get(name)
        if (name, run) in seen:
            continue
        if rule is None or not rule.enabled:
            _end(connection, row, at, "The rule is disabled.")
        elif run and run not in running:
            _end(connection, row, at, "The run is no longer training.")


def _change(
    connection: Connection,
    rule: Rule,
    row: dict[str, Any] | None,
    condition: Condition,
    at: float,
) -> None:
    holds = rule.holds(condition.value)
    before = None if row is None else _timing(row)
    after = debounce(before, holds, rule, at)
    if after is None:
        if row is not None:
            rows.remove(connection, row["key"])
        return
    values: dict[str, Any] = dict(vars(after))
    if holds:
        values |= {"value": condition.value, "threshold": rule.threshold}
        values |= {"words": condition.words, "severity": rule.severity}
    if row is None:
        subject = {"rule": rule.name, "run": condition.run}
        key = rows.add(connection, subject | values)
    else:
        key = row["key"]
        rows.update(connection, key, values)
    if after.raised_at is not None and (before is None or before.raised_at is None):
        _notify(connection, key, "raised", at)
    if after.resolved_at is not None:
        _notify(connection, key, "resolved", at)


def _end(connection: Connection, row: dict[str, Any], at: float, why: str) -> None:
    """Resolve an alert whose condition can no longer be evaluated."""
    if row["raised_at"] is None:
        rows.remove(connection, row["key"])
        return
    values = {"gone_at": at, "resolved_at": at, "words": f"{row['words']} {why}"}
    rows.update(connection, row["key"], values)
    _notify(connection, row["key"], "resolved", at)


def _notify(connection: Connection, key: int, event: str, at: float) -> None:
    alert = rows.get(connection, key)
    log.warning("alert %d %s: %s%s", key, event, alert["rule"], _about(alert))
    body = webhooks.body_of(event, alert, at)
    queue(connection, key, event, alert["severity"], body, at)


def _about(alert: Mapping[str, Any]) -> str:
    return f" of run {alert['run']}" if alert["run"] else ""


def _timing(row: Mapping[str, Any]) -> Timing:
    return Timing(**{name: row[name] for name in Timing.__dataclass_fields__})


class Sender:
    """Sender of due deliveries, which retries failed ones later. Not thread-safe.

    If a worker dies after sending a delivery and before recording that, another worker sends it
    again with the same `webhook-id`.
    """

    def __init__(self, store: Store, allowed: Origins) -> None:
        self._store = store
        self._allowed = allowed

    def send(self, stop: threading.Event) -> int:
        """Send all due deliveries, and return the number of tries."""
        tried = 0
        while not stop.is_set():
            with self._store.write() as connection:
                due = claim(connection, CLAIM_S, 1)
            if not due:
                break
            for delivery in due:
                self._send(delivery)
            tried += len(due)
        return tried

    def _send(self, delivery: DueDelivery) -> None:
        key = Keys(meta.secret(self._store)).of_webhook(delivery.webhook)
        name = webhooks.delivery_id(delivery.key)
        try:
            sent = webhooks.post(delivery.url, delivery.body, name, key, self._allowed)
        # One failure must not block the other deliveries.
        except Exception as error:
            log.exception("webhook %s: delivery %s failed", delivery.webhook, name)
            sent = webhooks.Sent(None, f"the request failed: {type(error).__name__}")
        again_s = None if sent.error is None else back_off(delivery.tries + 1)
        if sent.error is not None:
            end = "no more retries" if again_s is None else f"next retry in {again_s:.0f} s"
            log.warning("webhook %s: delivery failed: %s; %s", delivery.webhook, sent.error, end)
        with self._store.write() as connection:
            note(connection, delivery.key, sent.status, sent.error, again_s)


def back_off(tries: int) -> float | None:
    """Return the seconds until the next try after `tries` tries, or None if there is no next."""
    if tries >= MOST_TRIES:
        return None
    return float(min(FIRST_RETRY_S * 2 ** (tries - 1), LONGEST_RETRY_S))
