"""`curriculum`: short samples before long ones; each step is divided by the ranks' measured speed.

This is an example of a policy in a package of its own. docs/writing-a-policy.md explains it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from paceline.policies import (
    Assignment,
    KeepPlacement,
    Models,
    Parameters,
    Policy,
    Preset,
    Problem,
)
from paceline.policies.predict.linear import LinearPredictor

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Curriculum:
    """Orders an epoch by size, and divides each step, longest sample first.

    Args:
        disorder: weight of chance in the order. 0: strictly by size. 1: as much chance as size.
    """

    disorder: float

    def compose(self, problem: Problem, models: Models) -> Ints:
        """The remaining samples, shorter ones first."""
        sizes = problem.sizes[problem.remaining]
        place = np.argsort(np.argsort(sizes, kind="stable")) / max(len(sizes), 1)
        chance = problem.rng().random(len(sizes))
        return problem.remaining[np.argsort(place + self.disorder * chance, kind="stable")]

    def schedule(self, problem: Problem, models: Models) -> Assignment:
        """Gives each sample, longest first, to the rank that would finish it first."""
        parts, start = [], 0
        for count in problem.batch_sizes():
            parts.append(_deal(problem.order[start : start + count], problem, models))
            start += count
        return Assignment.of(parts, problem.world)


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


class CurriculumParameters(Parameters, frozen=True, kw_only=True):
    """Parameters that operators may set."""

    disorder: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="How much chance has a say in the order: 0 none, 1 as much as size.",
        ),
    ] = 0.1


def make(parameters: CurriculumParameters) -> Policy:
    """The policy."""
    return Policy(
        name="curriculum",
        predictor=LinearPredictor(),
        scheduler=Curriculum(parameters.disorder),
        shuffler=KeepPlacement(),
    )


preset = Preset(
    name="curriculum",
    summary="Short samples first, each step dealt out by the ranks' measured speed.",
    source="an example",
    make=make,
    parameters=CurriculumParameters,
    combines=True,
)
