"""`local-sgd`: each rank steps by itself; every H steps replicas become their mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_backend.policies.base import Policy, Preset
from paceline_backend.policies.presets.relaxed import BATCHES, relaxed


def make(parameters: Mapping[str, Any]) -> Policy:
    """The policy."""
    return relaxed("local-sgd", parameters["batches"], "averaging", every=parameters["every"])


preset = Preset(
    name="local-sgd",
    summary="Each rank steps by itself; every few steps their replicas become the mean.",
    source="Local SGD converges fast and communicates little",
    make=make,
    parameters={
        "every": {
            "type": "integer",
            "minimum": 1,
            "maximum": 10_000,
            "default": 8,
            "description": "H: steps between two means.",
        },
        "batches": BATCHES,
    },
)
