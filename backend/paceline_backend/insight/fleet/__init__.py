"""Verdict over all runs: the costliest runs, what they wait for, and the slow nodes.

`judged` returns a run's verdict in the form in which it is stored. `overview` combines the stored
verdicts of all active runs. `record` returns which node slowed runs down on which day, and the cost
of waiting. `control.fleet` calls `judged`, and `api.fleet` calls the others.
"""

from paceline_backend.insight.fleet.judging import judged
from paceline_backend.insight.fleet.overview import overview
from paceline_backend.insight.fleet.record import record

__all__ = ["judged", "overview", "record"]
