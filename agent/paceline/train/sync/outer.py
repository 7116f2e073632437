"""The outer optimiser of DiLoCo: SGD with Nesterov momentum on the replicas' changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline.train.sync.gradients import joined
from paceline.wire.synchronisation import Averaging, OuterRules, Synchronisation

_PREFIX = "outer/"


class Outer:
    """Outer optimiser: the parameters after its newest step, and its momentum. Not thread-safe.

    This state outlives segments and epochs, is part of checkpoints, and is the same on all ranks.
    The state is dropped when another synchronisation takes effect. Vectors are on the CPU, in 32
    bits, one for each part of the parameters.

    The step is from Douillard et al., DiLoCo, Alg. 1. θ are the parameters after the previous outer
    step, v is the velocity, μ the momentum and η the learning rate. With the pseudo-gradient
    Δ = θ − mean of the replicas: ``v ← μ v + Δ``, ``θ ← θ − η (Δ + μ v)``.
    """

    def __init__(self) -> None:
        # The synchronisation that uses the state. None: the state was loaded from a checkpoint, or
        # no synchronisation needs it.
        self._what: Synchronisation | None = None
        self._anchors: list[torch.Tensor] = []
        self._velocities: list[torch.Tensor] = []

    def keep_for(self, what: Synchronisation) -> None:
        """Drop the state if the new synchronisation has other rules or no outer optimiser."""
        needed = isinstance(what, Averaging) and what.parameters.outer is not None
        if not needed or self._what not in (None, what):
            self._anchors, self._velocities = [], []
        self._what = what

    def begin(self, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        """Start at the current parameters of each part, unless there is a state for these parts."""
        lengths = [sum(tensor.numel() for tensor in part) for part in parts]
        if [len(anchor) for anchor in self._anchors] != lengths:
            self._anchors = [joined(part) if part else torch.empty(0) for part in parts]
            self._velocities = [torch.zeros(length) for length in lengths]

    def step(self, rules: OuterRules, part: int, mean: torch.Tensor) -> torch.Tensor:
        """Step a part of the parameters from the replicas' mean; return the part's new values."""
        anchor, velocity = self._anchors[part], self._velocities[part]
        change = anchor - mean
        velocity.mul_(rules.momentum).add_(change)
        anchor.sub_(change.add_(velocity, alpha=rules.momentum), alpha=rules.rate)
        return anchor

    def state(self) -> dict[str, Any]:
        """Return the entries for a checkpoint; empty if there is no state."""
        named = {"anchor": self._anchors, "velocity": self._velocities}
        return {
            f"{_PREFIX}{name}/{number}": vector
            for name, vectors in named.items()
            for number, vector in enumerate(vectors)
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, which may have no outer optimiser."""
        count = sum(key.startswith(f"{_PREFIX}anchor/") for key in state)
        self._what = None
        self._anchors = [state[f"{_PREFIX}anchor/{number}"] for number in range(count)]
        self._velocities = [state[f"{_PREFIX}velocity/{number}"] for number in range(count)]
