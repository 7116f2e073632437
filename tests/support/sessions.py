"""Cases for ranks: whole training loops through `paceline.Session`."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import paceline
from paceline import PacelineError, wire
from paceline.train import startup, timing
from paceline.wire import bus

WIDTH = 4


class Numbered(torch.utils.data.Dataset[tuple[int, Tensor, Tensor]]):
    """Sample i: i, and an input and a target made from it."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, WIDTH, generator=generator)
        self.y = torch.randn(count, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.y[index]


class Sized(Numbered):
    """With its sizes: 1, 2, 3, 1, 2, 3, …"""

    @property
    def sizes(self) -> list[float]:
        return [1.0 + index % 3 for index in range(len(self))]


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@dataclass
class Log:
    batches: list[tuple[int, int, list[int]]] = field(default_factory=list)  # epoch, step, samples
    weights: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    parameters: Tensor = field(default_factory=lambda: torch.empty(0))
    state: dict[str, Any] = field(default_factory=dict)
    stopped: bool = False


@contextlib.contextmanager
def session(count: int, options: dict[str, Any]) -> Iterator[paceline.Session]:
    made = paceline.Session(Sized(count), **options)
    with contextlib.closing(made):
        yield made


def train(
    count: int,
    epochs: int,
    options: dict[str, Any],
    loading: dict[str, Any] | None = None,
    state: dict[str, Any] | None = None,
    save_at: int | None = None,
    at_step: Callable[..., None] | None = None,
    *arguments: Any,
) -> Log:
    """A plain training loop.

    Args:
        save_at: step after which to take the state and leave.
        at_step: called with session, step and `arguments` before each step's forward pass.
    """
    log = Log()
    with session(count, options) as run:
        if state is not None:
            run.load_state_dict(state)
        loader = run.loader(**(loading or {}))
        model = run.wrap(network())
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for epoch in run.epochs(epochs):
            log.epochs.append(epoch)
            for indices, x, y in loader:
                batch = run.batch
                if at_step is not None:
                    at_step(run, batch.step, *arguments)
                optimizer.zero_grad()
                loss = mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                run.log(loss=loss)
                used = [] if batch.empty else indices.tolist()
                log.batches.append((batch.epoch, batch.step, used))
                log.weights.append(batch.weight)
                log.loads.append(batch.load)
                if batch.step == save_at:
                    log.state = run.state_dict()
                    break
            if log.state:
                break
        log.stopped = run.stopped
        log.state = log.state or run.state_dict()
        log.parameters = parameters(model)
    return log


def evaluating(count: int, epochs: int, options: dict[str, Any]) -> list[str]:
    """Logs metrics and evaluates before, in and after epochs; the refusals of wrong calls."""
    refusals = []
    with session(count, options) as run:
        run.evaluated(accuracy=0.0)
        loader, model = run.loader(), run.wrap(network())
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for epoch in run.epochs(epochs):
            for indices, x, y in loader:
                optimizer.zero_grad()
                loss = mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
                run.log(loss=loss, rank=run.rank, first=indices.float().mean())
                if run.step == 1:
                    run.evaluated(samples=1 + run.rank, within=torch.tensor(float(run.rank)))
            run.evaluated(accuracy=epoch + 0.5, loss=1.0)
            run.evaluated(samples=run.rank, part=1.0)  # rank 0 had none
        for wrong in ({}, {"samples": -1, "a": 1.0}, {"samples": 1.5, "a": 1.0}, {"a b": 1.0}):
            try:
                run.evaluated(**wrong)
            except (TypeError, ValueError) as error:
                refusals.append(str(error))
    return refusals


Figures = dict[str, float]


def figures(count: int, batch: int) -> tuple[Figures, list[tuple[int, int, float, Figures]]]:
    """Figures before the loop; and of each step: its number, samples, load, and figures in it."""
    with session(count, {"global_batch": batch}) as run:
        first, steps = run.figures, []
        model = run.wrap(network())
        for _, x, y in run.loader():
            mse_loss(model(x), y).backward()
            steps.append((run.step, run.batch.samples, run.batch.load, run.figures))
    return first, steps


def kill_at(run: paceline.Session, step: int, when: int, pid: int) -> None:
    if step == when and run.rank == 0:
        os.kill(pid, signal.SIGKILL)


def stop_at(run: paceline.Session, step: int, when: int, url: str) -> None:
    """An operator stops the run at a step; rank 0 waits until the order must have been heard."""
    if step == when and run.rank == 0:
        client = bus.connect(url)
        bus.publish(client, wire.control("r1"), wire.StopTraining("operator", 0), "r1")
        client.close()
        time.sleep(0.3)


def linger(url: str, linger_s: float) -> tuple[int, bool]:
    """An operator stops the run; in its last step rank 1 has long work after the reduction.

    Returns:
        The last step, and whether the session says that it was stopped.
    """
    with session(40, {"global_batch": 4}) as run:
        model = run.wrap(network())
        for _, x, y in run.loader():
            stop_at(run, run.step, 3, url)
            mse_loss(model(x), y).backward()
            if run.step == 3 and run.rank == 1:
                time.sleep(linger_s)
        return run.step, run.stopped


def wait_at(run: paceline.Session, step: int, rank: int, wait_s: float) -> None:
    if run.rank == rank:
        time.sleep(wait_s)


def plain_ddp(count: int, epochs: int, global_batch: int, seed: int) -> Log:
    """What the same training is without Paceline."""
    log = Log()
    data = Numbered(count)
    sampler = torch.utils.data.DistributedSampler(data, seed=seed)
    local = global_batch // dist.get_world_size()
    loader = torch.utils.data.DataLoader(data, local, sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    step = 0
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for indices, x, y in loader:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            log.batches.append((epoch, step, indices.tolist()))
            step += 1
    log.parameters = parameters(model)
    return log


class PreparedOptimizer:
    """As a framework such as Accelerate puts one around the script's optimiser."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.optimizer.step(closure)  # type: ignore[arg-type]


def unwrapped(around: str) -> tuple[str, int, bool]:
    """Trains with the loader, but never gives the session the model.

    Args:
        around: the model: "ddp", "framework" (own DDP and optimiser), or "nothing".

    Returns:
        What the session says against it, in which step, and whether the parameters are untouched.
    """
    with session(12, {"global_batch": 4}) as run:
        loader = run.loader()
        alone = network()
        several = dist.is_initialized() and around != "nothing"
        model = DistributedDataParallel(alone) if several else alone
        plain = torch.optim.SGD(model.parameters(), 0.05)
        optimizer = PreparedOptimizer(plain) if around == "framework" else plain
        before = [parameter.detach().clone() for parameter in alone.parameters()]
        with pytest.raises(paceline.PacelineError) as refused:
            for _, x, y in loader:
                mse_loss(model(x), y).backward()
                optimizer.step()
        untouched = all(map(torch.equal, before, alone.parameters()))
        return str(refused.value), run.step, untouched


def zipped() -> Tensor:
    """Two sessions in one loop; only the second one has a model. That model's parameters."""
    with session(12, {"global_batch": 4}) as data, session(12, {"global_batch": 4}) as run:
        model = run.wrap(network())
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for (_, more, _), (_, x, y) in zip(data.loader(), run.loader(), strict=False):
            optimizer.zero_grad()
            (mse_loss(model(x), y) + 0 * more.sum()).backward()
            optimizer.step()
        return parameters(model)


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """What this rank warns of about models and optimisers."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline.train.unwrapped").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("paceline.train.unwrapped").removeHandler(handler)


def adversaries(kind: str) -> tuple[list[str], Tensor]:
    """Trains a wrapped model, and another one beside it.

    Args:
        kind: what reduces the other one's gradients: "nothing", "session", its own "ddp", or the
            "script"; "one optimiser" of both, and nothing reduces the other one's.

    Returns:
        What this rank warns of, and the other model's parameters.
    """
    with warned() as said, session(16, {"global_batch": 4}) as run:
        generator, other = run.wrap(network()), network()
        judge = {"session": run.wrap, "ddp": DistributedDataParallel}.get(kind, lambda m: m)(other)
        groups = [list(generator.parameters()), list(other.parameters())]
        made = [torch.optim.SGD(p, 0.05) for p in groups]
        if kind == "one optimiser":
            made = [torch.optim.SGD([*groups[0], *groups[1]], 0.05)]
        for _, x, y in run.loader():
            for model in (judge, generator):
                mse_loss(model(x), y).backward()
            if kind == "script":
                for parameter in other.parameters():
                    dist.all_reduce(parameter.grad)
            for optimizer in made:
                optimizer.step()
                optimizer.zero_grad()
    return said, parameters(other)


def gan(sharded: bool) -> tuple[list[str], Tensor]:
    """Trains a generator and its discriminator, both wrapped.

    The generator's loss passes through the discriminator, which gets gradients by that, too.

    Args:
        sharded: the optimisers' state is divided among the ranks.

    Returns:
        What this rank warns of, and the parameters of both.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which it uses
        from torch.distributed.optim import ZeroRedundancyOptimizer
    with warned() as said, session(24, {"global_batch": 4}) as run:
        torch.manual_seed(2)
        generator, judge = run.wrap(nn.Linear(WIDTH, WIDTH)), run.wrap(network())
        optimisers: list[torch.optim.Optimizer] = [
            ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
            if sharded
            else torch.optim.Adam(model.parameters(), lr=0.01)
            for model in (generator, judge)
        ]
        for _, x, y in run.loader():
            made = generator(x)
            (mse_loss(judge(x), y) + mse_loss(judge(made.detach()), -y)).backward()
            optimisers[1].step()
            mse_loss(judge(made), y).backward()
            optimisers[0].step()
            for optimiser in optimisers:
                optimiser.zero_grad()
        return said, torch.cat([parameters(generator), parameters(judge)])


def wrapped_elsewhere(kind: str) -> str:
    """What `Session.wrap` says to a model that something else has wrapped or split.

    Args:
        kind: "ddp"; "part": DDP around a part of the model; "twice": by this session; "fsdp1", or
            "dtensor": a parameter of it.
    """
    model: Any = nn.Sequential(network(), nn.Linear(1, 1))
    with session(12, {"global_batch": 4}) as run:
        if kind == "ddp":
            model = DistributedDataParallel(model)
        elif kind == "part":
            model[1] = DistributedDataParallel(model[1])
        elif kind == "twice":
            model = run.wrap(model)
        else:
            model = _sharded(model, kind)
        with pytest.raises(ValueError) as refused:
            run.wrap(model)
        return str(refused.value)


def wrapped_again() -> str:
    """What DistributedDataParallel says to a model that a session has wrapped."""
    with session(12, {"global_batch": 4}) as run:
        model = run.wrap(network())
        with pytest.raises(PacelineError) as refused:
            DistributedDataParallel(model)
        return str(refused.value)


def _sharded(model: nn.Module, kind: str) -> nn.Module:
    from torch.distributed import device_mesh, fsdp, tensor  # import takes a second

    if kind == "fsdp1":  # making a real one needs an accelerator

        class Sharded(fsdp.FullyShardedDataParallel):
            def __init__(self) -> None:
                nn.Module.__init__(self)
                self._fsdp_wrapped_module = model

        return Sharded()
    mesh = device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    return tensor.distribute_module(model, mesh)


def one_cycle(count: int, epochs: int, global_batch: int) -> tuple[int, int, int]:
    """Trains with the documented schedule: steps of an epoch, by session and by loader, and done.

    OneCycleLR raises where it is stepped more often than it was told; fewer leave it unfinished.
    """
    with session(count, {"global_batch": global_batch}) as run:
        loader = run.loader()
        model = run.wrap(network())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=3e-3, total_steps=epochs * run.steps_per_epoch + 1
        )
        done = 0
        for _ in run.epochs(epochs):
            for _, x, y in loader:
                mse_loss(model(x), y).backward()
                optimizer.step()
                schedule.step()
                done += 1
        return run.steps_per_epoch, len(loader), done


def loop_twice(count: int, options: dict[str, Any], leave_at: int) -> Log:
    """Plain `for … in range` over epochs, the first of which is left early."""
    log = Log()
    with session(count, options) as run:
        loader = run.loader()
        for epoch in range(2):
            for position, (indices, _, _) in enumerate(loader):
                log.batches.append((run.batch.epoch, run.batch.step, indices.tolist()))
                if epoch == 0 and position == leave_at:
                    break
    return log


def peek_on_rank_0(count: int, options: dict[str, Any]) -> str:
    """Rank 0 alone begins an epoch and leaves it."""
    with session(count, options) as run:
        loader = run.loader()
        if run.rank == 0:
            next(iter(loader))
        try:
            for _ in loader:
                pass
        except paceline.PacelineError as error:
            return str(error)
    return ""


def uneven_workers(count: int, options: dict[str, Any]) -> str:
    """Rank 1 has data loader workers, rank 0 has none."""
    with session(count, options) as run:
        try:
            for _ in run.loader(num_workers=run.rank):
                pass
        except ValueError as error:
            return str(error)
    return ""


def different_arguments(count: int) -> str:
    try:
        with session(count, {"global_batch": 4 + dist.get_rank()}):
            return ""
    except ValueError as error:
        return str(error)


def unreachable(rank: int) -> str:
    """The connection of this rank to rank 0's store does not come about."""

    def refuse(host: str, *_: Any, **__: Any) -> Any:
        raise dist.DistNetworkError(f"no route to {host}")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setattr(startup, "TCPStore", refuse)
        try:
            with session(12, {"global_batch": 4}):
                return ""
        except paceline.PacelineError as error:
            return str(error)


def bad_sizes(kind: str) -> str:
    """Sizes that only rank 0 looks at."""

    def broken(sample: Any) -> float:
        if kind == "negative":
            return -1.0
        raise KeyError("no such recording")

    try:
        with session(8, {"global_batch": 4, "sizes": broken}):
            return ""
    except (ValueError, KeyError, paceline.PacelineError) as error:
        return f"{type(error).__name__}: {error}"


def mixed_precision(scale: float) -> Tensor:
    """Three steps with autocast and a gradient scaler, some ranks without samples."""
    with session(9, {"global_batch": 3, "seed": 5}) as run:
        model = run.wrap(network())
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _, x, y in run.loader():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return parameters(model)


def held_while_accumulating(*arguments: Any) -> float:
    """Seconds that `accumulate` has this rank sleep, for its emulated device to be done."""
    slept = 0.0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += seconds
        time.sleep(seconds)

    own = SimpleNamespace(**{**vars(time), "sleep": sleep})
    with mock.patch.object(timing, "time", own):
        accumulate(*arguments)
    return slept


def accumulate(
    count: int,
    every: int,
    options: dict[str, Any],
    discard: str,
    around: bool = False,
) -> Tensor:
    """Gradients accumulated over `every` steps.

    Args:
        discard: drop what an epoch's end leaves over ("early": before the next epoch, "late": after
            its first forward pass) or carry it on ("").
        around: one `no_sync` around several steps, instead of one in each.
    """
    with session(count, options) as run, contextlib.ExitStack() as local:
        model: Any = run.wrap(network())
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        loader = run.loader()
        for _ in run.epochs(2):
            if discard == "early":
                local.close()
                optimizer.zero_grad()
            for position, (_, x, y) in enumerate(loader, 1):
                last = position % every == 0
                if last or not around:
                    local.close()
                if not last and (position % every == 1 or not around):
                    local.enter_context(model.no_sync())
                loss = mse_loss(model(x), y)
                if discard == "late" and position == 1:
                    optimizer.zero_grad()
                loss.backward()
                if not around:
                    local.close()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
        return parameters(model)


def killed(rank: int) -> None:
    """One rank's process ends in step 3."""
    with session(40, {"global_batch": 4}) as run:
        model = run.wrap(network())
        for _, x, y in run.loader():
            if run.rank == rank and run.step == 3:
                os._exit(1)
            mse_loss(model(x), y).backward()


def two_sessions(counts: tuple[int, int]) -> list[list[int]]:
    """The samples that each of two sessions of one script gives this rank, one epoch each."""
    seen = []
    for count in counts:
        with session(count, {"global_batch": 4}) as run:
            seen.append([])
            for indices, _, _ in run.loader():
                run.log(loss=0.0)
                seen[-1] += indices.tolist()
    return seen


def hook_and_join() -> list[str]:
    """What WeightedDDP says to another hook and to join()."""
    with session(4, {"global_batch": 4}) as run:
        model: Any = run.wrap(network())
        said = []
        for call in (lambda: model.register_comm_hook(None, print), model.join):
            try:
                call()
            except ValueError as error:
                said.append(str(error))
        return said


def compiled(count: int, options: dict[str, Any], *, before: bool) -> list[str]:
    """Trains an epoch with a compiled model; what this rank warns of changing shapes.

    Args:
        before: the model is compiled before it is wrapped, else after.
    """
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("paceline.train.features.shapes").addHandler(handler)

    def compile_(model: nn.Module) -> Any:
        return torch.compile(model, backend="eager", dynamic=False)

    torch._dynamo.reset()
    with session(count, options) as run:
        loader = run.loader()
        model = run.wrap(compile_(network())) if before else compile_(run.wrap(network()))
        for _, x, y in loader:
            mse_loss(model(x), y).backward()
    logging.getLogger("paceline.train.features.shapes").removeHandler(handler)
    return warnings
