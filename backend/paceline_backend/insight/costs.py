"""What runs cost: the time of their ranks at the price of a worker-hour.

The price is that of `paceline server --hour-price`, the same for all nodes. The time is that of
`store.history.days`, so a run's cost is as old as its figures. Without a price nothing costs money.
A simulated run never does: its time is virtual.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_backend.server.prices import Price

SIMULATED = "simulated"  # backend of runs without processes


def of_run(
    figures: Mapping[str, Any] | None, backend: str, price: Price | None
) -> dict[str, Any] | None:
    """Return what a run cost so far as REST shows it; None: it costs nothing, or has no step.

    Args:
        figures: of the run; `store.history.days.figures`. None: no step was summed up.
        backend: of the run.
        price: of a worker-hour.
    """
    if figures is None or price is None or backend == SIMULATED:
        return None
    return {
        "amount": price.of_time(figures["worker_s"]),
        "waited": price.of_time(figures["waited_s"]),
        "currency": price.currency,
    }
