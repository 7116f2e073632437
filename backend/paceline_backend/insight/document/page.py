"""Rendering of a report as HTML: `render` fills the template templates/run.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from paceline.core.version import __version__
from paceline.wire import ENDED, State
from paceline_backend.insight import effects, quality
from paceline_backend.insight import verdict as verdicts
from paceline_backend.insight.document.charts import (
    Band,
    Chart,
    ChartLine,
    Floats,
    Mark,
    heat_map,
    rolling,
    svg,
)
from paceline_backend.insight.document.content import Content, Totals
from paceline_backend.insight.whatif.answer import recommended

# The tile of the slowest worker is red if the worker takes at least `_SLOW_RATIO` times the median,
# and yellow if it takes at least `_SLOWISH` times the median.
_SLOW_RATIO, _SLOWISH = 1.3, 1.1
# If there are more ranks than this besides the slowest one, a chart shows them as a band instead of
# one line for each.
_MOST_RANK_LINES = 16
# A running median covers at least this many values.
_LEAST_IN_MEDIAN = 3
_SETTINGS = (
    ("script", "Script"),
    ("args", "Arguments"),
    ("cwd", "Directory"),
    ("backend", "Backend"),
    ("backend_options", "Options of the backend"),
    ("world", "Ranks"),
    ("device", "Device"),
    ("emulated", "Emulated devices"),
    ("samples", "Samples"),
    ("global_batch", "Global batch"),
    ("epochs", "Epochs"),
    ("seed", "Seed"),
    ("max_restarts", "Restarts at most"),
    ("attempt", "Attempt"),
    ("dropped", "Lost records"),
)


def render(content: Content) -> str:
    """Return the HTML of a report."""
    environment = Environment(
        loader=PackageLoader("paceline_backend.insight.document"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "seconds": seconds,
        "percent": percent,
        "count": count,
        "moment": moment,
        "ranks": named_ranks,
        "money": money,
    }
    return environment.get_template("run.html").render(
        run=content.run,
        made_at=content.made_at,
        version=__version__,
        banner=banner(content),
        tiles=tiles(content),
        charts=charts(content),
        changes=changes(content),
        figures=content.figures,
        workers=content.workers,
        nodes=content.nodes,
        cost=content.cost,
        recommended=advice(content),
        settings=settings(content),
    )


def banner(content: Content) -> dict[str, Any]:
    """Return the banner about the verdict: its colour (`level`), title, causes and sentences."""
    judged, run = content.verdict, content.run
    said = [(verdicts.cause_words(judged, c), verdicts.to_do(judged, c)) for c in judged.causes]
    share = judged.cost_s / judged.wall_s if judged.wall_s else 0.0
    about = ""
    if judged.steps:
        first, last = int(judged.seen.step[0]), int(judged.seen.step[-1])
        about = f"Steps {first:,}–{last:,}, {seconds(judged.wall_s)} of wall time."
    if run["state"] == State.FAILED:
        level, title = "bad", "The run failed"
    elif judged.steps < verdicts.THRESHOLDS.fewest_steps:
        level, title = "quiet", "No verdict yet: too few steps"
    elif not judged.causes:
        level, title = "ok", "Nothing holds the run up"
    else:
        level = _level(share, verdicts.THRESHOLDS.watch_share, verdicts.THRESHOLDS.held_up_share)
        held, cost = percent(share), seconds(judged.cost_s)
        said_of = "Held up" if any(c.until is None for c in judged.causes) else "Was held up"
        over = run["state"] in ENDED
        lost = f"was lost, {cost}" if over else f"is lost, {cost} so far"
        said_of = "Was held up" if over else said_of
        title = f"{said_of}: {held} of the wall time {lost} in these steps"
    words = verdicts.words(judged) if not said else ""
    return {"level": level, "title": title, "causes": said, "about": about, "words": words}


def tiles(content: Content) -> list[dict[str, str]]:
    """Return the tiles with key figures: label, value, note and colour (`level`) of each tile."""
    made = [_step_tile(content)]
    if content.totals is not None:
        made.append(_waste_tile(content.totals))
    rows = [row for row in content.workers if row["compute_s"]]
    if len(rows) > 1:
        made.append(_slowest_tile(rows))
    if content.cost is not None:
        made.append(_cost_tile(content.cost))
    if content.quality["target"] is not None:
        made.append(_target_tile(content.quality["target"]))
    return made


def _cost_tile(cost: Mapping[str, Any]) -> dict[str, str]:
    note = f"{money(cost['waited'], cost['currency'])} of it for waiting"
    value = money(cost["amount"], cost["currency"])
    return {"label": "Cost of its steps", "value": value, "note": note, "level": ""}


def _target_tile(target: Mapping[str, Any]) -> dict[str, str]:
    sign = {">=": "≥", "<=": "≤"}[target["direction"]]
    label = f"Time to {target['metric']} {sign} {count(target['value'])}"
    met = target["met"]
    if met is None:
        best = (
            "nothing was measured"
            if target["best"] is None
            else f"best: {count(target['best'])}, after step {target['best_step']}"
        )
        return {"label": label, "value": "not met", "note": best, "level": ""}
    by = " Training loss, mean of 100 steps." if target["source"] == "training" else ""
    note = (
        f"{count(met['value'])} after step {met['step']:,}, epoch {met['epoch']}, "
        f"with {met['trained']:,} samples.{by}"
    )
    return {"label": label, "value": seconds(met["after_s"]), "note": note, "level": "ok"}


def _step_tile(content: Content) -> dict[str, str]:
    tile = {"label": "Time per step", "value": "–", "note": "no step is complete", "level": ""}
    if content.totals is None:
        return tile
    tile["value"] = seconds(content.totals.wall_s / content.totals.steps)
    tile["note"] = f"mean of {content.totals.steps:,} steps"
    limit = _limit(content.figures)
    if limit is not None:
        tile["note"] += f"; the fluid limit is {seconds(limit)}"
    return tile


def _waste_tile(totals: Totals) -> dict[str, str]:
    level = _level(totals.waste, verdicts.THRESHOLDS.watch_share, verdicts.THRESHOLDS.held_up_share)
    hours = f"{totals.waited_h:.2g} h" if totals.waited_h < 10 else f"{totals.waited_h:,.0f} h"
    note = f"ranks waited {hours} for slower ranks, summed over all ranks"
    return {"label": "Waste", "value": percent(totals.waste), "note": note, "level": level}


def _slowest_tile(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    slowest = max(rows, key=lambda row: float(row["compute_s"]))
    median = float(np.median([row["compute_s"] for row in rows]))
    factor = slowest["compute_s"] / median
    return {
        "label": "Slowest worker",
        "value": f"rank {slowest['rank']}",
        "note": f"computes {factor:.2f} × as long as the median in the newest steps",
        "level": _level(factor, _SLOWISH, _SLOW_RATIO),
    }


def _level(value: float, watch: float, held_up: float) -> str:
    return "bad" if value >= held_up else "warn" if value >= watch else "ok"


def _limit(figures: Mapping[str, Any]) -> float | None:
    preset = next(reversed(figures["presets"].values()), None)
    if preset is None or not preset["time_over_fluid"] or not preset["step_time_s"]:
        return None
    return float(preset["step_time_s"] / preset["time_over_fluid"])


def charts(content: Content) -> list[Markup]:
    """Return the charts and the heat map; drawings without data are left out."""
    steps = content.steps
    if not steps["step"]:
        return []
    switched = [
        Mark(change["effective_step"], change["policy"])
        for change in content.switches
        if change["version"] and change["effective_step"] is not None
    ]
    limit = _limit(content.figures)
    level = None if limit is None else (limit, f"fluid limit {seconds(limit)}")
    courses = _Courses(steps, switched)
    drawn = [
        courses.drawn("Time per step", "s", "step_s", level=level),
        heat_map(content.cells, switched),
        svg(_workers(content, switched)),
        courses.drawn("Waste: share of the ranks' time spent waiting", "%", "waste"),
        courses.drawn("Loss", "", "loss", zero=False),
        *_evaluations(content, switched),
    ]
    return [drawing for drawing in drawn if drawing]


@dataclass(frozen=True)
class _Courses:
    """Line charts over the same steps, with the same marks for policy switches."""

    steps: Mapping[str, Any]
    switched: Sequence[Mark]

    def drawn(
        self,
        title: str,
        unit: str,
        name: str,
        *,
        level: tuple[float, str] | None = None,
        zero: bool = True,
    ) -> Markup:
        steps, factor = self.steps, 100.0 if unit == "%" else 1.0
        x, y = _floats(steps["step"]), factor * _floats(steps[name])
        if steps["bucket"] > 1:
            low, high = (factor * _floats(steps[f"{name}_{bound}"]) for bound in ("min", "max"))
            band = Band(low, high, "least to greatest")
            lines = [ChartLine(y, "main", f"mean of {steps['bucket']:,} steps")]
        else:
            window = max(_LEAST_IN_MEDIAN, len(y) // 30)
            band = Band(rolling(y, window, 0.1), rolling(y, window, 0.9), "p10–p90")
            median = ChartLine(rolling(y, window, 0.5), "main", "running median")
            lines = [ChartLine(y, "raw"), median]
        return svg(Chart(title, unit, x, lines, [band], self.switched, level, zero))


def _evaluations(content: Content, switched: Sequence[Mark]) -> list[Markup]:
    seen, target = content.quality["evaluations"], content.quality["target"]
    drawn = []
    for name in sorted({name for each in seen for name in each["metrics"]}):
        of_metric = [each for each in seen if name in each["metrics"]]
        x = _floats([each["step"] for each in of_metric])
        y = _floats([each["metrics"][name] for each in of_metric])
        wanted = target is not None and target["metric"] == name
        level = (target["value"], "target") if wanted else None
        best = [each for each in content.quality["best"] if each["metric"] == name]
        said = (
            f"{each['figure']} {count(each['value'])} after step {each['step']}" for each in best
        )
        title = f"Evaluations: {name} ({', '.join(said)})" if best else f"Evaluations: {name}"
        drawn.append(
            svg(Chart(title, "", x, [ChartLine(y, "main")], (), switched, level, zero=False))
        )
    return drawn


def _workers(content: Content, switched: Sequence[Mark]) -> Chart:
    cells = content.cells
    compute_s = _floats2(cells["compute_s"], len(cells["step"]))
    x = _floats(cells["step"])
    title = "Computing time of each rank"
    if len(compute_s) == 0 or np.isnan(compute_s).all():
        return Chart(title, "s", x, [])
    recent = compute_s[:, -max(1, compute_s.shape[1] // 5) :]
    means = np.array(
        [row[~np.isnan(row)].mean() if (~np.isnan(row)).any() else 0 for row in recent]
    )
    worst = int(means.argmax())
    others = np.delete(compute_s, worst, axis=0)
    front = ChartLine(compute_s[worst], "worst", f"rank {cells['ranks'][worst]}")
    if len(others) <= _MOST_RANK_LINES:
        grey = [
            ChartLine(row, "other", "other ranks" if not k else "") for k, row in enumerate(others)
        ]
        return Chart(title, "s", x, [*grey, front], (), switched)
    known = ~np.isnan(others).all(axis=0)
    bounds = np.full((3, others.shape[1]), np.nan)
    bounds[:, known] = np.nanquantile(others[:, known], [0.1, 0.5, 0.9], axis=0)
    band = Band(bounds[0], bounds[2], "p10–p90 of the other ranks")
    return Chart(title, "s", x, [ChartLine(bounds[1], "other"), front], [band], switched)


def changes(content: Content) -> list[dict[str, Any]]:
    """Return the run's policies, each with sentences about its forecast and measured effect."""
    made = []
    for change in content.switches:
        effect = content.effects.get(change["version"])
        words = "the policy at the start" if not change["version"] else ""
        metrics = quality.words(content.metric_changes.get(change["version"], ()))
        words = effects.words_of(effect) if effect else words
        made.append({**change, "words": f"{words} {metrics}".strip()})
    return made


def advice(content: Content) -> str:
    """Return a sentence about the policy that the newest forecast recommends; empty if none.

    A forecast that was made before the last switch is ignored, because its savings are relative to
    a policy that is no longer in force.
    """
    made = content.forecast
    best = recommended(made) if made else None
    begun = [each for each in content.switches if each["effective_step"] is not None]
    in_force = begun[-1]["version"] if begun else 0
    if made is None or best is None or made.current.version != in_force:
        return ""
    return f"At step {made.step or 0:,} the forecast said: {best.words}."


def settings(content: Content) -> list[tuple[str, str]]:
    """Return labels and values of the run's start parameters, and the policy in force."""
    run = content.run
    made = [
        (label, _text(run[name])) for name, label in _SETTINGS if run[name] not in (None, [], {})
    ]
    if content.switches:
        last = content.switches[-1]
        given = ", ".join(f"{name} = {_text(value)}" for name, value in last["parameters"].items())
        made.append(("Policy", f"{last['policy']}{f' ({given})' if given else ''}"))
    return made


def _text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} = {item}" for name, item in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def seconds(value: float | None) -> str:
    """Return a duration as text with three digits."""
    if value is None:
        return "–"
    if value < 1:
        return f"{1000 * value:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.1f} min" if value < 7200 else f"{value / 3600:,.1f} h"


def money(amount: float, currency: str) -> str:
    """Return an amount with its currency."""
    return f"{amount:,.2f} {currency}"


def percent(value: float | None) -> str:
    """Return a share in percent."""
    return "–" if value is None else f"{100 * value:.3g} %"


def count(value: float | None) -> str:
    """Return a number with at most four significant digits, or a whole number in full."""
    return "–" if value is None else f"{value:,.4g}" if value != int(value) else f"{value:,.0f}"


def moment(at: float | None) -> str:
    """Return a time in UTC, because readers may be in any time zone."""
    return "–" if at is None else f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as ranges, such as `0–3, 6`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    return ", ".join(f"{part[0]}–{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def _floats(values: Sequence[Any]) -> Floats:
    return np.array(values, dtype=np.float64)


def _floats2(rows: Sequence[Sequence[Any]], columns: int) -> Floats:
    return np.array(rows, dtype=np.float64).reshape(len(rows), columns)
