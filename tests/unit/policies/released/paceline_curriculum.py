"""`curriculum`: short samples before long ones, each step dealt out by the ranks' measured speed.

An example of a policy from outside. docs/writing-a-policy.md goes through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline_backend.policies import Batches, KeepPlacement, Models, Policy, Preset, Problem
from paceline_backend.policies.linear import LinearPredictor

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Curriculum:
    """Composes an epoch by size, and deals each step out longest first.

    Args:
        disorder: 0: strictly by size; 1: the place in the epoch depends on size and chance alike.
    """

    disorder: float

    def compose(self, problem: Problem, models: Models) -> Ints:
        """What remains, shorter samples first."""
        sizes = problem.sizes[problem.remaining]
        place = np.argsort(np.argsort(sizes, kind="stable")) / max(len(sizes), 1)
        chance = problem.rng().random(len(sizes))
        return problem.remaining[np.argsort(place + self.disorder * chance, kind="stable")]

    def schedule(self, problem: Problem, models: Models) -> Batches:
        """Each sample, longest first, to the rank that would be done with it first."""
        parts, start = [], 0
        for count in problem.batch_sizes():
            parts.append(_deal(problem.order[start : start + count], problem, models))
            start += count
        return Batches.of(parts, problem.world)


def _deal(batch: Ints, problem: Problem, models: Models) -> list[Ints]:
    sizes = problem.sizes
    ready = models.b.copy()
    given: list[list[int]] = [[] for _ in range(models.world)]
    for sample in batch[np.argsort(-sizes[batch], kind="stable")]:
        done = ready + models.a * sizes[sample] + models.c
        if problem.limits is not None:  # a rank whose memory is full is never done
            done[problem.limits <= [len(part) for part in given]] = np.inf
        rank = int(np.argmin(done))
        given[rank].append(int(sample))
        ready[rank] = done[rank]
    return [np.array(part, np.int64) for part in given]


def make(parameters: Mapping[str, Any]) -> Policy:
    """The policy."""
    return Policy(
        name="curriculum",
        predictor=LinearPredictor(),
        scheduler=Curriculum(parameters["disorder"]),
        shuffler=KeepPlacement(),
    )


preset = Preset(
    name="curriculum",
    summary="Short samples first, each step dealt out by the ranks' measured speed.",
    source="an example",
    make=make,
    parameters={
        "disorder": {
            "type": "number",
            "minimum": 0.0,
            "maximum": 1.0,
            "default": 0.1,
            "description": "How much chance has a say in the order: 0 none, 1 as much as size.",
        },
    },
)
