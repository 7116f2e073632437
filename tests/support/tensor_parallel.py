"""Cases for ranks: data-parallel groups of ranks that split a model, against one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline
from paceline.train.mesh import GroupTimes
from support import fsdp
from support.fsdp import gone_on
from support.records import record
from support.sessions import WIDTH, Numbered, Sized

TP = 2


class Block(nn.Module):
    """Split by columns, and by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * self.down(torch.tanh(self.up(x)))  # no view, of which FSDP warns


class Network(nn.Module):
    """A block that is split, and parts that are alike on all ranks of a group."""

    def __init__(self, batchnorm: bool = False) -> None:
        super().__init__()
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if batchnorm else nn.LayerNorm(WIDTH)
        self.block = Block()
        self.out_norm, self.out = nn.LayerNorm(6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.out_norm(self.block(self.norm(x))))


def network(batchnorm: bool = False) -> Network:
    torch.manual_seed(1)
    return Network(batchnorm)


def mesh_of(groups: int | None = None, *, replicas: bool = False) -> tuple[Any, Any]:
    """The data-parallel and the tensor-parallel part of a mesh of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh  # import takes a second

    groups = groups or dist.get_world_size() // TP
    size = dist.get_world_size() // groups
    if replicas:
        names = ("replicate", "shard", "tp")
        made = init_device_mesh("cpu", (groups, 1, size), mesh_dim_names=names)
        return made["replicate", "shard"], made["tp"]
    made = init_device_mesh("cpu", (groups, size), mesh_dim_names=("dp", "tp"))
    return made["dp"], made["tp"]


def split(model: nn.Module, tp: Any, *, sequence: bool = False) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as p

    plan: dict[str, Any] = {"block.up": p.ColwiseParallel(), "block.down": p.RowwiseParallel()}
    if sequence:
        plan["block.down"] = p.RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
        plan["out_norm"] = p.SequenceParallel(sequence_dim=0)
        plan["out"] = p.PrepareModuleInput(
            input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True
        )
    return p.parallelize_module(model, tp, plan)


def made(dp: Any, tp: Any, *, batchnorm: bool = False, sequence: bool = False) -> Any:
    """A split and sharded network."""
    from torch.distributed.fsdp import fully_shard

    model = split(network(batchnorm), tp, sequence=sequence)
    fully_shard(model.block, mesh=dp)
    return fully_shard(model, mesh=dp)


@dataclass
class Log(fsdp.Log):
    every: list[int] = field(default_factory=list)  # all groups' samples, each once
    alike: bool = True  # all ranks of a group had the same samples in each step
    place: tuple[int, int] = (0, 0)  # rank and world of the session


def train(
    plans: Callable[[], contextlib.AbstractContextManager[Any]],
    epochs: int,
    *,
    groups: int | None = None,
    replicas: bool = False,
    sequence: bool = False,
    batchnorm: bool = False,
    **options: Any,
) -> Log:
    """A training loop over a split model, and the same steps in one process on each rank.

    Args:
        groups: see `mesh_of`.
        replicas: see `mesh_of`.
        sequence: see `split`.
        batchnorm: the network has such a layer, which is synchronised.
    """
    log, data = Log(), Sized(48)
    dp, tp = mesh_of(groups, replicas=replicas)
    given = {"global_batch": 8, "mesh": dp} | options
    with plans() as seen, contextlib.closing(paceline.Session(data, **given)) as run:
        log.place = run.rank, run.world

        def gathered(mine: list[int]) -> list[int]:
            words: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(words, (run.rank, mine))
            of_group = dict(words)
            log.alike &= all(part == of_group[number] for number, part in words)
            every = [index for number in sorted(of_group) for index in of_group[number]]
            log.every += every
            return every

        how = "sync" if batchnorm else None
        model = run.wrap(made(dp, tp, batchnorm=batchnorm, sequence=sequence), batchnorm=how)
        fsdp.beside(log, run, data, (model, network(batchnorm)), epochs, gathered)
    log.policies = list(seen or [])
    return log


def save_and_go_on(directory: str, epochs: int, *, splits: bool = True) -> tuple[Tensor, Tensor]:
    """Trains with checkpoints: parameters at the start and in the end."""
    dp, tp = mesh_of() if splits else (None, None)
    with contextlib.closing(paceline.Session(Numbered(24), global_batch=4, mesh=dp)) as run:
        model = made(dp, tp) if splits else network()
        began, ended, _ = gone_on(run, model, directory, epochs)
    return began, ended


def timed(slow: int) -> list[tuple[float, float]]:
    """data_s and compute_s of the records that groups make of three steps, on ranks that speak.

    Args:
        slow: the rank that computes for 0.2 s in each step and loads for 0.1 s; the others take
            0.01 s for each.
    """
    from paceline.train.mesh import laned
    from paceline.train.startup import start_up

    startup = laned(start_up({}, lambda: np.ones(4)), mesh_of()[0])
    assert startup.lanes is not None
    times = GroupTimes(startup.lanes)
    own = record(0, 0, data_s=0.01, compute_s=0.01, sync_s=1.0)
    if dist.get_rank() == slow:
        own = record(0, 0, data_s=0.1, compute_s=0.2, sync_s=1.0)
    sent = [times.send(own.data_s, own.compute_s) for _ in range(3)]
    made = [times.slowest(own, each) for each in sent]
    if not startup.speaks:
        made = []
    times.close()
    startup.lanes.close()
    dist.barrier()  # the store is rank 0's
    return [(each.data_s, each.compute_s) for each in made]


def refused(kind: str) -> str:
    """What a session with groups says to what it does not train."""
    from torch.distributed.fsdp import fully_shard

    dp, tp = mesh_of()
    data: Any = Numbered(12)
    options: dict[str, Any] = {"global_batch": 4, "mesh": tp if kind == "other part" else dp}
    if kind in ("uneven_steps", "micro_batches"):
        options[kind] = True
    if kind == "no mesh":
        options["mesh"] = 2
    if kind == "stream":
        data = paceline.data.Stream(range(100), size=len, split="none")
    if kind == "some":
        options["mesh"] = None if dist.get_rank() else dp
    with (
        pytest.raises((ValueError, TypeError, paceline.PacelineError)) as error,
        contextlib.closing(paceline.Session(data, **options)) as run,
    ):
        if kind == "profile":
            run.profile(lambda count: None)
        elif kind == "plain":
            run.wrap(network())
        elif kind == "split only":
            run.wrap(split(network(), tp))
        elif kind == "apart":
            torch.manual_seed(dist.get_rank())
            first = nn.Linear(WIDTH, 2)
            torch.manual_seed(0)
            run.wrap(fully_shard(nn.Sequential(first, nn.Linear(2, 1)), mesh=dp))
        elif kind == "stages":
            part = nn.Linear(WIDTH, 1, bias=dist.get_rank() % 2 == 0)
            run.wrap(fully_shard(part, mesh=dp))
        elif kind == "other part":
            run.wrap(made(dp, tp))
        for _ in run.loader():
            pass
    return str(error.value)
