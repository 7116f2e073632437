"""Report of a verdict: the current state of the run in one line, and all values for REST.

A verdict covers hundreds of steps, and a rank may be slow only in the newest of them. A diagnosis
(OK, warning or slowed down, with the present loss of time) therefore uses only the steps since the
newest active cause started, under the policy in force. `facts_of` converts a verdict and its
diagnosis to plain values, which REST returns and the database stores.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from paceline_backend.insight.verdict.findings import Account, TimeLoss
from paceline_backend.insight.verdict.judge import Verdict
from paceline_backend.insight.verdict.observed import Times
from paceline_backend.insight.verdict.thresholds import THRESHOLDS
from paceline_backend.insight.verdict.words import began, cause_words, named, to_do, what, words

_PAST = {
    "computes": "computed",
    "compute": "computed",
    "waits": "waited",
    "wait": "waited",
    "is": "was",
    "are": "were",
    "takes": "took",
    "delay": "delayed",
    "passes": "passed",
    "cost": "cost",
    "has": "had",
    "go": "went",
}


class VerdictLevel(StrEnum):
    """Severity of a diagnosis."""

    # The range has too few steps for a diagnosis.
    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    WATCH = "watch"
    HELD_UP = "held-up"


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of the newest steps.

    Args:
        level: severity.
        what: who is slow, why and since when, as a clause; empty: nothing to report.
        was: the same clause in the past tense, for a run that has ended.
        lost: share of the wall time that active causes cost.
        waste: share of the ranks' time that they spend waiting for slower ranks.
        step_s: mean wall time of a step.
        limit_s: mean step time if the work could be divided so finely that all ranks finish at the
            same time; None: unknown.
    """

    level: VerdictLevel
    what: str = ""
    was: str = ""
    lost: float = 0.0
    waste: float = 0.0
    step_s: float | None = None
    limit_s: float | None = None


def diagnose(verdict: Verdict) -> Diagnosis:
    """Return the diagnosis of the newest steps of a verdict's range."""
    seen = verdict.seen
    if verdict.steps < THRESHOLDS.fewest_steps:
        return Diagnosis(VerdictLevel.UNKNOWN)
    times = Times.of(seen, seen.took_part)
    costing = [at for at, cause in enumerate(verdict.causes) if _goes_on(cause)]
    costing = [at for at in costing if not verdict.causes[at].hidden]
    going = [verdict.causes[at] for at in costing]
    newest = _newest(verdict, going)
    without = Account(times, verdict.causes, verdict.part).without(costing)
    wall_s = float(times.steps_s[newest].sum())
    lost = max(1 - float(without.steps_s[newest].sum()) / wall_s, 0.0) if wall_s else 0.0
    waste = float(times.waits_s(seen.took_part)[newest].sum()) / wall_s if wall_s else 0.0
    level = _level(waste, lost, bool(going))
    said = (
        what(verdict, going[0])
        if going and level != VerdictLevel.HEALTHY
        else _said(verdict, level, waste)
    )
    shown = slice(max(len(seen.step) - THRESHOLDS.shown_steps, seen.policies[-1].start), None)
    step_s = float(times.steps_s[shown].mean())
    return Diagnosis(level, said, past(said), lost, waste, step_s, _limit_s(verdict, times, shown))


def past(text: str) -> str:
    """Return a sentence with its verbs in the past tense, for a run that has ended.

    Names of nodes stay unchanged: ``compute-3``, ``node.is.here``, and the word after "on".
    """
    verbs = "|".join(_PAST)
    whole = rf"(?<![\w.-])(?<!\bon )({verbs})(?![\w-]|\.\w)"
    return re.sub(whole, lambda verb: _PAST[verb[0]], text)


def _goes_on(cause: TimeLoss) -> bool:
    return cause.until is None or cause.times >= THRESHOLDS.recurring


def _newest(verdict: Verdict, going: list[TimeLoss]) -> slice:
    """Return the steps since the newest active cause started, at least `policy_steps` of them.

    If an active cause recurs, all steps are returned; without an active cause, the newest
    `shown_steps` are. Steps before the policy in force took effect, and steps before plans
    compensated for a cause (`hidden_since`), are always left out.
    """
    count, first = len(verdict.seen.step), verdict.seen.policies[-1].start
    first = max(first, *(cause.hidden_since or 0 for cause in verdict.causes), 0)
    if any(cause.times > 1 for cause in going):
        return slice(first, count)
    began = max((cause.since or 0 for cause in going), default=count - THRESHOLDS.shown_steps)
    return slice(max(first, min(began, count - THRESHOLDS.policy_steps)), count)


def _level(waste: float, lost: float, known: bool) -> VerdictLevel:
    worst = max(waste, lost)
    if worst >= THRESHOLDS.held_up_share and known:
        return VerdictLevel.HELD_UP
    return VerdictLevel.WATCH if worst >= THRESHOLDS.watch_share else VerdictLevel.HEALTHY


def _said(verdict: Verdict, level: VerdictLevel, waste: float) -> str:
    causes = verdict.causes
    if causes and (level != VerdictLevel.WATCH or any(map(_goes_on, causes))):
        return what(verdict, causes[0])
    if level == VerdictLevel.WATCH or waste > THRESHOLDS.waiting_share:
        return "ranks wait for each other in turn, for no rank more than for the others"
    return "no rank holds the others up"


def _limit_s(verdict: Verdict, times: Times, shown: slice) -> float | None:
    """Return the mean step time if all ranks finished computing at the same time; None: unknown."""
    seen, took_part = verdict.seen, verdict.seen.took_part[shown]
    load = np.where(took_part, seen.load[shown], 0.0).sum(axis=0)
    compute_s = times.compute_s[shown].sum(axis=0)
    working = (load > 0) & (compute_s > 0)
    if not working.any() or times.apart[shown].any():
        return None
    speed = float((load[working] / compute_s[working]).sum())
    return float(load.sum()) / speed / len(took_part) + float(times.reduce_s[shown].mean())


def facts_of(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as plain values, with step numbers instead of indices."""
    step = verdict.seen.step
    now = diagnose(verdict)
    return {
        "from": int(step[0]) if len(step) else None,
        "to": int(step[-1]) if len(step) else None,
        "steps": verdict.steps,
        "wall_s": verdict.wall_s,
        "waste": verdict.waste,
        "noise": verdict.noise,
        "cost_s": verdict.cost_s,
        "causes": [_cause(verdict, cause) for cause in verdict.causes],
        "words": words(verdict),
        "level": now.level.value,
        "what": now.what,
        "was": now.was,
        "lost_now": now.lost,
        "waste_now": now.waste,
        "step_time_s": now.step_s,
        "limit_s": now.limit_s,
    }


def _cause(verdict: Verdict, cause: TimeLoss) -> dict[str, Any]:
    step, nodes = verdict.seen.step, verdict.seen.nodes
    world = verdict.seen.compute_s.shape[1]

    def at(index: int | None) -> int | None:
        return None if index is None else int(step[index])

    return {
        "kind": cause.kind,
        "ranks": list(cause.ranks),
        "who": named(cause.ranks, world, nodes) if cause.ranks else "",
        "nodes": nodes_of(cause.ranks, nodes),
        "since": began(verdict, cause),
        "until": at(cause.until),
        "factor": cause.factor,
        "trend": cause.trend,
        "period": cause.period,
        "times": cause.times,
        "hidden": cause.hidden,
        "cost_s": cause.cost_s,
        "share": cause.cost_s / verdict.wall_s,
        "worker_hours": cause.cost_s * world / 3600,
        "words": cause_words(verdict, cause),
        "what": what(verdict, cause),
        "to_do": to_do(verdict, cause),
    }


def nodes_of(ranks: Sequence[int], nodes: Sequence[str]) -> list[str]:
    """Return the sorted names of the nodes that run these ranks; empty if they are unknown."""
    return sorted({nodes[rank] for rank in ranks if rank < len(nodes)})
