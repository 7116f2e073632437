"""`osa`: one-shot averaging. Ranks train alone; replicas are averaged at an epoch's end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline_backend.policies.base import Policy, Preset
from paceline_backend.policies.presets.relaxed import BATCHES, relaxed


def make(parameters: Mapping[str, Any]) -> Policy:
    """The policy."""
    return relaxed("osa", parameters["batches"], "averaging", every=None)


preset = Preset(
    name="osa",
    summary="Each rank trains by itself; replicas become their mean at the end of an epoch.",
    source="Zinkevich et al., Parallelized stochastic gradient descent",
    make=make,
    parameters={"batches": BATCHES},
)
