"""Who holds a run up, why, since when, and what it costs."""

from paceline_backend.insight.verdict.findings import Finding
from paceline_backend.insight.verdict.judge import FEW, KINDS, Verdict, judge
from paceline_backend.insight.verdict.observed import Observed

__all__ = ["FEW", "KINDS", "Finding", "Observed", "Verdict", "judge"]
