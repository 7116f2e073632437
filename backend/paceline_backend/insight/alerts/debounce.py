"""Debouncing of alerts: the next state after each check. Pure functions of times."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline_backend.insight.alerts.rules import Rule


@dataclass(frozen=True)
class Timing:
    """State of an alert; Unix times, None: not yet.

    Args:
        since: first check that found the condition.
        raised_at: time at which the condition had held for long enough.
        gone_at: first check that no longer found the condition.
        resolved_at: time at which the condition had been gone for long enough; the final state.
    """

    since: float
    raised_at: float | None = None
    gone_at: float | None = None
    resolved_at: float | None = None


def debounce(timing: Timing | None, holds: bool, rule: Rule, now: float) -> Timing | None:
    """Return the state of an alert after a check at `now`; None if there is nothing to remember.

    `timing` is the previous state, not resolved; None: no check has found the condition. `holds`
    says whether this check finds it.
    """
    if timing is None and not holds:
        return None
    timing = timing or Timing(now)
    if timing.raised_at is None:
        if not holds:
            return None
        return (
            replace(timing, raised_at=now) if now - timing.since >= rule.raise_after_s else timing
        )
    if holds:
        return replace(timing, gone_at=None)
    gone_at = now if timing.gone_at is None else timing.gone_at
    resolved_at = now if now - gone_at >= rule.resolve_after_s else None
    return replace(timing, gone_at=gone_at, resolved_at=resolved_at)
