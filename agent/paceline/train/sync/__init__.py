"""Relaxed synchronisation, which replaces the all-reduce in DDP for a segment.

`SyncGate` calls `make` for each segment with a relaxed synchronisation.
"""

from __future__ import annotations

from paceline.core import replicas
from paceline.core.rounds import Call, Drift
from paceline.train.sync.averaging import AveragingSync
from paceline.train.sync.base import Channel, GradientSync, Replica
from paceline.train.sync.hierarchical import HierarchicalSync, ParameterServer
from paceline.train.sync.outer import Outer
from paceline.train.sync.pairwise import PairwiseSync
from paceline.train.sync.partial import PartialSync
from paceline.wire import synchronisation


def make(
    what: synchronisation.Synchronisation,
    channel: Channel,
    replica: Replica,
    seed: int,
    outer: Outer,
) -> GradientSync:
    """Make the synchronisation of a segment on one rank. Every rank calls it.

    `what` is a relaxed synchronisation. `seed` differs between segments. One of the channel's ranks
    calls `on_round` with each round.
    """
    match what:
        case synchronisation.Averaging(rules):
            return AveragingSync(channel.reported_once(), replica.parameters, rules, outer)
        case synchronisation.Pairwise():
            return PairwiseSync(channel, replica.parameters, seed)
        case synchronisation.Hierarchical(rules):
            return _hierarchical(rules, channel, replica, seed)
        case synchronisation.Partial(rules):
            call, drift = Call.of(rules, channel.ranks.world, seed), Drift.of(rules)
            return PartialSync(channel.reported_once(), replica, call, drift)
        case synchronisation.AllReduce():
            raise ValueError("DDP does the all-reduce: it needs no synchroniser")


def _hierarchical(
    rules: synchronisation.HierarchicalRules, channel: Channel, replica: Replica, seed: int
) -> HierarchicalSync:
    ranks, prefix = channel.ranks, channel.prefix
    of_all = replicas.ordered_groups(rules.groups)
    group = ranks.among(of_all)
    server = ParameterServer(
        ranks, f"{prefix}/server", replica.parameters, group.world / ranks.world
    )
    own = Channel(group, f"{prefix}/{replicas.group_of(of_all, ranks.rank)}", channel.on_round)
    call, drift = Call.of(rules, group.world, seed), Drift.of(rules)
    return HierarchicalSync(own.reported_once(), replica, call, drift, server, rules.every)
