"""`n-soft`: an update as soon as one n-th of the ranks have a gradient; the others' come late.

The parameter server of the n-softsync protocol updates after M/n gradients. Here all replicas
update themselves with the sum of the gradients that have come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_backend.policies.base import Policy, Preset
from paceline_backend.policies.presets.relaxed import BATCHES, STALENESS, relaxed


def make(parameters: Mapping[str, Any]) -> Policy:
    """The policy."""
    return relaxed(
        "n-soft",
        parameters["batches"],
        "partial",
        parts=parameters["n"],
        staleness=parameters["staleness"],
        mean=False,
    )


preset = Preset(
    name="n-soft",
    summary="An update as soon as one n-th of the ranks have a gradient; the others' come late.",
    source="n-softsync: Staleness-aware async-SGD for distributed deep learning",
    make=make,
    parameters={
        "n": {
            "type": "integer",
            "minimum": 1,
            "maximum": 1024,
            "default": 2,
            "description": "An update takes the gradients of M/n ranks, rounded up.",
        },
        "staleness": STALENESS,
        "batches": BATCHES,
    },
)
