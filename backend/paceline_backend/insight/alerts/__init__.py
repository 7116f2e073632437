"""Alerts: rules, the values that they check, and debouncing.

`Lookout` reads the values for each active run and for the control plane. `debounce` computes the
next state of an alert: raised after its condition has held for a while, and resolved after the
condition has been gone for a while. `control.alerts` does the following every few seconds::

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
