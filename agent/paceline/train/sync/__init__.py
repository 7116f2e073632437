"""How gradients meet, besides the all-reduce in DDP: a synchroniser is a name and parameters."""

from __future__ import annotations

import torch
from msgspec import UNSET
from torch import nn

from paceline.train.sync.averaging import Averaging
from paceline.train.sync.base import Ranks, Synchroniser, Told
from paceline.train.sync.hierarchical import Hierarchical, Server
from paceline.train.sync.pairwise import Pairwise
from paceline.train.sync.partial import Partial
from paceline.train.sync.rounds import Call, Limits, Probes, Quorum
from paceline.wire import synchronisation


def make(
    what: synchronisation.Synchronisation,
    ranks: Ranks,
    prefix: str,
    parameters: list[nn.Parameter],
    optimiser: torch.optim.Optimizer,
    seed: int,
    told: Told | None = None,
) -> Synchroniser:
    """The synchroniser of a segment on one rank; each makes it.

    Args:
        what: the plan's, not the all-reduce.
        ranks: that take part.
        prefix: of keys in the store, new for each segment.
        parameters: that are trained, in the same order on all ranks.
        optimiser: of them.
        seed: of what is drawn at random, new for each segment.
        told: called with each round, on one of the ranks that are in it.
    """
    tells = told if ranks.rank == 0 else None
    match what:
        case synchronisation.Averaging(rules):
            return Averaging(ranks, parameters, rules.every, tells)
        case synchronisation.Pairwise():
            return Pairwise(ranks, prefix, parameters, seed, told)
        case synchronisation.Hierarchical(rules):
            return _hierarchical(rules, ranks, prefix, parameters, optimiser, seed, told)
        case synchronisation.Partial(rules):
            call = call_of(rules, ranks, prefix, seed)
            return Partial(ranks, prefix, parameters, optimiser, call, limits_of(rules), tells)
        case synchronisation.AllReduce():
            raise ValueError("DDP does the all-reduce: it needs no synchroniser")


def _hierarchical(
    rules: synchronisation.HierarchicalRules,
    ranks: Ranks,
    prefix: str,
    parameters: list[nn.Parameter],
    optimiser: torch.optim.Optimizer,
    seed: int,
    told: Told | None,
) -> Hierarchical:
    groups = sorted(sorted(group) for group in rules.groups)
    group = ranks.among(groups)
    server = Server(ranks, f"{prefix}/server", parameters, group.world / ranks.world)
    prefix = f"{prefix}/{next(k for k, members in enumerate(groups) if ranks.rank in members)}"
    call = call_of(rules, group, prefix, seed)
    tells = told if group.rank == 0 else None
    limits = limits_of(rules)
    return Hierarchical(
        group, prefix, parameters, optimiser, call, limits, server, rules.every, tells
    )


def call_of(rules: synchronisation.RoundRules, ranks: Ranks, prefix: str, seed: int) -> Call:
    """Who calls rounds."""
    if rules.probes is not UNSET:
        return Probes(ranks.rank, rules.probes or ranks.world, seed)
    return Quorum(ranks.asking, prefix, rules.ready(ranks.world))


def limits_of(rules: synchronisation.RoundRules) -> Limits:
    """How far ranks may drift apart."""
    return Limits(rules.staleness, rules.lead, rules.mean, rules.waits, rules.paced)
