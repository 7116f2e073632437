"""`backup-workers`: each update waits for all ranks but the slowest few and drops their work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_backend.policies.base import Policy, Preset
from paceline_backend.policies.presets.relaxed import BATCHES, relaxed


def make(parameters: Mapping[str, Any]) -> Policy:
    """The policy."""
    return relaxed(
        "backup-workers",
        parameters["batches"],
        "partial",
        spare=parameters["spare"],
        staleness=0,
        waits=True,
        mean=False,
    )


preset = Preset(
    name="backup-workers",
    summary="Each update waits for all ranks but the slowest few, whose gradients are dropped.",
    source="Revisiting distributed synchronous SGD (backup workers)",
    make=make,
    parameters={
        "spare": {
            "type": "integer",
            "minimum": 1,
            "maximum": 1023,
            "default": 1,
            "description": "b: ranks that an update does not wait for; at most all but one.",
        },
        "batches": BATCHES,
    },
)
