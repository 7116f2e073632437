"""Debouncing: what a look changes about an alert. Pure functions of times."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline_backend.insight.alerts.rules import Rule


@dataclass(frozen=True)
class Timing:
    """Where an alert stands; Unix times, None: not yet.

    Args:
        since: the first look that saw the condition.
        raised_at: when the condition had held for long enough.
        gone_at: the first look that did not see the condition any more.
        resolved_at: when the condition had been gone for long enough. Nothing follows.
    """

    since: float
    raised_at: float | None = None
    gone_at: float | None = None
    resolved_at: float | None = None


def debounce(timing: Timing | None, holds: bool, rule: Rule, now: float) -> Timing | None:
    """Where an alert stands after a look; None: there is nothing to remember.

    Args:
        timing: where it stood before; None: no look has seen its condition. It is not resolved.
        holds: whether this look sees the condition.
        rule: says for how long a condition has to hold, and to be gone.
        now: the look's time.
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
