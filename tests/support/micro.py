"""Cases for ranks: training whose parts of steps are computed in several micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler

import paceline
from paceline.wire.synchronisation import Synchronisation
from support.relaxing import planned
from support.sessions import WIDTH, Sized, network, parameters, session


class Overflowing(torch.amp.GradScaler):
    """Finds gradients that are not finite in the first steps, as scalers do with large scales."""

    most = 8.0

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self.get_scale() > self.most:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and parameter.grad.abs().sum() > 0:
                        parameter.grad.fill_(float("inf"))
        return super().step(optimizer, *args, **kwargs)


@dataclass
class Script:
    optimiser: str = "momentum"
    zeroes_after: bool = False  # it sets gradients to zero after the optimiser's step, not before
    clips: bool = False
    schedule: str = ""  # stepped in each turn: "step", or "plateau"
    scales: bool = False  # by a GradScaler that doubles its scale at each second update
    overflows: bool = False  # the scaler's first steps
    by_size: bool = False  # the loss is a mean over sizes
    loading: dict[str, Any] = field(default_factory=dict)

    def make(
        self, model: nn.Module
    ) -> tuple[torch.optim.Optimizer, Any, torch.amp.GradScaler | None]:
        optimiser: torch.optim.Optimizer
        if self.optimiser == "adamw":
            optimiser = torch.optim.AdamW(model.parameters(), 0.02, weight_decay=0.1)
        else:
            optimiser = torch.optim.SGD(model.parameters(), 0.05, 0.9, weight_decay=0.01)
        schedule: Any = None
        if self.schedule == "step":
            schedule = torch.optim.lr_scheduler.StepLR(optimiser, 3, 0.5)
        elif self.schedule == "plateau":
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimiser, patience=2)
        scaler = None
        if self.scales:
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
            if self.overflows:
                scaler = Overflowing("cpu", init_scale=128.0, growth_interval=100)
        return optimiser, schedule, scaler

    def loss(self, output: Tensor, y: Tensor, indices: Tensor) -> Tensor:
        """The mean that the session is told of."""
        if not self.by_size:
            return mse_loss(output, y)
        weights = (1.0 + indices % 3)[:, None]
        return (weights * (output - y) ** 2).sum() / weights.sum()


@dataclass
class Trained:
    parameters: Tensor
    turns: list[tuple[int, int, bool, float]] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)  # of each turn
    rate: float = 0.0  # of the optimiser, in the end


def turn(
    script: Script,
    model: nn.Module,
    made: tuple[torch.optim.Optimizer, Any, torch.amp.GradScaler | None],
    batch: tuple[Tensor, Tensor, Tensor],
) -> None:
    optimiser, schedule, scaler = made
    indices, x, y = batch
    if not script.zeroes_after:
        optimiser.zero_grad()
    loss = script.loss(model(x), y, indices)
    if scaler is None:
        loss.backward()
    else:
        scaler.scale(loss).backward()
        if not script.overflows:
            scaler.unscale_(optimiser)
    if script.clips:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if scaler is None:
        optimiser.step()
    else:
        scaler.step(optimiser)
        scaler.update()
    if script.schedule == "step":
        schedule.step()
    elif schedule is not None:
        schedule.step(1.0)
    if script.zeroes_after:
        optimiser.zero_grad()


def train(
    count: int,
    epochs: int,
    options: dict[str, Any],
    script: Script,
    chain: list[Synchronisation] | None = None,
) -> Trained:
    with (
        nullcontext() if chain is None else planned(chain, first=chain[0]),
        session(count, options | {"micro_batches": True}) as run,
    ):
        model = run.wrap(network())
        made = script.make(model)
        trained = Trained(parameters(model))
        loader = run.loader(**script.loading)
        for _ in run.epochs(epochs):
            for batch in loader:
                now = run.batch
                trained.turns.append((now.step, now.samples, now.last, now.weight))
                trained.samples.append(batch[0].tolist())
                turn(script, model, made, batch)
                run.log(loss=0.0)
        trained.parameters = parameters(model)
        trained.rate = made[0].param_groups[0]["lr"]
        return trained


def in_one_process(count: int, epochs: int, batch: int, script: Script) -> Trained:
    """The same training in plain PyTorch, each global batch at once."""
    data = Sized(count)
    model = network()
    made = script.make(model)
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for each in DataLoader(data, batch, sampler=sampler):
            turn(script, model, made, each)
    return Trained(parameters(model), rate=made[0].param_groups[0]["lr"])


def refused(count: int, options: dict[str, Any], body: Callable[..., None]) -> str:
    """What the session says against a loop's body; called with session, model and optimiser."""
    with session(count, options | {"micro_batches": True}) as run:
        model = run.wrap(network())
        optimiser = torch.optim.SGD(model.parameters(), 0.05)
        try:
            for _, x, y in run.loader():
                mse_loss(model(x), y).backward()
                body(run, model, optimiser)
        except (paceline.PacelineError, ValueError) as error:
            return str(error)
    return ""


def expect(count: int, options: dict[str, Any], body: Callable[..., None]) -> None:
    """Raises what the session says."""
    raise ValueError(refused(count, options, body))


def closure(run: paceline.Session, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    optimiser.step(lambda: 0.0)


def saves(run: paceline.Session, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    optimiser.step()
    run.state_dict()


def accumulates(run: paceline.Session, model: Any, optimiser: torch.optim.Optimizer) -> None:
    with model.no_sync():
        optimiser.step()


def steps_first(run: paceline.Session, model: Any, optimiser: torch.optim.Optimizer) -> None:
    if not run.batch.last:
        optimiser.step()


def adversary(run: paceline.Session, model: Any, optimiser: torch.optim.Optimizer) -> None:
    optimiser.step()
    model(torch.ones(2, WIDTH)).sum().backward()


def waits(run: paceline.Session, model: Any, optimiser: torch.optim.Optimizer) -> None:
    torch.distributed.barrier()


def trains_another(run: paceline.Session, model: Any, optimiser: torch.optim.Optimizer) -> None:
    other = torch.nn.Linear(1, 1)
    other(torch.ones(1, 1)).sum().backward()
    torch.optim.SGD(other.parameters(), 0.1).step()


def late_schedule(count: int, options: dict[str, Any]) -> list[float]:
    """Learning rates at the ends of steps, of a schedule that is made in the second step."""
    with session(count, options | {"micro_batches": True}) as run:
        model = run.wrap(network())
        optimiser = torch.optim.SGD(model.parameters(), 1.0)
        schedule = None
        rates = []
        for _, x, y in run.loader():
            mse_loss(model(x), y).backward()
            optimiser.step()
            if run.batch.step == 1 and schedule is None:
                schedule = torch.optim.lr_scheduler.StepLR(optimiser, 1, 0.5)
            if schedule is not None:
                schedule.step()
            if run.batch.last:
                rates.append(optimiser.param_groups[0]["lr"])
        return rates


def profiled(count: int, options: dict[str, Any]) -> int:
    """Limits of a run with a profiling phase, whose model is wrapped."""
    with session(count, options | {"micro_batches": True}) as run:
        model = run.wrap(network())
        run.profile(lambda n: model(torch.ones(n, WIDTH)).sum().backward(), most=4)
        for _, x, y in run.loader():
            mse_loss(model(x), y).backward()
        return len(run._loop.context.limits.samples)


def leaves(count: int, options: dict[str, Any]) -> str:
    """Leaves the loop in the middle of a step; what the next loop says."""
    with session(count, options | {"micro_batches": True}) as run:
        model = run.wrap(network())
        loader = run.loader()
        for _, x, y in loader:
            mse_loss(model(x), y).backward()
            break
        try:
            next(iter(loader))
        except paceline.PacelineError as error:
            return str(error)
    return ""
