"""Cases for ranks: the profiling phase, and training after it."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline.core.errors import PacelineError
from paceline.train.checkpoint.position import Position
from paceline.train.environment import Environment
from paceline.train.profile import Profile
from paceline.train.wiring import Findings, describe
from paceline.wire import Hello
from support.sessions import WIDTH, Sized, network, parameters, session

Answer = tuple[Profile | None, Hello, torch.Tensor, list[list[int]]]


def train(fits_on_rank_1: int | None) -> Answer:
    """One epoch after a profiling phase, or None: without; the profile, Hello, parameters, samples.

    Args:
        fits_on_rank_1: samples; None: no profiling phase.
    """
    with session(24, {"global_batch": 12}) as run:
        model: Any = run.wrap(network())

        def run_batch(samples: int) -> None:
            model(torch.randn(samples, WIDTH)).sum().backward()
            if run.rank == 1 and fits_on_rank_1 is not None and samples > fits_on_rank_1:
                raise MemoryError

        profile = None if fits_on_rank_1 is None else run.profile(run_batch)
        assert all(p.grad is None for p in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        seen = []
        for indices, x, y in run.loader():
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            seen.append(indices.tolist())
        loop = run._loop
        context = replace(loop.context, environment=Environment())
        findings = Findings(0, devices=loop.findings.devices, profiles=loop.findings.profiles)
        hello = describe(context, loop.startup, Position(), findings)
        return profile, hello, parameters(model), seen  # type: ignore[return-value]


def typical() -> tuple[dict[int, list[int]], list[str], list[tuple[int, int]], int]:
    """The samples of typical batches, what is said elsewhere, the profile, and how much it read."""
    with session(24, {"global_batch": 12}) as run:
        loader, model = run.loader(), run.wrap(network())
        read: list[int] = []
        data: Any = loader._loader.dataset
        plain = type(data).__getitem__
        type(data).__getitem__ = lambda self, index: (read.append(index), plain(self, index))[1]
        seen: dict[int, list[int]] = {}
        said = []

        def refused() -> None:
            try:
                loader.typical(2)
            except PacelineError as error:
                said.append(str(error))

        def run_batch(samples: int) -> None:
            indices, x, y = loader.typical(samples)
            seen[samples] = indices.tolist()
            mse_loss(model(x), y).backward()

        try:
            refused()
            profile = run.profile(run_batch)
            counted = len(read)
        finally:
            type(data).__getitem__ = plain
        for _ in loader:
            refused()
            break
        return seen, said, profile.times, counted


def fail_on(rank: int) -> tuple[str, Profile]:
    """What each rank raises when the callable raises on one; and what it measures after that."""
    with session(24, {"global_batch": 12}) as run:

        def run_batch(samples: int) -> None:
            if run.rank == rank and samples > 4:
                raise KeyError("no such layer")

        said = ""
        try:
            run.profile(run_batch)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        return said, run.profile(lambda samples: None)


def too_late() -> list[str]:
    """What a second call says, and one in the loop."""
    said = []

    def again(run: Any) -> None:
        try:
            run.profile(lambda samples: None)
        except PacelineError as error:
            said.append(str(error))

    with session(24, {"global_batch": 12}) as run:
        run.profile(lambda samples: None)
        again(run)
    with session(24, {"global_batch": 12}) as run:
        for _ in run.loader():
            again(run)
            break
    return said


def limited(limits: Any) -> list[int]:
    with session(24, {"global_batch": 12, "limits": limits}) as run:
        torch.distributed.barrier()  # a leader that leaves at once could not be met any more
        return run._loop.context.limits.samples


# Runs that begin under LBB, which profiles them by itself.


@dataclass
class Begun:
    """What one rank of a run that began under LBB saw, and the model before and after a profile."""

    times: list[list[tuple[int, float]]] = field(default_factory=list)  # of each rank
    limits: list[int] = field(default_factory=list)
    said: str = ""  # on stderr
    before: dict[str, Any] = field(default_factory=dict)
    inside: dict[str, Any] = field(default_factory=dict)
    samples: list[list[int]] = field(default_factory=list)  # of each step


class Stateful(nn.Module):
    """A network with running statistics, dropout, a buffer and a count of its own."""

    def __init__(self, *parts: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inner, self.norm = nn.Linear(WIDTH, 8), nn.BatchNorm1d(8)
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(8, 1)
        self.register_buffer("mean", torch.zeros(8))
        self.calls, self.parts = 0, parts

    def forward(self, x: Tensor) -> Tensor:
        assert self.training and self.dropout.training and self.norm.training
        self.calls += 1
        if "large" in self.parts and len(x) > 8 and dist.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        if "in model" in self.parts:
            dist.all_reduce(torch.tensor(float(len(x))))
        hidden = torch.relu(self.norm(self.inner(x)))
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        made: Tensor = self.head(self.dropout(hidden))
        return made.view(8, -1) if "fixed" in self.parts else made


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    network: Any = model.module
    return {
        "state": {name: value.clone() for name, value in network.state_dict().items()},
        "gradients": [p.grad for p in network.parameters() if p.grad is not None],
        "calls": network.calls,
        "optimizer": len(optimizer.state),
        "random": torch.get_rng_state(),
    }


def begin(*parts: str, steps: int = 1, **options: Any) -> Begun:
    """Train some steps of a run whose policy is in PACELINE_POLICY."""
    said, begun = io.StringIO(), Begun()
    with contextlib.redirect_stderr(said):
        run = paceline.Session(Sized(48), **{"global_batch": 16} | options)
        loader = run.loader()
        model = run.wrap(Stateful(*parts), batchnorm="sync" if "sync" in parts else "local")
        if "compiled" in parts:
            model.compile(backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        plain: Any = DistributedDataParallel(nn.Linear(WIDTH, 1)) if "plain" in parts else None
        begun.before = state_of(model, optimizer)
        if "called" in parts:
            run.profile(lambda n: model(loader.typical(n)[1]).mean().backward())
        connect = run._loop._connect

        def connect_next() -> None:
            begun.inside = state_of(model, optimizer)
            connect()

        run._loop._connect = connect_next  # type: ignore[method-assign]
        for indices, x, y in loader:
            optimizer.zero_grad()
            loss = model(x).flatten().sub(y.flatten()).square().mean()
            if "in loop" in parts:
                dist.all_reduce(loss.detach().clone())
            if "barrier" in parts:
                dist.barrier()
            if "functional" in parts:
                loss = loss + functional.all_reduce(loss.detach(), "sum", dist.group.WORLD)
            if "plain" in parts:
                loss = loss + plain(x).mean()
            loss.backward()
            optimizer.step()
            begun.samples.append(indices.tolist() if run.batch.samples else [])
            if len(begun.samples) == steps:
                break
        begun.times = [each.times for each in run._loop.findings.profiles]
        begun.limits = run._loop.context.limits.samples
        run.close()
    begun.said = said.getvalue()
    return begun


def begin_each(cases: list[tuple[tuple[str, ...], dict[str, Any]]]) -> list[Begun]:
    return [begin(*parts, **options) for parts, options in cases]


class Narrow(nn.Module):
    """A network for which memory runs out on rank 1 with over four samples, before training."""

    def __init__(self, run: paceline.Session) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.head, self.run = nn.Linear(WIDTH, 1), run

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 4 and dist.get_rank() == 1 and not self.run._loop.begun:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        made: Tensor = self.head(x)
        return made


def narrow(*, fits: bool) -> Begun:
    """Train two steps of a run with a low limit and a loss that does or does not fit."""
    said, begun = io.StringIO(), Begun()
    with contextlib.redirect_stderr(said):
        run = paceline.Session(Sized(48), global_batch=16)
        loader, model = run.loader(), run.wrap(Narrow(run))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for indices, x, y in loader:
            optimizer.zero_grad()
            error = (model(x).flatten() - y.flatten()).square()
            (error.mean() if fits else error.sum()).backward()
            optimizer.step()
            begun.samples.append(indices.tolist())
            if len(begun.samples) == 2:
                break
        begun.limits = run._loop.context.limits.samples
        run.close()
    begun.said = said.getvalue()
    return begun


def first_planned() -> tuple[list[list[tuple[int, float]]], list[int]]:
    """The profiles of all ranks, and this rank's number of samples up to the first plan."""
    run = paceline.Session(Sized(480), global_batch=16)
    loader, model = run.loader(), run.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.001)
    counts: list[int] = []
    for _ in range(20):
        for _, x, y in loader:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            counts.append(len(x))
            if counts[-1] != 8:
                break
        if counts[-1] != 8:
            break
    profiles = [each.times for each in run._loop.findings.profiles]
    run.close()
    return profiles, counts


def without_steps(*, asked: bool) -> list[str]:
    """The steps and the log of a run that was asked to end, or whose only epoch is done."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        run = paceline.Session(Sized(48), global_batch=16)
        run.wrap(network())
        if asked:
            run._loop.ask_to_end()
        run._loop.progress.epoch_is_done = not asked
        steps = sum(1 for _ in run.loader())
        run.close()
    return [str(steps), said.getvalue()]
