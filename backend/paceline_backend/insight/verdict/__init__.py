"""Verdict: which ranks slow a run down, why, since when, and how much time it costs.

docs/verdicts.md describes the method. `ObservedSteps` holds the ranks' reports of a range of steps,
and `read_observed` reads it from the database. `judge` returns a `Verdict` with its causes, and
`words` describes the verdict in sentences::

    verdict = judge(read_observed(connection, run, (None, None)))
    print(words(verdict), verdict.causes)

The modules `slowness` and `waits` search for candidate causes and return `TimeLoss`es. `courses`
separates lasting levels of a time series from temporary, periodic and growing slowness. `findings`
computes how long the run would have taken without the causes. The function `slow_node` returns the
node that runs all slow ranks, if there is one. `diagnosis` summarises the current state of the run
in one line.
"""

from paceline_backend.insight.verdict.diagnosis import (
    Diagnosis,
    VerdictLevel,
    diagnose,
    facts_of,
    past,
)
from paceline_backend.insight.verdict.findings import TimeLoss
from paceline_backend.insight.verdict.judge import SlowNode, Verdict, judge, slow_node, throttled
from paceline_backend.insight.verdict.observed import ObservedSteps, read_observed
from paceline_backend.insight.verdict.thresholds import THRESHOLDS
from paceline_backend.insight.verdict.words import (
    cause_of,
    cause_words,
    named,
    rank_words,
    to_do,
    words,
)

__all__ = [
    "THRESHOLDS",
    "Diagnosis",
    "ObservedSteps",
    "SlowNode",
    "TimeLoss",
    "Verdict",
    "VerdictLevel",
    "cause_of",
    "cause_words",
    "diagnose",
    "facts_of",
    "judge",
    "named",
    "past",
    "rank_words",
    "read_observed",
    "slow_node",
    "throttled",
    "to_do",
    "words",
]
