"""When something is an alert: rules, what they look at, and debouncing.

`rules` has the rules and their defaults. `Lookout` reads what the rules look at, for each run that
trains and for the control plane. `debounce` says what a look changes: an alert is raised after its
condition held for a while, and resolved after the condition was gone for a while. It takes times as
arguments, so it knows no clock. `control.alerts` calls them every few seconds::

    look = lookout.look(rules)                  # what holds now
    timing = debounce(timing, look.holds, rule, now)
"""

from paceline_backend.insight.alerts.debounce import Timing, debounce
from paceline_backend.insight.alerts.lookout import Condition, Lookout
from paceline_backend.insight.alerts.rules import DEFAULTS, SEVERITIES, Rule, rules_with

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
