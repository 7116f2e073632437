"""Relaxed synchronisers, which replace the all-reduce in DDP for a segment.

A synchroniser is given by a name and parameters in the plan. `SyncGate` calls `make` for each
segment that has a relaxed one.
"""

from __future__ import annotations

import torch
from torch import nn

from paceline.core.partners import groups
from paceline.core.rounds import Call, Drift
from paceline.train.sync.averaging import Averaging
from paceline.train.sync.base import OnRound, Ranks, Synchroniser
from paceline.train.sync.hierarchical import Hierarchical, Server
from paceline.train.sync.outer import Outer
from paceline.train.sync.pairwise import Pairwise
from paceline.train.sync.partial import Partial
from paceline.wire import synchronisation


def make(
    what: synchronisation.Synchronisation,
    ranks: Ranks,
    prefix: str,
    parameters: list[nn.Parameter],
    optimiser: torch.optim.Optimizer,
    seed: int,
    outer: Outer,
    on_round: OnRound | None = None,
) -> Synchroniser:
    """Make the synchroniser of a segment on one rank. Every rank calls it.

    `what` is not the all-reduce. `prefix` (of keys in the store) and `seed` are new for each
    segment. `parameters` have the same order on all ranks. `on_round` is called with each round,
    on one of its ranks.
    """
    of_first = on_round if ranks.rank == 0 else None
    match what:
        case synchronisation.Averaging(rules):
            return Averaging(ranks, parameters, rules, outer, prefix, of_first)
        case synchronisation.Pairwise():
            return Pairwise(ranks, prefix, parameters, seed, on_round)
        case synchronisation.Hierarchical(rules):
            return _hierarchical(rules, ranks, prefix, parameters, optimiser, seed, on_round)
        case synchronisation.Partial(rules):
            call, drift = Call.of(rules, ranks.world, seed), Drift.of(rules)
            return Partial(ranks, prefix, parameters, optimiser, call, drift, of_first)
        case synchronisation.AllReduce():
            raise ValueError("DDP does the all-reduce: it needs no synchroniser")


def _hierarchical(
    rules: synchronisation.HierarchicalRules,
    ranks: Ranks,
    prefix: str,
    parameters: list[nn.Parameter],
    optimiser: torch.optim.Optimizer,
    seed: int,
    on_round: OnRound | None,
) -> Hierarchical:
    of_all = groups.ordered(rules.groups)
    group = ranks.among(of_all)
    server = Server(ranks, f"{prefix}/server", parameters, group.world / ranks.world)
    prefix = f"{prefix}/{groups.of_rank(of_all, ranks.rank)}"
    call, drift = Call.of(rules, group.world, seed), Drift.of(rules)
    of_first = on_round if group.rank == 0 else None
    return Hierarchical(
        group, prefix, parameters, optimiser, call, drift, server, rules.every, of_first
    )
