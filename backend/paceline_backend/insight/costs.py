"""What runs cost, as it is told: amounts in one currency, and what has no price."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline_backend.server.prices import Price
from paceline_backend.store import Connection
from paceline_backend.store.fleet import costs
from paceline_backend.store.fleet.costs import Spent


def of_runs(
    connection: Connection, runs: Sequence[str], default: Price | None
) -> dict[str, dict[str, Any] | None]:
    """What the ranks of runs cost in their steps so far; None: nothing has a price, or no steps.

    Args:
        connection: to read from.
        runs: public ids.
        default: price of nodes whose type has none.
    """
    currency = costs.currency(connection, default)
    spent = {} if currency is None else costs.of_runs(connection, runs, default)
    return {run: _amounts(spent[run], currency) if run in spent else None for run in runs}


def by_node(connection: Connection, run: str, default: Price | None) -> dict[str, Any] | None:
    """What a run cost so far, in all and on each node; None: as in `of_runs`."""
    currency = costs.currency(connection, default)
    spent = {} if currency is None else costs.of_run_nodes(connection, run, default)
    if not spent:
        return None
    nodes = [
        {
            "node": node,
            "worker_hours": each.worker_s / 3600,
            "waited_hours": each.waited_s / 3600,
            "amount": each.cost,
            "waited": each.waited_cost,
        }
        for node, each in spent.items()
    ]
    return {**_amounts(sum(spent.values(), Spent()), currency), "nodes": nodes}


def _amounts(spent: Spent, currency: str | None) -> dict[str, Any]:
    return {
        "amount": spent.cost,
        "waited": spent.waited_cost,
        "currency": currency,
        "unpriced_hours": spent.unpriced_s / 3600,
    }
