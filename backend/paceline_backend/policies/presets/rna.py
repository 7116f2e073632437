"""`rna`: a round begins when a probed rank is ready; late gradients go into later rounds.

RNA's randomised probing (Sec. 3.2), weighted accumulation of late gradients (Sec. 3.3) and bounded
staleness. Learning rates are scaled linearly by the contributors' share of the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_backend.policies.base import Policy, Preset
from paceline_backend.policies.presets.relaxed import BATCHES, STALENESS, relaxed


def make(parameters: Mapping[str, Any]) -> Policy:
    """The policy."""
    return relaxed(
        "rna",
        parameters["batches"],
        "partial",
        probes=parameters["probes"],
        staleness=parameters["staleness"],
        mean=True,
    )


preset = Preset(
    name="rna",
    summary="Partial all-reduce, called by the first of a few probed ranks; nobody waits for all.",
    source="Yang et al., Mitigating stragglers in the decentralized training on heterogeneous "
    "clusters (RNA)",
    make=make,
    parameters={
        "probes": {
            "type": "integer",
            "minimum": 1,
            "maximum": 1024,
            "default": 2,
            "description": "Ranks, drawn anew for each round, of which the first that is ready "
            "calls it.",
        },
        "staleness": STALENESS,
        "batches": BATCHES,
    },
)
