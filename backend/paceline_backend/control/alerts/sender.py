"""Delivery of alerts to webhooks. Any worker may send, because it claims a delivery first."""

from __future__ import annotations

import logging
import threading

from paceline_backend.requests import webhooks
from paceline_backend.server.keys import Keys
from paceline_backend.server.origins import Origins
from paceline_backend.store import Store, meta
from paceline_backend.store.alerts.webhooks import DueDelivery, claim, note

log = logging.getLogger(__name__)

# Longer than a delivery takes.
CLAIM_S = 60.0
# All tries together take about five hours.
MOST_TRIES = 12
# The pause between two tries doubles from `FIRST_S` up to `LONGEST_S`.
FIRST_S = 10.0
LONGEST_S = 3_600.0


class Sender:
    """Sender of due deliveries, which retries failed ones later. Not thread-safe.

    If a worker dies after sending a delivery and before recording that, another worker sends it
    again with the same `webhook-id`.

    Args:
        allowed: origins that webhooks may have.
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
        # One failure must not block the other webhooks.
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
    """Return the seconds until the next try after `tries` tries, or None if there is no other."""
    if tries >= MOST_TRIES:
        return None
    return float(min(FIRST_S * 2 ** (tries - 1), LONGEST_S))
