"""Who holds a run up, why, since when, and what it costs: docs/verdicts.md.

`ObservedSteps` holds what the ranks reported of a range of steps, `read_observed` reads it from
the database. `judge` returns a `Verdict` with its causes, and `words` says it in sentences. The
API's routes `/runs/{id}/verdict` and `/runs/{id}/attribution`, the watch over slow nodes, forecasts
and the benchmark call these::

    verdict = judge(read_observed(connection, run, (None, None)))
    print(words(verdict), verdict.causes)

`slowness`, `waits` and `data` look for what may have cost time, and give `TimeLoss`es. `courses`
tells lasting levels from what passed, comes back or grows. `findings` computes what a run would
have taken without them. `slow_node` names the node on which all slow ranks sit, if there is one.
`standing` says how the run stands now, in a line.
"""

from paceline_backend.insight.verdict.facts import facts_of
from paceline_backend.insight.verdict.findings import TimeLoss
from paceline_backend.insight.verdict.judge import FEW, Verdict, judge
from paceline_backend.insight.verdict.load import read_observed
from paceline_backend.insight.verdict.nodes import FEWEST_STEPS, SlowNode, slow_node, throttled
from paceline_backend.insight.verdict.observed import ObservedSteps
from paceline_backend.insight.verdict.standing import Diagnosis, VerdictLevel, past, standing_of
from paceline_backend.insight.verdict.words import (
    cause_of,
    cause_words,
    named,
    rank_words,
    to_do,
    words,
)

__all__ = [
    "FEW",
    "FEWEST_STEPS",
    "Diagnosis",
    "ObservedSteps",
    "SlowNode",
    "TimeLoss",
    "Verdict",
    "VerdictLevel",
    "cause_of",
    "cause_words",
    "facts_of",
    "judge",
    "named",
    "past",
    "rank_words",
    "read_observed",
    "slow_node",
    "standing_of",
    "throttled",
    "to_do",
    "words",
]
