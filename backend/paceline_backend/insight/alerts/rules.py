"""Alert rules, their defaults, and debouncing.

Each rule has a counterpart of the same name in docker/prometheus/alerts.yaml: `run-held-up` is
`PacelineRunHeldUp` there. A test checks that the names and the thresholds correspond.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Severity = Literal["info", "warning", "critical"]
SEVERITIES: tuple[Severity, ...] = ("info", "warning", "critical")


@dataclass(frozen=True)
class Rule:
    """Rule that defines when an alert is raised and resolved.

    The condition is that a value is above `threshold`, or below `threshold` if `below` is true; the
    clause `words` describes the condition. `unit` is the threshold's unit: share, ratio, factor,
    seconds or count. An alert is raised when the condition has held for `raise_after_s`, and
    resolved when the condition has been gone for `resolve_after_s`. A disabled rule raises no
    alert, and its active alerts are resolved. `changed_at` is the Unix time of the last change by
    an admin; None: no admin has changed the rule.
    """

    name: str
    words: str
    unit: str
    threshold: float
    raise_after_s: float
    resolve_after_s: float
    severity: Severity
    below: bool = False
    enabled: bool = True
    changed_at: float | None = None
    changed_by: str | None = None

    @property
    def revision(self) -> int:
        """Return a hash of the values that an admin may change."""
        values = (
            self.enabled,
            *(float(self.threshold), float(self.raise_after_s), float(self.resolve_after_s)),
            self.severity,
        )
        return zlib.crc32(repr(values).encode())

    def holds(self, value: float) -> bool:
        """Return whether the rule's condition holds for a value."""
        return value < self.threshold if self.below else value > self.threshold


_RULES = (
    Rule(
        "run-held-up",
        "the share of the wall time that is lost to causes in a verdict is above the threshold",
        *("share", 0.1, 600.0, 300.0, "warning"),
    ),
    Rule(
        "run-waste",
        "the share of their time that ranks wait for slower ranks is above the threshold",
        *("share", 0.2, 600.0, 300.0, "warning"),
    ),
    Rule(
        "run-straggler-effect",
        "the mean straggler effect (SE) of a step is above the threshold",
        *("ratio", 0.3, 600.0, 300.0, "warning"),
    ),
    Rule(
        "rank-slow",
        "a verdict names ranks whose slowdown factor is above the threshold",
        *("factor", 1.5, 600.0, 300.0, "warning"),
    ),
    Rule(
        "run-stands",
        "no step has been completed for longer than the threshold",
        *("seconds", 900.0, 0.0, 0.0, "warning"),
    ),
    Rule(
        "run-hangs",
        "ranks have waited longer than the threshold for ranks that make no progress",
        *("seconds", 30.0, 15.0, 0.0, "critical"),
    ),
    Rule(
        "run-coasts",
        "the share of the newest segments that the leader planned itself is above the threshold",
        *("share", 0.5, 120.0, 120.0, "warning"),
    ),
    Rule(
        "coverage-inexact",
        "the number of epochs with samples that were used twice or skipped is above the threshold",
        *("count", 0.0, 300.0, 300.0, "critical"),
    ),
    Rule(
        "records-lost",
        "a full spool lost records in the last minute, and the run has lost more than the "
        "threshold",
        *("count", 0.0, 0.0, 900.0, "warning"),
    ),
    Rule(
        "disk-low",
        "the free share of the file system with the database is below the threshold",
        *("share", 0.1, 60.0, 300.0, "critical", True),
    ),
)
DEFAULTS: Mapping[str, Rule] = {rule.name: rule for rule in _RULES}


def rules_with(changed: Mapping[str, Mapping[str, Any]]) -> dict[str, Rule]:
    """Return the rules in force; `changed` holds the fields that an admin changed, by rule name."""
    return {name: replace(rule, **changed.get(name, {})) for name, rule in DEFAULTS.items()}


@dataclass(frozen=True)
class Timing:
    """State of an alert, as Unix times; None: the event has not happened yet.

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
    """Return the state of an alert after a check at `now`; None: neither pending nor active.

    `timing` is the previous state, which must not be resolved; None: no check has found the
    condition yet. `holds` is true if this check finds the condition.
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
