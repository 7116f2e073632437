"""Peers: samplers and balancers of other projects, called as their users call them.

A peer gets sizes, ranks, global batch, seed and epoch, and returns [step][rank] sample indices. No
peer takes the ranks' speeds into account. ``pip install 'paceline[bench]'`` installs all peers.
Tables list the peers that are not installed.
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Steps = list[list[Ints]]
Planner = Callable[[Ints, int, int, int, int], Steps]


@dataclass(frozen=True)
class Peer:
    """Planner of another project.

    Args:
        name: the peer's name in tables.
        package: the package that must be installed.
        licence: the package's licence according to its metadata.
        plan: sizes [N], ranks, global batch, seed, epoch → [step][rank] samples.
        same_batches: each global batch has the same samples as under plain DDP.
    """

    name: str
    package: str
    licence: str
    plan: Planner
    same_batches: bool = False

    @property
    def version(self) -> str | None:
        """Version of the installed package, or None if it is not installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


def _order(samples: int, seed: int, epoch: int) -> Ints:
    """Return DistributedSampler's order of an epoch."""
    import torch

    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    return np.asarray(torch.randperm(samples, generator=generator).numpy())


def _per_rank(ranks: list[Ints], local: int) -> Steps:
    """Return steps in which each rank takes the next `local` samples of its list."""
    return [
        [stream[at : at + local] for stream in ranks]
        for at in range(0, len(ranks[0]) // local * local, local)
    ]


def torch_sampler(sizes: Ints, world: int, global_batch: int, seed: int, epoch: int) -> Steps:
    """Plan with PyTorch's DistributedSampler."""
    from torch.utils.data import DistributedSampler

    ranks = []
    for rank in range(world):
        sampler: Any = DistributedSampler(range(len(sizes)), world, rank, seed=seed)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        ranks.append(np.array(list(sampler), np.int64))
    return _per_rank(ranks, global_batch // world)


@cache
def _flatflow_graph() -> bytes:
    """Return a small graph whose cost is linear in the length, because flatflow needs a graph."""
    import torch
    from flatflow import ops
    from torch.export import Dim, export

    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(100, 32)
            self.linear = torch.nn.Linear(32, 32)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.linear(self.embed(tokens))
            return made

    tokens = torch.zeros(1, 64, dtype=torch.long)
    lengths = ({1: Dim("length", min=2, max=8192)},)
    with warnings.catch_warnings():
        # torch uses deprecated calls while it copies the graph.
        warnings.simplefilter("ignore")
        program = export(Linear().eval(), (tokens,), dynamic_shapes=lengths).run_decompositions()
    made: bytes = ops.serialize(program.graph)
    return made


def _flatflow_ranks(
    order: Ints, sizes: Ints, world: int, global_batch: int, mode: str
) -> list[Ints]:
    """Plan with flatflow; return each rank's samples, in the order of their steps."""
    schedule = getattr(importlib.import_module("flatflow.ffi"), mode)
    ranks = []
    # Each rank plans for all ranks and keeps its own samples.
    for rank in range(world):
        # flatflow sorts its arguments in place, so each rank needs new ones.
        left, costs, graph = order.astype(np.uintp), sizes.copy(), _flatflow_graph()
        local = global_batch // world
        made = schedule(left, costs, graph, 1, 1, world, rank, global_batch, local, "fast")
        ranks.append(np.asarray(made).astype(np.int64))
    return ranks


def flatflow_parts(sizes: Ints, ranks: int, mode: str) -> list[Ints]:
    """Divide a batch with flatflow; return each rank's positions."""
    return _flatflow_ranks(np.arange(len(sizes)), sizes, ranks, len(sizes), mode)


def _flatflow(mode: str) -> Planner:
    """Plan with flatflow: ``sched`` keeps global batches, ``sched_unstable`` does not."""

    def plan(sizes: Ints, world: int, global_batch: int, seed: int, epoch: int) -> Steps:
        order = _order(len(sizes), seed, epoch)
        ranks = _flatflow_ranks(order, sizes, world, global_batch, mode)
        return _per_rank(ranks, global_batch // world)

    return plan


def _batch_rebalance(sizes: Ints, world: int, global_batch: int, seed: int, epoch: int) -> Steps:
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    ranks = []
    for rank in range(world):
        sampler = BatchRebalanceSampler(
            sizes.tolist(), global_batch, world, grad_accum=1, seed=seed, rank=rank
        )
        sampler.set_epoch(epoch)
        ranks.append([np.array(batch, np.int64) for batch in sampler])
    return [list(step) for step in zip(*ranks, strict=True)]


def _length_grouped(sizes: Ints, world: int, global_batch: int, seed: int, epoch: int) -> Steps:
    from transformers.trainer_pt_utils import DistributedLengthGroupedSampler

    ranks = []
    for rank in range(world):
        sampler = DistributedLengthGroupedSampler(
            global_batch, num_replicas=world, rank=rank, seed=seed, lengths=sizes.tolist()
        )
        sampler.set_epoch(epoch)
        ranks.append(np.array(list(sampler), np.int64))
    return _per_rank(ranks, global_batch // world)


@cache
def _verl() -> Any:
    """Import verl's balancer without verl's dependencies, which are those of a whole RL stack.

    verl's packages import these dependencies in their ``__init__``. So the packages are added to
    `sys.modules` without running their ``__init__``. Modules that the balancer imports but does not
    need are stubs.
    """
    spec = find_spec("verl")
    assert spec is not None
    assert spec.submodule_search_locations
    root = spec.submodule_search_locations[0]
    stubs: dict[str, dict[str, Any]] = {
        "verl": {"__path__": [root]},
        "verl.utils": {"__path__": [f"{root}/utils"], "tensordict_utils": None},
        "verl.protocol": {"DataProto": None},
        "verl.utils.device": {"get_device_name": None},
    }
    for name, values in stubs.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(values)
    return importlib.import_module("verl.utils.seqlen_balancing")


def verl_parts(sizes: Ints, ranks: int, *, equal: bool) -> list[Ints]:
    """Divide a batch with verl's largest differencing method; return each rank's positions."""
    parts = _verl().get_seqlen_balanced_partitions(sizes.tolist(), ranks, equal)
    return [np.array(part, np.int64) for part in parts]


def _karmarkar_karp(*, equal: bool) -> Planner:
    def plan(sizes: Ints, world: int, global_batch: int, seed: int, epoch: int) -> Steps:
        order = _order(len(sizes), seed, epoch)
        made = []
        for at in range(0, len(sizes) // global_batch * global_batch, global_batch):
            batch = order[at : at + global_batch]
            made.append([batch[part] for part in verl_parts(sizes[batch], world, equal=equal)])
        return made

    return plan


def _lhotse(sizes: Ints, world: int, global_batch: int, seed: int, epoch: int) -> Steps:
    """Plan batches of similar total lengths. The number of steps varies by epoch."""
    longest = max(global_batch / world * float(sizes.mean()), float(sizes.max()))
    steps = len(sizes) // global_batch
    logging.getLogger("lhotse").setLevel(logging.ERROR)
    from lhotse import CutSet, MonoCut
    from lhotse.dataset import DynamicBucketingSampler

    drawn: list[Ints] = []

    class Recording(DynamicBucketingSampler):  # type: ignore[misc]
        """Sampler that records the batches of all ranks: a rank draws all and keeps its own."""

        def _next_batch(self) -> Any:
            batch = super()._next_batch()
            drawn.append(np.array([int(cut.id) for cut in batch], np.int64))
            return batch

    cuts = CutSet.from_cuts(
        MonoCut(id=str(k), start=0.0, duration=float(size), channel=0, supervisions=[])
        for k, size in enumerate(sizes)
    )
    warnings.filterwarnings("ignore", "You are using DynamicBucketingSampler with an eagerly")
    sampler = Recording(
        cuts.to_eager(),
        max_duration=longest,
        num_buckets=max(2, min(20, len(np.unique(sizes)), math.ceil(steps / 4))),
        shuffle=True,
        drop_last=True,
        world_size=world,
        rank=0,
        sync_buckets=True,
        seed=seed,
    )
    sampler.set_epoch(epoch)
    for _ in sampler:
        pass
    return [drawn[at : at + world] for at in range(0, len(drawn) - world + 1, world)]


PEERS = (
    Peer("torch DistributedSampler", "torch", "BSD-3-Clause", torch_sampler, same_batches=True),
    Peer("flatflow sched", "flatflow", "Apache-2.0", _flatflow("sched"), same_batches=True),
    Peer("flatflow sched_unstable", "flatflow", "Apache-2.0", _flatflow("sched_unstable")),
    Peer(
        "HF BatchRebalanceSampler",
        "transformers",
        "Apache-2.0",
        _batch_rebalance,
        same_batches=True,
    ),
    Peer("HF length-grouped", "transformers", "Apache-2.0", _length_grouped),
    Peer(
        "verl Karmarkar-Karp, equal",
        "verl",
        "Apache-2.0",
        _karmarkar_karp(equal=True),
        same_batches=True,
    ),
    Peer(
        "verl Karmarkar-Karp, unequal",
        "verl",
        "Apache-2.0",
        _karmarkar_karp(equal=False),
        same_batches=True,
    ),
    Peer("lhotse DynamicBucketing", "lhotse", "Apache-2.0", _lhotse),
)
