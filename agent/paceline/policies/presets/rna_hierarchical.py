"""`rna-hierarchical`: `rna` in groups of similarly fast ranks, with a server between the groups.

A group's reduction rounds follow the group's own speed, so the gradients of a rank that is always
slow are not older than the gradients of a fast rank. Fast ranks also take over batches of slow
ranks, even of other groups. Ranks of similar speed are one group, also on several nodes. Whole
nodes are grouped first (unless the parameter `groups` is "speed"), so that a slow node is a group
of its own. Between groups, a parameter server adds up the changes of each group (RNA, Sec. 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from paceline.policies.base import Choice, Feedback, Floats, Policy, Preset
from paceline.policies.presets.relaxed import ON_PACELINE, RelaxedParameters, Staleness
from paceline.policies.registry import make as policy_of
from paceline.policies.values import LEAST_USABLE, Ints
from paceline.wire.synchronisation import (
    Hierarchical,
    HierarchicalRules,
    Partial,
    PartialRules,
    Synchronisation,
)

# The newest steps are divided into this many parts.
_HISTORY_PARTS = 4
_HISTORY_STEPS = 8 * _HISTORY_PARTS


@dataclass(frozen=True)
class Grouping:
    """A chooser that groups ranks by their step times; plain RNA if all ranks are one group.

    The newest steps are divided into `_HISTORY_PARTS` parts. The groups change only if each part
    alone gives the same new groups, so that noise does not move a rank back and forth. With
    `by_node`, whole nodes are grouped first. `nodes` has the index of each rank's node, [W]; None:
    there is one node, or nodes do not matter. For `spread` and `nodes` see also `groups`, and for
    the other fields `HierarchicalRules`.
    """

    spread: float
    every: int
    probes: int
    staleness: int
    by_node: bool = True
    nodes: tuple[int, ...] | None = None

    def on_nodes(self, nodes: Sequence[int]) -> Grouping:
        """See `NodeChooser.on_nodes`."""
        return replace(self, nodes=tuple(nodes)) if self.by_node else self

    def choose(self, feedback: Feedback, world: int, memory: Mapping[str, Any]) -> Choice:
        """See `Chooser.choose`."""
        grouping = _recall(memory, world)
        steps = len(feedback) // world
        if steps < _HISTORY_STEPS:
            return self._choice(grouping, f"few steps are known: {steps} of {_HISTORY_STEPS}")
        rows = feedback.batches(world, _HISTORY_STEPS)
        compute_s, samples = rows.compute_s, rows.samples
        proposed = [
            groups(step_times(*part), self.spread, self.nodes)
            for part in zip(
                np.split(compute_s, _HISTORY_PARTS), np.split(samples, _HISTORY_PARTS), strict=True
            )
        ]
        if all(proposal == proposed[0] for proposal in proposed):
            grouping = proposed[0]
        return self._choice(grouping, _words(grouping, step_times(compute_s, samples)))

    def _choice(self, grouping: list[list[int]], why: str) -> Choice:
        return Choice(self._sync_of(grouping), why, {"groups": grouping})

    def _sync_of(self, grouping: list[list[int]]) -> Synchronisation:
        probes, staleness = self.probes, self.staleness
        if len(grouping) == 1:
            return Partial(PartialRules(probes=probes, staleness=staleness, mean=True))
        return Hierarchical(
            HierarchicalRules(
                probes=probes, staleness=staleness, mean=True, groups=grouping, every=self.every
            )
        )


def _recall(memory: Mapping[str, Any], world: int) -> list[list[int]]:
    """Return the last groups, or a single group if their ranks are not exactly the run's ranks."""
    try:
        grouping = msgspec.convert(memory.get("groups"), list[list[int]])
    except msgspec.ValidationError:
        grouping = []
    ranks = list(range(world))
    return grouping if sorted(rank for group in grouping for rank in group) == ranks else [ranks]


def _words(grouping: list[list[int]], times: Floats) -> str:
    if len(grouping) == 1:
        return f"one group: a step takes {_ms(times.min())} to {_ms(times.max())}"
    by_speed = sorted(grouping, key=lambda group: float(times[group].mean()))
    parts = [f"{len(group)} ranks at {_ms(float(np.mean(times[group])))}" for group in by_speed]
    return f"{len(grouping)} groups by what a step takes: {', '.join(parts)}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def groups(
    times: Floats, spread: float = 1.0, nodes: Sequence[int] | None = None
) -> list[list[int]]:
    """Return groups of ranks of about the same speed (RNA, Sec. 4), sorted by their first rank.

    RNA's rule: ζ is the difference between the times of the slowest and the fastest rank, and v is
    the mean time. If ζ > v, ranks above the mean and all others become separate groups, which are
    divided in the same way. With `nodes`, the rule first divides whole nodes, by the mean times of
    their ranks, and then the ranks of each of these groups. So on several nodes, too, there is a
    single group if ζ ≤ v, and ζ ≤ v holds in each group.

    Args:
        times: mean time of each rank's step in seconds, [W]; all are above 0.
        spread: maximum difference of times within a group, as a multiple of the group's mean time;
            1 in RNA.
        nodes: index of each rank's node, [W]; None: all ranks are on one node.
    """
    of_nodes = [np.arange(len(times))]
    if nodes is not None:
        _, node = np.unique(nodes, return_inverse=True)
        node_times = np.bincount(node, times) / np.bincount(node)
        of_nodes = _split(node_times[node], of_nodes[0], spread)
    return sorted(
        sorted(ranks.tolist()) for whole in of_nodes for ranks in _split(times, whole, spread)
    )


def _split(times: Floats, ranks: Ints, spread: float) -> list[Ints]:
    mine = times[ranks]
    slow = mine > mine.mean()
    # No rank is slow if all times are equal, up to rounding of the mean.
    if np.ptp(mine) <= spread * mine.mean() or not slow.any():
        return [ranks]
    return _split(times, ranks[~slow], spread) + _split(times, ranks[slow], spread)


def step_times(compute_s: Floats, samples: Ints) -> Floats:
    """Return the mean time of each rank's step in seconds, [W].

    `compute_s` and `samples` are the time and the number of samples of each rank in each step, [S,
    W]. Steps without samples, or without a time, do not count. A rank that has only such steps gets
    the mean over all ranks.
    """
    worked = (samples > 0) & (compute_s > LEAST_USABLE)
    total = np.where(worked, compute_s, 0.0).sum(axis=0)
    count = worked.sum(axis=0)
    mean = total.sum() / max(int(count.sum()), 1)
    return np.asarray(np.where(count > 0, total / np.maximum(count, 1), mean))


class RnaHierarchicalParameters(RelaxedParameters, frozen=True):
    """Parameters of `rna-hierarchical`."""

    groups: Annotated[
        Literal["auto", "speed"],
        Meta(
            description="How ranks are grouped if their speeds differ by more than `spread`. auto: "
            "whole nodes first, then the ranks of each group. speed: ranks, wherever they are."
        ),
    ] = "auto"
    spread: Annotated[
        float,
        Meta(
            ge=0.05,
            le=10,
            description="Maximum difference between the step times of the slowest and the fastest "
            "rank of a group, as a fraction of the group's mean step time.",
        ),
    ] = 1.0
    every: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Number of reduction rounds of a group between two exchanges with the "
            "parameter server.",
        ),
    ] = 4
    probes: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="Number of ranks of a group that are drawn at random for each reduction "
            "round. The first of them that is ready starts the round.",
        ),
    ] = 2
    staleness: Staleness = 4


def make(parameters: RnaHierarchicalParameters) -> Policy:
    """Make the policy."""
    chooser = Grouping(
        spread=parameters.spread,
        every=parameters.every,
        probes=parameters.probes,
        staleness=parameters.staleness,
        by_node=parameters.groups == "auto",
    )
    batches = policy_of(parameters.batches)
    return replace(batches, name="rna-hierarchical", synchroniser=chooser)


preset = Preset(
    name="rna-hierarchical",
    summary="Partial all-reduce within groups of ranks of similar speed; a parameter server "
    "connects the groups.",
    source="Yang et al., Mitigating stragglers in the decentralized training on heterogeneous "
    "clusters (RNA)",
    make=make,
    parameters=RnaHierarchicalParameters,
    variants=ON_PACELINE,
)
