"""`ad-psgd`: each rank steps by itself, and takes the mean with one other rank after each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_backend.policies.base import Policy, Preset
from paceline_backend.policies.presets.relaxed import BATCHES, relaxed


def make(parameters: Mapping[str, Any]) -> Policy:
    """The policy."""
    return relaxed("ad-psgd", parameters["batches"], "pairwise")


preset = Preset(
    name="ad-psgd",
    summary="Each rank steps by itself; after each step two replicas become their mean.",
    source="Lian et al., Asynchronous decentralized parallel stochastic gradient descent",
    make=make,
    parameters={"batches": BATCHES},
)
