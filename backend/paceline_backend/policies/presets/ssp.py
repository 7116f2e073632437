"""`ssp`: each gradient is an update; no rank leads the slowest by more than `staleness` steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_backend.policies.base import Policy, Preset
from paceline_backend.policies.presets.relaxed import BATCHES, relaxed


def make(parameters: Mapping[str, Any]) -> Policy:
    """The policy."""
    # A gradient is never too old: the lead bounds its age.
    return relaxed(
        "ssp",
        parameters["batches"],
        "partial",
        quorum=1,
        staleness=None,
        lead=parameters["staleness"],
        mean=False,
    )


preset = Preset(
    name="ssp",
    summary="Each rank's gradient is applied as it comes; none leads the slowest by too much.",
    source="SSP: More effective distributed ML via a stale synchronous parallel parameter server",
    make=make,
    parameters={
        "staleness": {
            "type": "integer",
            "minimum": 0,
            "maximum": 64,
            "default": 3,
            "description": "Steps that a rank may be ahead of the slowest.",
        },
        "batches": BATCHES,
    },
)
