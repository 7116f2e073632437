"""What presets of relaxed synchronisers share: they go with any preset's batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.wire.synchronisation import convert
from paceline_backend.policies.base import Policy
from paceline_backend.policies.registry import make

BATCHES: Mapping[str, Any] = {
    "type": "string",
    "enum": [
        "bsp",
        "paceline",
        "chronica",
        "sata",
        "lbb",
        "static-batching",
        "dynamic-batching",
        "boa",
    ],
    "default": "bsp",
    "description": "The preset, with its defaults, that says which samples each rank gets.",
}
STALENESS: Mapping[str, Any] = {
    "type": "integer",
    "minimum": 0,
    "maximum": 64,
    "default": 4,
    "description": "Rounds after which a gradient is too old, and dropped.",
}


def relaxed(name: str, batches: str, synchroniser: str, **parameters: Any) -> Policy:
    """A preset's batches, its gradients exchanged in another way.

    Args:
        name: of the policy.
        batches: the preset's name.
        synchroniser: its name in `paceline.train.sync`.
        **parameters: that it takes.
    """
    return replace(make(batches), name=name, synchroniser=convert(synchroniser, parameters))
