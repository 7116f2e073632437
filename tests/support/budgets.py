"""Cases for ranks: training in steps of a token budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import paceline
from support.sessions import Sized, network, parameters, session


@dataclass
class Seen:
    steps: list[tuple[int, int, list[int]]] = field(default_factory=list)  # epoch, step, samples
    weights: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)  # len(loader), in each step
    ahead: list[int] = field(default_factory=list)  # len(loader), before each epoch
    trained: list[int] = field(default_factory=list)  # samples of all ranks, after each step
    total: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    parameters: Tensor = field(default_factory=lambda: torch.empty(0))


def train(
    count: int,
    epochs: int,
    options: dict[str, Any],
    state: dict[str, Any] | None = None,
    save_at: int | None = None,
) -> Seen:
    """A loop whose loss is a mean over size units, as over tokens."""
    seen, sizes = Seen(), torch.tensor(Sized(count).sizes)
    with session(count, options) as run:
        if state is not None:
            run.load_state_dict(state)
        loader, model = run.loader(), run.wrap(network().double())
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        seen.total = run.total_steps(epochs)
        for _ in run.epochs(epochs):
            seen.ahead.append(len(loader))
            for indices, x, y in loader:
                each = (model(x.double()) - y.double()).square().squeeze(1)
                weight = sizes[indices].double()
                optimizer.zero_grad()
                ((each * weight).sum() / weight.sum()).backward()
                optimizer.step()
                batch = run.batch
                used = [] if batch.empty else indices.tolist()
                seen.steps.append((batch.epoch, batch.step, used))
                seen.weights.append(batch.weight)
                seen.lengths.append(len(loader))
                seen.trained.append(run._loop.progress.trained.upto(batch.step))
                if batch.step == save_at:
                    seen.state = run.state_dict()
                    break
            if seen.state:
                break
        seen.parameters = parameters(model)
    return seen


def refused(options: dict[str, Any]) -> str:
    """What a session says against these options, on every rank."""
    try:
        paceline.Session(Sized(12), **options).close()
    except (TypeError, ValueError, paceline.PacelineError) as error:
        return str(error)
    return ""
