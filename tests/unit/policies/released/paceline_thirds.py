"""A policy as a third party may have written it for the release before: old paths, old names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.cost import SUM
from paceline_backend.policies import Allocation, Feedback, Models, Policy, Preset, Problem
from paceline_backend.policies._base import Synchronisation
from paceline_backend.policies.counted import PARAMETERS, PER_RANK, equal
from paceline_backend.policies.linear import COST, LinearPredictor
from paceline_backend.policies.rna import make as rna
from paceline_backend.policies.static_batching import make as static_batching

GIVEN: list[Any] = []  # the arguments of `make`
STALENESS = {"type": "integer", "minimum": 0, "default": 4, "description": "The oldest gradient."}


@dataclass(frozen=True)
class Equal:
    """Equal counts, and a memory of how many rows are known."""

    def allocate(self, problem: Problem, models: Models, feedback: Feedback) -> Allocation:
        """See `Allocator.allocate`."""
        assert models.cost == SUM or models.known
        return Allocation(equal(problem), {"rows": len(feedback.step)})


def make(parameters: Mapping[str, Any]) -> Policy:
    """The policy."""
    GIVEN.append(parameters)
    predictor = LinearPredictor(parameters["window"], parameters["cost"])
    counted = static_batching({name: parameters[name] for name in PARAMETERS})
    return replace(counted, name="thirds", predictor=predictor, allocator=Equal())


preset = Preset(
    name="thirds",
    summary="Equal counts.",
    source="a third party",
    make=make,
    parameters={
        "alpha": {
            "type": "number",
            "exclusiveMinimum": 0,
            "maximum": 1,
            "default": 0.5,
            "description": "Of no effect.",
        },
        "level": {"type": "number", "enum": [0.1, 1], "default": 1, "description": "Of no effect."},
        "sure": {"type": "boolean", "default": False, "description": "Of no effect."},
        "weights": {**PER_RANK, "description": "Of no effect."},
        "batches": {"type": "string", "default": "mine", "description": "Of no effect."},
        "steps": {"type": "integer", "minimum": 0.5, "default": 1, "description": "No effect."},
        "letters": {
            "type": "array",
            "items": {"type": "string", "enum": ["a", "b"]},
            "default": ["a"],
            "description": "Of no effect.",
        },
        "cost": COST,
        **PARAMETERS,
    },
)


def gossip(parameters: Mapping[str, Any]) -> Policy:
    """Another policy: rna's rounds, by another name."""
    how = {"probes": 3, "staleness": parameters["staleness"], "mean": True}
    made = replace(static_batching({}), name="gossip", synchroniser=Synchronisation("partial", how))
    assert made.synchroniser == rna({**parameters, "probes": 3}).synchroniser
    return made


gossip_preset = Preset("gossip", "Rounds.", "s", gossip, {"staleness": STALENESS})
