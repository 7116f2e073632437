"""How gradients meet, besides the all-reduce in DDP: a synchroniser is a name and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.train.sync.averaging import Averaging
from paceline.train.sync.base import Ranks, Synchroniser, Told
from paceline.train.sync.hierarchical import Hierarchical, Server
from paceline.train.sync.pairwise import Pairwise
from paceline.train.sync.partial import Partial
from paceline.train.sync.rounds import Call, Limits, Probes, Quorum
from paceline.wire import Synchronisation


def make(
    what: Synchronisation,
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
    given: dict[str, Any] = dict(what.parameters)
    tells = told if ranks.rank == 0 else None
    if what.name == "averaging":
        return Averaging(ranks, parameters, given["every"], tells)
    if what.name == "pairwise":
        return Pairwise(ranks, prefix, parameters, seed, told)
    if what.name == "hierarchical":
        return _hierarchical(given, ranks, prefix, parameters, optimiser, seed, told)
    assert what.name == "partial", what.name
    call = call_of(given, ranks, prefix, seed)
    return Partial(ranks, prefix, parameters, optimiser, call, limits_of(given), tells)


def _hierarchical(
    given: Mapping[str, Any],
    ranks: Ranks,
    prefix: str,
    parameters: list[nn.Parameter],
    optimiser: torch.optim.Optimizer,
    seed: int,
    told: Told | None,
) -> Hierarchical:
    groups = sorted(sorted(one) for one in given["groups"])
    group = ranks.among(groups)
    server = Server(ranks, f"{prefix}/server", parameters, group.world / ranks.world)
    prefix = f"{prefix}/{next(k for k, one in enumerate(groups) if ranks.rank in one)}"
    call = call_of(given, group, prefix, seed)
    tells = told if group.rank == 0 else None
    limits, every = limits_of(given), given["every"]
    return Hierarchical(group, prefix, parameters, optimiser, call, limits, server, every, tells)


def call_of(given: Mapping[str, Any], ranks: Ranks, prefix: str, seed: int) -> Call:
    """Who calls rounds: "probes" (None: of all ranks), or else "quorum", "parts" or "spare"."""
    if "probes" in given:
        return Probes(ranks.rank, given["probes"] or ranks.world, seed)
    if "parts" in given:
        count = -(-ranks.world // int(given["parts"]))
    elif "spare" in given:
        count = max(1, ranks.world - int(given["spare"]))
    else:
        count = int(given["quorum"])
    return Quorum(ranks.asking, prefix, count)


def limits_of(given: Mapping[str, Any]) -> Limits:
    """How far ranks may drift apart: "staleness", "lead", "mean", "waits", "paced"."""
    waits, paced = given.get("waits", False), given.get("paced", False)
    return Limits(given["staleness"], given.get("lead"), given["mean"], waits, paced)
