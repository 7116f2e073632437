"""Presets that only name a synchronisation; another preset chooses each rank's samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from paceline.policies.base import Choice, Chooser, Feedback, Policy, Preset
from paceline.policies.parameters import BatchesOf, Parameters
from paceline.policies.registry import make as policy_of
from paceline.wire.synchronisation import (
    Averaging,
    AveragingRules,
    OuterRules,
    Pairwise,
    Partial,
    PartialRules,
    Synchronisation,
)

Staleness = Annotated[
    int,
    Meta(
        ge=0,
        le=64,
        description="Number of reduction rounds after which a gradient is too old and is dropped.",
    ),
]


class RelaxedParameters(Parameters, frozen=True, kw_only=True):
    """Parameters of every relaxed preset; ``kw_only`` puts them after a preset's own parameters."""

    batches: BatchesOf = "bsp"


# Under a relaxed preset, ranks still wait for each other at an epoch's end, or when replicas are
# averaged. Batches that fit the ranks' speeds shorten these waits.
ON_PACELINE = ({"batches": "paceline"},)

R = TypeVar("R", bound=RelaxedParameters)


def _preset(
    name: str,
    summary: str,
    source: str,
    synchroniser: Callable[[R], Synchronisation | Chooser],
    parameters: type[R],
) -> Preset[R]:
    def make(values: R) -> Policy:
        return replace(policy_of(values.batches), name=name, synchroniser=synchroniser(values))

    return Preset(name, summary, source, make, parameters, variants=ON_PACELINE)


ad_psgd = _preset(
    "ad-psgd",
    "Ranks step independently; after each step, two replicas are averaged.",
    "Lian et al., Asynchronous decentralized parallel stochastic gradient descent",
    lambda values: Pairwise(),
    RelaxedParameters,
)


class BackupWorkersParameters(RelaxedParameters, frozen=True):
    """Parameters of `backup-workers`."""

    spare: Annotated[
        int,
        Meta(
            ge=1,
            le=1023,
            description="Number of slowest ranks that an update does not wait for (b in the"
            " paper). It must be less than the number of ranks.",
        ),
    ] = 1


backup_workers = _preset(
    "backup-workers",
    "Each update waits for all ranks but the slowest few, whose gradients are dropped.",
    "Revisiting distributed synchronous SGD (backup workers)",
    lambda values: Partial(PartialRules(spare=values.spare, staleness=0, waits=True, mean=False)),
    BackupWorkersParameters,
)


class DilocoParameters(RelaxedParameters, frozen=True):
    """Parameters of `diloco`."""

    every: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000,
            description="Number of training steps between two steps of the outer optimiser (H in"
            " the paper).",
        ),
    ] = 32
    rate: Annotated[
        float,
        Meta(gt=0, le=10, description="Learning rate of the outer optimiser (η in the paper)."),
    ] = 0.7
    momentum: Annotated[
        float,
        Meta(ge=0, lt=1, description="Nesterov momentum of the outer optimiser (μ in the paper)."),
    ] = 0.9
    parts: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Number of parts into which the model's parameters are divided (P in the"
            " paper). The parts take outer steps in turn, so that less is sent at a time. Values"
            " above `every` count as `every`.",
        ),
    ] = 1
    overlap: Annotated[
        int,
        Meta(
            ge=0,
            le=10_000,
            description="Number of steps that ranks make while a part of the parameters is"
            " exchanged (τ in the paper). Values above `every` / `parts` count as this quotient."
            " 0: ranks wait for each exchange.",
        ),
    ] = 0
    mix: Annotated[
        float,
        Meta(
            ge=0,
            lt=1,
            description="Weight of a rank's own parameters when it mixes them with the exchanged"
            " ones (α in the paper). If `overlap` is 0, a rank uses the exchanged ones alone.",
        ),
    ] = 0.5


def _streaming(values: DilocoParameters) -> Synchronisation:
    parts = min(values.parts, values.every)
    overlap = min(values.overlap, values.every // parts)
    return Averaging(
        AveragingRules(
            every=values.every,
            outer=OuterRules(rate=values.rate, momentum=values.momentum),
            parts=parts,
            overlap=overlap,
            keep=values.mix if overlap else 0.0,
        )
    )


# The default outer learning rate and momentum are the paper's. The default H (`every`) is smaller
# than the paper's 500, because 500 suits only runs that are far longer than most.
diloco = _preset(
    "diloco",
    "Ranks step independently; every few steps, an outer optimiser with momentum applies the mean "
    "of the ranks' changes.",
    "Douillard et al., DiLoCo: Distributed low-communication training of language models; "
    "parts, overlap and mix: Streaming DiLoCo",
    _streaming,
    DilocoParameters,
)


class EagerSgdParameters(RelaxedParameters, frozen=True):
    """Parameters of `eager-sgd`."""

    mode: Annotated[
        Literal["solo", "majority"],
        Meta(
            description="Rank that starts a partial all-reduce. solo: the first rank that is ready."
            " majority: a rank drawn at random, so that half of the ranks are ready on average."
        ),
    ] = "majority"
    staleness: Staleness = 4


# Each step has one reduction round. Early ranks wait for the round, late ranks do not: a late
# gradient goes into the next round. Stale gradients are summed without weights.
eager_sgd = _preset(
    "eager-sgd",
    "Partial all-reduce as soon as the first rank, or a rank drawn at random, is ready.",
    "Eager-SGD: Taming unbalanced training workloads in deep learning with partial "
    "collective operations",
    lambda values: Partial(
        PartialRules(
            probes=1 if values.mode == "majority" else None,
            staleness=values.staleness,
            mean=False,
            waits=True,
            paced=True,
        )
    ),
    EagerSgdParameters,
)


class FlexrrParameters(RelaxedParameters, frozen=True):
    """Parameters of `flexrr`."""

    staleness: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="Maximum number of steps that a rank may be ahead of the slowest rank. Not"
            " used if the script lets fast ranks take over batches of slow ranks.",
        ),
    ] = 2


@dataclass(frozen=True)
class Flexrr:
    """A chooser of the synchronisation that applies gradients on arrival and bounds ranks' leads.

    If ranks may take over batches of each other (`uneven`), they end each segment together, which
    bounds their leads. A slow rank gives batches away, so it makes fewer steps than the other
    ranks, and a bound on the lead would make the other ranks wait. If ranks may not take over
    batches, a rank is at most `staleness` steps ahead of the slowest rank.
    """

    staleness: int
    uneven: bool = True

    def on_steps(self, first: int, *, uneven: bool) -> Flexrr:
        """See `StepsChooser.on_steps`."""
        return replace(self, uneven=uneven)

    def choose(self, feedback: Feedback, world: int, memory: Mapping[str, Any]) -> Choice:
        """See `Chooser.choose`."""
        lead = None if self.uneven else self.staleness
        return Choice(Partial(PartialRules(quorum=1, staleness=None, lead=lead, mean=False)))


# In the paper, a worker gives away small parts of the rest of its iteration. The body of a training
# loop processes a whole batch in each step, so here ranks take over whole batches
# (`paceline.core.pool`).
flexrr = _preset(
    "flexrr",
    "Each gradient is applied as soon as it arrives; fast ranks take over batches of slow ranks.",
    "FlexRR: Addressing the straggler problem for iterative convergent parallel ML",
    lambda values: Flexrr(values.staleness),
    FlexrrParameters,
)


class LocalSgdParameters(RelaxedParameters, frozen=True):
    """Parameters of `local-sgd`."""

    every: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000,
            description="Number of steps between two averages of the replicas (H in the paper).",
        ),
    ] = 8


local_sgd = _preset(
    "local-sgd",
    "Ranks step independently; every few steps, all replicas are averaged.",
    "Local SGD converges fast and communicates little",
    lambda values: Averaging(AveragingRules(every=values.every)),
    LocalSgdParameters,
)


class NSoftParameters(RelaxedParameters, frozen=True):
    """Parameters of `n-soft`."""

    n: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Of M ranks, M/n ranks (rounded up) must have a gradient before an update"
            " happens.",
        ),
    ] = 2
    staleness: Staleness = 4


# The parameter server of the n-softsync protocol updates its parameters after M/n gradients. Here
# all replicas update themselves with the sum of the gradients that have arrived.
n_soft = _preset(
    "n-soft",
    "Updates as soon as one n-th of the ranks have a gradient; other gradients follow later.",
    "n-softsync: Staleness-aware async-SGD for distributed deep learning",
    lambda values: Partial(PartialRules(parts=values.n, staleness=values.staleness, mean=False)),
    NSoftParameters,
)

# The name is short for "one-shot averaging".
osa = _preset(
    "osa",
    "Ranks train independently; replicas are averaged at the end of each epoch.",
    "Zinkevich et al., Parallelized stochastic gradient descent",
    lambda values: Averaging(AveragingRules(every=None)),
    RelaxedParameters,
)


class RnaParameters(RelaxedParameters, frozen=True):
    """Parameters of `rna`."""

    probes: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Number of ranks that are drawn at random for each reduction round. The"
            " first of them that is ready starts the round.",
        ),
    ] = 2
    staleness: Staleness = 4


# The paper's parts are randomised probing (Sec. 3.2), weighted accumulation of late gradients (Sec.
# 3.3) and bounded staleness. In each round, learning rates are multiplied by the share of the work
# that the contributing ranks did.
rna = _preset(
    "rna",
    "Partial all-reduce, started by the first ready rank of a few probed ones; no rank waits for "
    "all others.",
    "Yang et al., Mitigating stragglers in the decentralized training on heterogeneous "
    "clusters (RNA)",
    lambda values: Partial(
        PartialRules(probes=values.probes, staleness=values.staleness, mean=True)
    ),
    RnaParameters,
)


class SspParameters(RelaxedParameters, frozen=True):
    """Parameters of `ssp`."""

    staleness: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Maximum number of steps that a rank may be ahead of the slowest rank.",
        ),
    ] = 3


# A gradient is never too old, because the bound on a rank's lead also bounds the age of gradients.
ssp = _preset(
    "ssp",
    "Each gradient is applied as soon as it arrives; no rank gets too far ahead of the slowest.",
    "SSP: More effective distributed ML via a stale synchronous parallel parameter server",
    lambda values: Partial(
        PartialRules(quorum=1, staleness=None, lead=values.staleness, mean=False)
    ),
    SspParameters,
)
