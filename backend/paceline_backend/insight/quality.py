"""Quality of a run's model: metrics of the run as a whole, and before and after policy switches.

The metrics before and after a switch are shown without a claim that the switch caused the change,
because training continues, which changes metrics, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from paceline import policies
from paceline_backend.store import Connection, Store, attempts, records, runs, switches
from paceline_backend.store.quality import evaluations
from paceline_backend.store.quality.evaluations import Evaluated
from paceline_backend.store.switches import Switch

# A metric before a switch is the mean of at most this many evaluations, the last ones before the
# switch; the metric after a switch is the mean of the newest ones.
MOST_EVALUATIONS = 3
# Maximum number of the newest evaluations that a report lists.
_LISTED_EVALUATIONS = 1_000
_BEST = {">=": max, "<=": min}

Choosers = Mapping[str, Callable[[Iterable[float]], float]]


@dataclass(frozen=True)
class MetricChange:
    """Metric of evaluations before a switch, and under the new policy."""

    metric: str = Field(examples=["accuracy"])
    before: float | None = Field(
        description="mean of the last 3 evaluations before the switch; null: none", examples=[0.89]
    )
    before_evaluations: int = Field(
        description="number of evaluations in the mean `before`", examples=[3]
    )
    after: float | None = Field(
        description="mean of the newest 3 evaluations under the new policy; null: none",
        examples=[0.9],
    )
    after_evaluations: int = Field(
        description="number of evaluations in the mean `after`", examples=[3]
    )

    @property
    def words(self) -> str:
        """Return a clause with the metric before and after the switch."""
        before = _mean_words(self.before, self.before_evaluations)
        after = _mean_words(self.after, self.after_evaluations)
        return f"{self.metric}: {before} before, {after} since"


def words(made: Sequence[MetricChange]) -> str:
    """Return a sentence or two about metrics; empty if nothing was measured."""
    if not made:
        return ""
    said = "; ".join(change.words for change in made)
    return f"{said[0].upper()}{said[1:]}. Training continued meanwhile, which also changes metrics."


def _mean_words(mean: float | None, count: int) -> str:
    if mean is None:
        return "not measured"
    of = "1 evaluation" if count == 1 else f"mean of {count} evaluations"
    return f"{mean:.4g} ({of})"


def after_switches(connection: Connection, run: int) -> dict[int, list[MetricChange]]:
    """Return each metric of evaluations before and after switches, by policy version.

    Only switches from or to a policy that trains differently from plain DDP are included.
    """
    begun = [
        change
        for change in switches.history(connection, run)
        if change.version == 0 or change.effective_step is not None
    ]
    changing = [
        at
        for at in range(1, len(begun))
        if not _same(begun[at - 1], begun[at]) and (_changes(begun[at]) or _changes(begun[at - 1]))
    ]
    if not changing:
        return {}
    _, _, spans = records.counting(connection, run)
    seen = evaluations.read(connection, run, spans)
    if not seen:
        return {}
    made = {}
    for at in changing:
        first = begun[at].effective_step or 0
        end = begun[at + 1].effective_step if at + 1 < len(begun) else None
        old = between(seen, begun[at - 1].effective_step or 0, first)
        new = between(seen, first, end)
        made[begun[at].version] = _compared(old, new)
    return made


def _same(before: Switch, after: Switch) -> bool:
    return before.policy == after.policy and policies.same(
        after.policy, before.parameters, after.parameters
    )


def _changes(switch: Switch) -> bool:
    """Return whether a policy changes the training; true if the policy is not installed here."""
    try:
        return policies.make(switch.policy, switch.parameters).changes != "nothing"
    except ValueError:
        return True


def between(seen: Sequence[Evaluated], first: int, end: int | None) -> list[Evaluated]:
    """Return evaluations after steps in [first, end); if `first` is 0, also those before step 0."""
    least = -1 if first == 0 else first
    return [each for each in seen if least <= each.step and (end is None or each.step < end)]


def _compared(old: Sequence[Evaluated], new: Sequence[Evaluated]) -> list[MetricChange]:
    names = sorted({name for each in (*old, *new) for name in each.metrics})
    return [MetricChange(name, *_mean(old, name), *_mean(new, name)) for name in names]


def _mean(seen: Sequence[Evaluated], name: str) -> tuple[float | None, int]:
    """Return the mean of a metric's newest values, at most `MOST_EVALUATIONS`, and their number."""
    known = [value for each in seen if (value := each.metrics.get(name)) is not None]
    known = known[-MOST_EVALUATIONS:]
    return (sum(known) / len(known), len(known)) if known else (None, 0)


def choosers(metric: str, targets: Iterable[Mapping[str, Any]]) -> Choosers:
    """Return functions that select a value of a metric, by name: `best`, or `least` and `greatest`.

    The result has `best` if all targets for the metric have the same direction, or if the metric is
    the loss and has no target. Otherwise it is unknown whether less or more is better.
    """
    wanted = {target["direction"] for target in targets if target["metric"] == metric}
    if not wanted and metric == "loss":
        wanted = {"<="}
    if len(wanted) == 1:
        return {"best": _BEST[wanted.pop()]}
    return {"least": min, "greatest": max}


def best_values(
    seen: Sequence[Evaluated], target: Mapping[str, Any] | None, began: float | None
) -> list[dict[str, Any]]:
    """Return the best, or least and greatest, value of each metric, and when it was first measured.

    See `choosers`. `seen` is sorted, oldest first. `began` is the Unix time of the run's start;
    None: unknown.
    """
    shown = [evaluations.shown(each, began) for each in seen]
    rows = []
    for name in sorted({name for each in seen for name in each.metrics}):
        known = [each for each in shown if each["metrics"].get(name) is not None]
        for figure, choose in choosers(name, () if target is None else (target,)).items():
            if known:
                value = choose(each["metrics"][name] for each in known)
                first = next(each for each in known if each["metrics"][name] == value)
                moment = {key: first[key] for key in ("step", "epoch", "trained", "at", "after_s")}
                rows.append({"metric": name, "figure": figure, "value": value, **moment})
    return rows


def best_of_run(store: Store, run_id: str) -> list[dict[str, Any]]:
    """Return `best_values` for all evaluations of a run."""
    row, seen = _run_and_evaluations(store, run_id)
    return best_values(seen, row["target"], row["started_at"])


def of_run(store: Store, run_id: str) -> dict[str, Any]:
    """Return a run's times and target, the best values of its metrics, and its evaluations."""
    row, seen = _run_and_evaluations(store, run_id)
    return {
        **{name: row[name] for name in ("queued_s", "jct_s", "eta_at", "target")},
        "best": best_values(seen, row["target"], row["started_at"]),
        "evaluations": [
            evaluations.shown(each, row["started_at"]) for each in seen[-_LISTED_EVALUATIONS:]
        ],
    }


def _run_and_evaluations(store: Store, run_id: str) -> tuple[dict[str, Any], list[Evaluated]]:
    row = runs.get(store, run_id)
    with store.read() as connection:
        key = runs.key_of(connection, run_id)
        spans = attempts.spans(connection, key, row["attempt"])
        return row, list(evaluations.read(connection, key, spans))
