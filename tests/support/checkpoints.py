"""Cases for ranks: training that saves checkpoints and goes on from them."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import paceline
from paceline.train.checkpoint.saver import Saver
from paceline.train.sync.outer import Outer
from paceline.wire import ALLREDUCE
from paceline.wire.synchronisation import Synchronisation
from support.relaxing import planned
from support.sessions import Numbered, network, parameters


@dataclass
class Log:
    steps: list[int] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    after: dict[int, Tensor] = field(default_factory=dict)  # step → parameters in the next step
    saved: list[int] = field(default_factory=list)  # how many steps checkpoints were of
    began: Tensor = field(default_factory=lambda: torch.empty(0))  # parameters at the start
    momentum: Tensor = field(default_factory=lambda: torch.empty(0))  # of a parameter, then
    outer: list[OuterStep] = field(default_factory=list)


@dataclass
class OuterStep:
    step: int  # in which the rank was
    part: int
    mean: Tensor
    becomes: Tensor


def train(
    directory: str,
    epochs: int,
    often: dict[str, Any],
    chain: list[Synchronisation] | None = None,
    accumulate: int = 1,
    count: int = 24,
    first: Synchronisation = ALLREDUCE,
) -> Log:
    """Trains N samples in steps of 4, in segments of four steps, with checkpoints."""
    log = Log()
    torch.manual_seed(0)
    save, step = Saver.save, Outer.step

    def stepped(outer: Outer, rules: Any, part: int, mean: Tensor) -> Tensor:
        mean = mean.clone()
        becomes = step(outer, rules, part, mean)
        log.outer.append(OuterStep(log.steps[-1], part, mean, becomes.clone()))
        return becomes

    def noted(saver: Saver, position: Any, *more: Any) -> None:
        log.saved.append(position.step)
        save(saver, position, *more)

    with (
        mock.patch.object(Saver, "save", noted),
        mock.patch.object(Outer, "step", stepped),
        planned(chain or [ALLREDUCE], first=first),
        contextlib.closing(paceline.Session(Numbered(count), global_batch=4)) as session,
    ):
        loader = session.loader()
        model = session.wrap(network())
        optimizer = session.optimizer(torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))
        session.checkpoint(directory, model, optimizer, **often)
        log.began = parameters(model).clone()
        if optimizer.state:
            log.momentum = next(iter(optimizer.state.values()))["momentum_buffer"].clone()
        for _ in session.epochs(epochs):
            for indices, x, y in loader:
                if log.steps:
                    log.after[log.steps[-1]] = parameters(model).clone()
                log.steps.append(session.step)
                log.used += [] if session.batch.empty else indices.tolist()
                last = (session.step + 1) % accumulate == 0
                with contextlib.nullcontext() if last else model.no_sync():
                    mse_loss(model(x), y).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
            if log.steps:  # not in an epoch that was over at the checkpoint
                log.after[log.steps[-1]] = parameters(model).clone()
    return log


def refused(directory: str, ours: dict[int, dict[str, Any]]) -> str:
    """What the session says to arguments that each rank has of its own."""
    with contextlib.closing(paceline.Session(Numbered(8), global_batch=4)) as session:
        model = session.wrap(network())
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        try:
            session.checkpoint(directory, model, optimizer, **ours[session.rank])
        except (ValueError, paceline.PacelineError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def full_disk(directory: str) -> tuple[list[int], list[str]]:
    """The second checkpoint cannot be written on rank 1: how many there are, and what is logged."""
    from paceline.train.checkpoint import saver, storage

    words: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(saver.__name__).addHandler(handler)
    write = storage.FileSystemWriter.write_data

    def failing(writer: Any, plan: Any, planner: Any) -> Any:
        if torch.distributed.get_rank() == 1 and "04" in Path(writer.path).name:
            raise OSError(28, "No space left on device")
        return write(writer, plan, planner)

    with mock.patch.object(storage.FileSystemWriter, "write_data", failing):
        log = train(directory, 1, {"every_steps": 2, "keep": 9})
    logging.getLogger(saver.__name__).removeHandler(handler)
    return log.steps, words


def failing_state(directory: str, rank: int) -> tuple[list[int], list[str]]:
    """The optimiser's first `state_dict` fails on a rank: the steps that are trained, and logged.

    Rank 0 alone has the optimiser's state in a checkpoint; of the random numbers each rank has its.
    """
    from paceline.train.checkpoint import saver

    words: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: words.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(saver.__name__).addHandler(handler)
    state, calls = saver.random_state, []

    def failing(own: int) -> Any:
        calls.append(own)
        if len(calls) == 1 and own == rank:
            raise KeyError("exp_avg")  # as optimisers with states of their own raise
        return state(own)

    with mock.patch.object(saver, "random_state", failing):
        log = train(directory, 1, {"every_steps": 2, "keep": 9})
    logging.getLogger(saver.__name__).removeHandler(handler)
    return log.steps, words


def refused_optimiser(directory: str) -> str:
    """What the session says to an optimiser of whose state each rank has a part."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with contextlib.closing(paceline.Session(Numbered(8), global_batch=4)) as session:
        model = session.wrap(network())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        try:
            session.checkpoint(directory, model, optimizer, every_steps=2)
        except TypeError as error:
            return str(error)
    return ""
