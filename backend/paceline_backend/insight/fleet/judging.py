"""Conversion of a run's verdict to the form in which the database stores it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline_backend.insight.verdict import facts_of, judge, read_observed
from paceline_backend.store import Store, attempts
from paceline_backend.store.fleet.progress import Running
from paceline_backend.store.fleet.verdicts import Kept

# Only these kinds of causes originate on a node. The others come from the data, the network or the
# plan.
OF_NODES = ("node", "transient", "periodic", "input")


def judged(store: Store, run: Running, at: float) -> Kept | None:
    """Return the verdict over a run's newest steps; None if there are too few steps.

    No database connection is held while the verdict is computed. `at` is the current time of the
    database's clock.
    """
    with store.read() as connection:
        placement = attempts.placement(connection, run.key)
        seen = read_observed(connection, run.key, (None, None), placement)
    facts = facts_of(judge(seen))
    if facts["from"] is None or not facts["wall_s"]:
        return None
    going = [cause for cause in facts["causes"] if cause["until"] is None]
    return Kept(
        run=run.id,
        at=at,
        until=at,
        workers=seen.compute_s.shape[1],
        nodes=_by_node(going, seen.nodes or [run.node or ""] * seen.compute_s.shape[1]),
        body=facts,
    )


def _by_node(going: list[dict[str, Any]], placement: Sequence[str]) -> dict[str, dict[str, Any]]:
    held: dict[str, dict[str, Any]] = {}
    for cause in going:
        if cause["kind"] not in OF_NODES:
            continue
        for node in sorted({placement[rank] for rank in cause["ranks"]} - {""}):
            here = held.setdefault(node, {"ranks": [], "kinds": [], "share": 0.0, "factor": None})
            ranks = [rank for rank in cause["ranks"] if placement[rank] == node]
            here["ranks"] = sorted({*here["ranks"], *ranks})
            here["kinds"] = sorted({*here["kinds"], cause["kind"]})
            here["share"] += cause["share"] * len(ranks) / len(cause["ranks"])
            factors = [here["factor"], cause["factor"]]
            here["factor"] = max((each for each in factors if each is not None), default=None)
    return held
