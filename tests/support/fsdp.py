"""Cases for ranks: models sharded by `fully_shard`, against one process over the global batch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paceline
from paceline import policies
from paceline.core.errors import PacelineError
from paceline.policies import Feedback, Problem
from paceline.train.ddp import CurrentStep
from paceline.train.fsdp.model import WeightedFSDP
from paceline.train.plan.leader import Leader
from paceline.wire import ALLREDUCE, Plan
from paceline.wire.synchronisation import Synchronisation
from support import gradients
from support.gradients import FILLER, WIDTH, difference, loss_of
from support.relaxing import planned
from support.sessions import Numbered, Sized, network


class Tower(nn.Module):
    """Units within a unit, parameters of the model itself, and one module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.full((WIDTH,), 0.3))
        self.first = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh())  # 7: uneven over ranks
        self.deep = nn.Sequential(nn.LayerNorm(7), nn.Sequential(nn.Linear(7, 7), nn.Tanh()))
        self.last = nn.Linear(7, gradients.CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = self.deep(self.deep(self.first(x + self.offset)))
        return (self.last(hidden) * mask).sum(1) / mask.sum(1)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "mlp": gradients.Mlp,
    "conv": gradients.Conv,
    "tower": Tower,
}


@dataclass(frozen=True)
class Sharding:
    replicas: int = 1  # of sharded models; 1: each rank has a part of its own
    reshard: bool | int | None = None  # after the forward pass; None: torch's default
    units: bool = True  # parts of the model are units, too, and not the model alone
    dtype: torch.dtype | None = None  # of computing
    reduce: torch.dtype | None = None  # of reducing


def sharded(model: nn.Module, how: Sharding) -> Any:
    from torch.distributed import device_mesh, fsdp  # import takes a second

    world = dist.get_world_size()
    shape, names = (how.replicas, world // how.replicas), ("replicate", "shard")
    mesh = (
        device_mesh.init_device_mesh("cpu", (world,))
        if how.replicas == 1
        else device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
    )
    options: Any = {
        "mesh": mesh,
        "reshard_after_forward": how.reshard,
        "mp_policy": fsdp.MixedPrecisionPolicy(how.dtype, how.reduce),
    }
    if how.units:
        parts = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv1d)]
        for part in [*parts[:1], *(m for m in model.children() if isinstance(m, nn.Sequential))]:
            fsdp.fully_shard(part, **options)
    return fsdp.fully_shard(model, **options)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor of which each rank has a part; all ranks call it."""
    full: Any = getattr(tensor, "full_tensor", lambda: tensor)
    return full().detach()


def gradient(model: nn.Module) -> Tensor:
    """All gradients in one vector; what has none counts as 0. All ranks call it."""
    return torch.cat(
        [
            torch.zeros(p.shape).flatten() if p.grad is None else whole(p.grad).flatten()
            for p in model.parameters()
        ]
    )


def _made(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return KINDS[kind]()


def compare(kind: str, counts: list[int], loss_mean: str, seed: int, how: Sharding) -> list[float]:
    """Errors of three steps in a row, whose ranks have the counts by turns."""
    rank = dist.get_rank()
    current = CurrentStep(dist.get_world_size())
    reference, model = _made(kind, seed), sharded(_made(kind, seed), how)
    wrapped = WeightedFSDP(model, current)
    errors = []
    for step in range(3):
        shifted = counts[step:] + counts[:step]
        parts = gradients.split(shifted, seed + step)
        wrapped.begin()
        current.enter(gradients.running(parts, rank, loss_mean))
        model.zero_grad()
        reference.zero_grad()
        loss_of(model, parts[rank] or [FILLER], loss_mean).backward()
        loss_of(reference, list(chain(*parts)), loss_mean).backward()
        errors.append(difference(gradient(model), gradient(reference)))
        current.enter(None)
    wrapped.close()
    return errors


def accumulate(
    kind: str, steps: list[list[int]], kept: str, seed: int, how: Sharding
) -> list[float]:
    """Errors of two accumulations over steps with other weights.

    Args:
        steps: counts [step][rank].
        kept: what ranks keep until the last step: "gradients", "partial" sums, which replicas of
            a sharded model have, or "nothing".
        how: see `Sharding`.
    """
    rank = dist.get_rank()
    current = CurrentStep(dist.get_world_size())
    reference, model = _made(kind, seed), sharded(_made(kind, seed), how)
    wrapped = WeightedFSDP(model, current)
    errors = []
    for round_ in range(2):
        model.zero_grad(set_to_none=round_ == 0)
        reference.zero_grad()
        for step, counts in enumerate(steps):
            parts = gradients.split(counts, seed + 10 * round_ + step)
            wrapped.begin()
            current.enter(gradients.running(parts, rank))
            last = step == len(steps) - 1
            if kept == "gradients":
                model.set_requires_gradient_sync(last)
            elif kept == "partial":
                model.set_requires_all_reduce(last)
            loss_of(model, parts[rank] or [FILLER], "samples").backward()
            loss_of(reference, list(chain(*parts)), "samples").backward()
            current.enter(None)
        errors.append(difference(gradient(model), gradient(reference)))
    wrapped.close()
    return errors


def thawed() -> list[float]:
    """Errors before and after the script trains parameters that were frozen."""
    rank, world = dist.get_rank(), dist.get_world_size()
    current = CurrentStep(world)
    reference, model = _made("tower", 3), sharded(_made("tower", 3), Sharding())
    wrapped = WeightedFSDP(model, current)
    errors = []
    for frozen in (True, False):
        for each in (reference, model):
            each.zero_grad()
            each.deep.requires_grad_(not frozen)
        parts = gradients.split([3, 1, 0, 2][:world], int(frozen))
        wrapped.begin()
        current.enter(gradients.running(parts, rank))
        loss_of(model, parts[rank] or [FILLER], "samples").backward()
        loss_of(reference, list(chain(*parts)), "samples").backward()
        current.enter(None)
        errors.append(difference(gradient(model), gradient(reference)))
    wrapped.close()
    return errors


def timed(slow: int, slow_s: float, where: str) -> list[tuple[float, float, float]]:
    """compute_s, sync_s and the time of steps in which a rank computes for longer in one pass."""
    rank, world = dist.get_rank(), dist.get_world_size()
    current = CurrentStep(world)
    model = sharded(_made("tower", 3), Sharding(reshard=True))

    def sleep(*_: Any) -> None:
        if rank == slow and current.running is not None:
            time.sleep(slow_s)

    def sleep_later(_: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(sleep)

    if where == "forward":
        model.deep[0].register_forward_pre_hook(sleep)
    else:
        model.deep[0].register_forward_hook(sleep_later)
    wrapped = WeightedFSDP(model, current)
    times = []
    for step in range(3):
        parts = gradients.split([2] * world, step)
        wrapped.begin()
        dist.barrier()
        began = time.perf_counter()
        running = gradients.running(parts, rank)
        current.enter(running)
        loss_of(model, parts[rank], "samples").backward()
        running.body_done()
        spent = time.perf_counter() - began
        compute_s, sync_s, _ = running.read()
        times.append((compute_s, sync_s, spent))
        current.enter(None)
    wrapped.close()
    return times


@dataclass
class Log:
    """What a rank saw of a training beside the same training in one process."""

    errors: list[float] = field(default_factory=list)  # of gradients, by step
    norms: list[float] = field(default_factory=list)  # of the gradients that clipping saw: errors
    parts: list[list[int]] = field(default_factory=list)  # this rank's samples, by step
    policies: list[str] = field(default_factory=list)  # of the segments, on rank 0
    parameters: float = 0.0  # error in the end
    relaxed: bool = False  # a relaxed synchroniser came into force
    fallback: str = ""  # why not


def train(
    plans: Callable[[], contextlib.AbstractContextManager[Any]],
    epochs: int,
    how: Sharding,
    *,
    clip: float | None = None,
    batchnorm: str | None = None,
    count: int = 96,
) -> Log:
    """A training loop over a sharded model, and the same steps in one process on each rank."""
    log, data = Log(), Sized(count)
    with plans() as seen, contextlib.closing(paceline.Session(data, global_batch=12)) as run:
        model = run.wrap(sharded(_network(batchnorm), how), batchnorm=batchnorm)
        beside(log, run, data, (model, _network(batchnorm)), epochs, _gathered, clip)
    log.policies = list(seen or [])
    return log


def beside(
    log: Log,
    run: paceline.Session,
    data: Sized,
    models: tuple[nn.Module, nn.Module],
    epochs: int,
    gathered: Callable[[list[int]], list[int]],
    clip: float | None = None,
) -> None:
    """Trains a wrapped model, and the same steps in one process on each rank.

    Args:
        models: the wrapped one, and the other one.
        gathered: the samples of all ranks' batches, by this rank's.
        clip: the norm to which gradients are clipped.
    """
    ours, theirs = (torch.optim.SGD(each.parameters(), 0.05, momentum=0.9) for each in models)
    run.optimizer(ours)
    model, reference = models
    loader = run.loader()
    for _ in run.epochs(epochs):
        for indices, x, y in loader:
            log.parts.append([] if run.batch.empty else indices.tolist())
            mse_loss(model(x), y).backward()
            every = [data[index] for index in gathered(log.parts[-1])]
            _, all_x, all_y = zip(*every, strict=True)
            mse_loss(reference(torch.stack(all_x)), torch.stack(all_y)).backward()
            log.errors.append(difference(gradient(model), gradient(reference)))
            if clip is not None:
                norms = [
                    whole(nn.utils.clip_grad_norm_(each.parameters(), clip)) for each in models
                ]
                log.norms.append(difference(*norms))
            log.relaxed |= run._loop.gate.relaxed is not None
            run.log(loss=1.0)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    final = [torch.cat([whole(p).flatten() for p in each.parameters()]) for each in models]
    log.parameters = difference(*final)
    log.fallback = run._loop.gate.suitability._fallback


def _network(batchnorm: str | None) -> nn.Module:
    made = network()
    if batchnorm is not None:
        assert isinstance(made, nn.Sequential)
        made.insert(1, nn.BatchNorm1d(8))
    return made


def _gathered(mine: list[int]) -> list[int]:
    every: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    return [index for part in every for index in part]


@contextlib.contextmanager
def by_presets(names: list[str], steps: int = 2) -> Iterator[list[str]]:
    """Segments of a few steps, each by the next of these presets, from made-up measurements."""
    seen: list[str] = []

    def next_one(leader: Leader) -> Plan:
        name = names[leader.seq % len(names)]
        seen.append(name)
        sizes, ledger = leader._sizes, leader._ledger
        rest = np.setdiff1d(np.arange(len(sizes)), ledger.used())
        terms, world = leader._terms, leader._world
        problem = Problem(
            sizes,
            rest,
            rest,
            np.arange(len(sizes)) % world,
            ledger.epoch,
            leader._step,
            steps,
            terms.global_batch,
            world,
            seed=terms.seed,
        )
        policy = policies.make(name, {})
        plan, _ = policies.plan(policy, problem, _measured(world), shuffle=True)
        assert plan.synchroniser == ALLREDUCE
        return Plan(
            seq=leader.seq,
            epoch=ledger.epoch,
            first_step=leader._step,
            counts=plan.counts,
            indices=plan.indices,
            policy=name,
            version=0,
            source="coast",
            epoch_end=plan.epoch_end,
        )

    with mock.patch.object(Leader, "_coasted", next_one):
        yield seen


def _measured(world: int) -> Feedback:
    """Ranks of different speeds: rank j takes j + 1 times as long."""
    steps = 30
    step, rank = np.repeat(np.arange(steps), world), np.tile(np.arange(world), steps)
    load = np.random.default_rng(1).integers(4, 9, steps * world).astype(float)
    samples = load.astype(np.int64) // 2
    compute_s = 0.002 + 0.001 * (rank + 1) * load
    return Feedback(step, rank, samples, load, compute_s, load, np.full(len(load), 3.0))


def by_synchronisers(chain_: list[Synchronisation]) -> contextlib.AbstractContextManager[None]:
    return planned(chain_)


def refused(kind: str) -> str:
    """What the session says to a model, or to what a script does with it."""
    from torch.distributed import device_mesh, fsdp

    given: dict[str, Any] = {}
    options: dict[str, Any] = {"global_batch": 4}
    model: Any = nn.Sequential(network(), nn.Linear(1, 1))
    if kind == "micro_batches":
        options |= {"micro_batches": True, "limits": 2}
    if kind == "option":
        given = {"find_unused_parameters": True}
    if kind == "batchnorm":
        model.append(nn.BatchNorm1d(1))
    with contextlib.closing(paceline.Session(Numbered(12), **options)) as run:
        world = dist.get_world_size()
        if kind == "part":
            sharded(model[0], Sharding())
        elif kind == "ignored":
            ignored = {model[1].weight}
            fsdp.fully_shard(
                model, mesh=device_mesh.init_device_mesh("cpu", (world,)), ignored_params=ignored
            )
        elif kind == "mesh":
            shape = (world // 2, 2)
            mesh = device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
            fsdp.fully_shard(model, mesh=mesh["dp"])
        else:
            sharded(model, Sharding(units=False))
        if kind == "factor":
            model.set_gradient_divide_factor(1.0)
        if kind == "hook":
            model.set_all_reduce_hook(lambda reduced: None)
        if kind in ("twice", "profile", "later", "logged"):
            assert run.wrap(model) is model
        if kind == "later":
            model.set_gradient_divide_factor(1.0)
        # A rank that comes late finds that another one has refused it already.
        late = (PacelineError,) if kind == "later" else ()
        with pytest.raises((ValueError, TypeError, *late)) as error:
            if kind == "profile":
                run.profile(lambda count: None)
            elif kind in ("later", "logged"):
                for _, x, y in run.loader():
                    mse_loss(model(x), y).backward()
                    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    run.log(loss=1.0, norm=norm)  # replicated: each rank has the whole of it
                    run.log(loss=1.0, weight=next(model.parameters()))
            else:
                run.wrap(model, **given)
        return str(error.value)


def closed() -> tuple[bool, list[int]]:
    """A second session wraps the model of one that is closed; hooks of its model afterwards."""
    model = sharded(network(), Sharding())
    same = []
    for _ in range(2):
        with contextlib.closing(paceline.Session(Numbered(12), global_batch=4)) as run:
            same.append(run.wrap(model) is model)
            for _, x, y in run.loader():
                mse_loss(model(x), y).backward()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return all(same), hooks


def save_and_go_on(directory: str, epochs: int, how: Sharding | None) -> tuple[Tensor, Tensor, int]:
    """Trains with checkpoints: parameters at the start and in the end, and the first step."""
    with contextlib.closing(paceline.Session(Numbered(24), global_batch=4)) as run:
        model = network() if how is None else sharded(network(), how)
        return gone_on(run, model, directory, epochs)


def gone_on(
    run: paceline.Session, made: nn.Module, directory: str, epochs: int
) -> tuple[Tensor, Tensor, int]:
    loader, model = run.loader(), run.wrap(made)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    run.checkpoint(directory, model, optimizer, every_steps=6)
    began = torch.cat([whole(p).flatten() for p in model.parameters()])
    first = -1
    for _ in run.epochs(epochs):
        for _, x, y in loader:
            first = run.step if first < 0 else first
            mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    ended = torch.cat([whole(p).flatten() for p in model.parameters()])
    return began, ended, first
