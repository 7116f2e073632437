"""Content of a report, read from the database."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline_backend.insight import costs, effects, quality, verdict, workers
from paceline_backend.insight.effects import SwitchEffect
from paceline_backend.insight.quality import MetricChange
from paceline_backend.insight.report import WARMUP_STEPS, run_report
from paceline_backend.insight.verdict import Verdict
from paceline_backend.insight.whatif.answer import Forecast, kept
from paceline_backend.server.prices import Price
from paceline_backend.store import (
    Connection,
    Store,
    attempts,
    nodes,
    reads,
    records,
    runs,
    switches,
)
from paceline_backend.store.outcomes import forecasts
from paceline_backend.store.rollups.reading import RankChoice

# Maximum number of points of a chart's line, and of columns of the heat map.
LINE_POINTS = 600
HEAT_MAP_COLUMNS = 300
# The table of workers shows means over this many of the newest steps.
_LAST = 50  # steps


@dataclass(frozen=True)
class Totals:
    """Totals over all complete steps.

    `waste` is Σ (longest − mean computing time of the ranks) ÷ Σ longest, both summed over the
    steps. `waited_h` is the waiting time of all ranks, in hours.
    """

    steps: int
    wall_s: float
    waste: float
    waited_h: float


@dataclass(frozen=True)
class Content:
    """Everything that a report shows.

    `run` and `switches` have the form that REST returns. `figures` come from `insight.report`,
    `steps` and `cells` from `store.reads`, `workers` from `insight.workers`, `quality` from
    `insight.quality`, and `cost` from `insight.costs`. The keys of `effects` and `metric_changes`
    are policy versions. `totals` is None if no step is complete. `forecast` is None if no forecast
    compares presets.
    """

    run: Mapping[str, Any]
    made_at: float
    verdict: Verdict
    totals: Totals | None
    figures: Mapping[str, Any]
    steps: Mapping[str, Any]
    cells: Mapping[str, Any]
    workers: Sequence[Mapping[str, Any]]
    switches: Sequence[Mapping[str, Any]]
    effects: Mapping[int, SwitchEffect]
    nodes: Sequence[Mapping[str, Any]]
    forecast: Forecast | None
    quality: Mapping[str, Any]
    metric_changes: Mapping[int, Sequence[MetricChange]]
    cost: Mapping[str, Any] | None


def read(
    store: Store, run_id: str, warmup: int = WARMUP_STEPS, price: Price | None = None
) -> Content:
    """Read the content of a run's report.

    The figures of each policy leave out its first `warmup` steps.
    """
    run = runs.get(store, run_id)
    asked = switches.rows(store, run_id)
    figures = run_report(store, run_id, warmup)
    measured = quality.of_run(store, run_id)
    with store.read() as connection:
        key = runs.key_of(connection, run_id)
        placement = attempts.placement(connection, key)
        which = RankChoice(every=reads.shown_every(run["world"]))
        columns = reads.shown_steps(run["world"], HEAT_MAP_COLUMNS)
        whole = (None, None)
        past = kept(forecasts.bodies(connection, key))
        return Content(
            run=run,
            made_at=time.time(),
            verdict=verdict.judge(verdict.read_observed(connection, key, whole, placement)),
            totals=_totals(connection, key, run["world"]),
            figures=figures,
            steps=reads.step_columns(connection, key, whole, LINE_POINTS),
            cells=reads.worker_step_columns(connection, key, whole, columns, which),
            workers=workers.summary(connection, key, _LAST, None),
            switches=asked,
            effects={each.version: each for each in effects.effects_of(connection, key)},
            nodes=_nodes(connection, run, placement),
            forecast=next((made for made in reversed(past) if made.compares), None),
            quality=measured,
            metric_changes=quality.after_switches(connection, key),
            cost=costs.of_run(run["figures"], run["backend"], price),
        )


def _totals(connection: Connection, key: int, world: int | None) -> Totals | None:
    names = ("step_s", "compute_max", "compute_mean")
    table = records.step_table(connection, key, names)
    if not len(table):
        return None
    step_s, longest, mean = np.nan_to_num(table[:, 2:]).T
    waited_s, computed_s = float((longest - mean).sum()), float(longest.sum())
    waste = waited_s / computed_s if computed_s > 0 else 0.0
    return Totals(len(table), float(step_s.sum()), waste, waited_s * (world or 1) / 3600)


def _nodes(
    connection: Connection, run: Mapping[str, Any], placement: attempts.Placement | None
) -> list[dict[str, Any]]:
    on = [run["node"]] * (run["world"] or run["nproc"])
    if placement is not None:
        on = list(placement.nodes)
    known = {node["id"]: node for node in nodes.listed(connection)}
    ranks: dict[str, list[int]] = {}
    for rank, node in enumerate(on):
        if node is not None:
            ranks.setdefault(node, []).append(rank)
    unknown: dict[str, Any] = {"cores": None, "gpus": [], "paceline": None, "cordoned": None}
    return [
        {"node": name, "ranks": own, **{n: known.get(name, unknown)[n] for n in unknown}}
        for name, own in ranks.items()
    ]
