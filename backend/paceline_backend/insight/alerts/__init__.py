"""Alerts: rules, the values that they check, and debouncing.

`Lookout` reads the values for each active run and for the control plane, and `debounce` computes
the next state of an alert. `control.alerts` does the following every few seconds::

    conditions, runs = lookout.look(rules, now)
    holds = rule.holds(condition.value)
    timing = debounce(timing, holds, rule, now)
"""

from paceline_backend.insight.alerts.lookout import Condition, Lookout
from paceline_backend.insight.alerts.rules import (
    DEFAULTS,
    SEVERITIES,
    Rule,
    Timing,
    debounce,
    rules_with,
)

__all__ = [
    "DEFAULTS",
    "SEVERITIES",
    "Condition",
    "Lookout",
    "Rule",
    "Timing",
    "debounce",
    "rules_with",
]
