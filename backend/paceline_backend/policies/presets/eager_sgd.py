"""`eager-sgd`: partial all-reduce called by the first rank ready, or by one drawn at random.

Each step has one round. Early ranks wait for it, late ranks do not: a late gradient goes into the
next round. Stale gradients are summed without weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_backend.policies.base import Policy, Preset
from paceline_backend.policies.presets.relaxed import BATCHES, STALENESS, relaxed


def make(parameters: Mapping[str, Any]) -> Policy:
    """The policy."""
    return relaxed(
        "eager-sgd",
        parameters["batches"],
        "partial",
        probes=1 if parameters["mode"] == "majority" else None,
        staleness=parameters["staleness"],
        mean=False,
        waits=True,
        paced=True,
    )


preset = Preset(
    name="eager-sgd",
    summary="Partial all-reduce as soon as the first rank is ready, or one drawn at random.",
    source="Eager-SGD: Taming unbalanced training workloads in deep learning with partial "
    "collective operations",
    make=make,
    parameters={
        "mode": {
            "type": "string",
            "enum": ["solo", "majority"],
            "default": "majority",
            "description": "solo: the first rank ready calls a round; majority: one drawn at "
            "random, so that half of them are ready in the mean.",
        },
        "staleness": STALENESS,
        "batches": BATCHES,
    },
)
