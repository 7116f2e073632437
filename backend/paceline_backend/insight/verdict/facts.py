"""Conversion of a verdict to plain values, which REST returns and the database keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline_backend.insight.verdict.findings import TimeLoss
from paceline_backend.insight.verdict.judge import Verdict
from paceline_backend.insight.verdict.standing import standing_of
from paceline_backend.insight.verdict.words import began, cause_words, named, to_do, what, words


def facts_of(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as plain values, with step numbers instead of indices."""
    step = verdict.seen.step
    now = standing_of(verdict)
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
    """Return the sorted nodes of some ranks; empty if unknown."""
    return sorted({nodes[rank] for rank in ranks if rank < len(nodes)})
