"""Cost of runs: the time of their ranks multiplied by the price of a worker-hour.

The price comes from `paceline server --hour-price` and is the same for all nodes. The time comes
from the totals per day of `store.history.days`. Without a price there is no cost. Simulated runs
have no cost either, because their time is virtual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_backend.server.prices import Price

SIMULATED = "simulated"


def of_run(
    figures: Mapping[str, Any] | None, backend: str, price: Price | None
) -> dict[str, Any] | None:
    """Return a run's cost so far; None: simulated run, no step yet, or no price."""
    if figures is None or price is None or backend == SIMULATED:
        return None
    return {
        "amount": price.of_time(figures["worker_s"]),
        "waited": price.of_time(figures["waited_s"]),
        "currency": price.currency,
    }
