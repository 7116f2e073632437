"""`flexrr`: bounded staleness, and a rank that is ahead takes over part of a slow one's batch.

FlexRR joins a flexible consistency model with quick reassignment of work between workers, without a
plan. In the paper a worker gives away small parts of the rest of its iteration. A training loop's
body takes a whole batch in each step. Here samples therefore move before a batch is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_backend.policies.base import Policy, Preset
from paceline_backend.policies.presets.relaxed import BATCHES, relaxed


def make(parameters: Mapping[str, Any]) -> Policy:
    """The policy."""
    return relaxed(
        "flexrr",
        parameters["batches"],
        "partial",
        quorum=1,
        staleness=None,
        lead=parameters["staleness"],
        mean=False,
        steals=True,
    )


preset = Preset(
    name="flexrr",
    summary="As ssp; a rank that is ahead takes over part of the slowest one's next batch.",
    source="FlexRR: Addressing the straggler problem for iterative convergent parallel ML",
    make=make,
    parameters={
        "staleness": {
            "type": "integer",
            "minimum": 1,
            "maximum": 64,
            "default": 2,
            "description": "Steps that a rank may be ahead of the slowest.",
        },
        "batches": BATCHES,
    },
)
