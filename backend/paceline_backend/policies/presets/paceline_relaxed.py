"""`paceline-relaxed`: `paceline`'s batches, and pairwise means while ranks still wait.

Batches of the scheduler take all ranks equally long, as far as speeds last and samples' sizes tell.
What is left are ranks that are slow in turn and, where ranks share batches, one whose least batch
is still too much for it. Then each rank steps by itself, and after each step two replicas become
their mean (AD-PSGD, Lian et al. 2018). That loses no gradient, and no rank waits for another's
computing.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.wire.synchronisation import Pairwise
from paceline_backend.policies.base import BatchesOf, Policy, Preset
from paceline_backend.policies.presets.adaptive import Adaptive, ChoiceParameters
from paceline_backend.policies.registry import make as policy_of


class PacelineRelaxedParameters(ChoiceParameters, frozen=True, kw_only=True):
    """What `paceline-relaxed` takes."""

    batches: BatchesOf = "paceline"


def make(parameters: PacelineRelaxedParameters) -> Policy:
    """The policy."""
    chooser = Adaptive(
        Pairwise(),
        saving=parameters.saving,
        back=parameters.back,
        steps=parameters.steps,
        hold=parameters.hold,
    )
    batches = policy_of(parameters.batches)
    return replace(batches, name="paceline-relaxed", synchroniser=chooser)


preset = Preset(
    name="paceline-relaxed",
    summary="Batches that fit speeds and sizes; while ranks still wait for each other, each steps "
    "by itself and two replicas at a time become their mean.",
    source="Paceline; the pairwise means are AD-PSGD's",
    make=make,
    parameters=PacelineRelaxedParameters,
)
