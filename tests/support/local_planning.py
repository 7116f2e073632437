"""Cases for ranks that rank 0 plans for, because there is no server."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import mse_loss

import paceline
from paceline.train.plan import local
from support import sessions
from support.waiting import DEADLINE_S


@dataclass
class Trained:
    """What one rank trained, by epoch."""

    samples: list[list[int]] = field(default_factory=list)
    loads: list[list[float]] = field(default_factory=list)
    # Of the segments that were adopted in the epoch; on rank 0.
    sources: list[list[str]] = field(default_factory=list)
    # Their kinds of synchronisation, and their policies.
    kinds: list[list[str]] = field(default_factory=list)
    policies: list[set[str]] = field(default_factory=list)
    # Whether rank 0 may plan.
    planned: bool = False
    epoch_s: list[float] = field(default_factory=list)
    # The reports of epochs that were logged.
    lines: list[str] = field(default_factory=list)
    parameters: Tensor = field(default_factory=lambda: torch.empty(0))


def train(
    count: int, options: dict[str, Any], epochs: int | None = None, kills: int = 0
) -> Trained:
    """Train `epochs`, or until a whole epoch was planned by rank 0's policy.

    Args:
        kills: how often the planning process is killed after such an epoch.
    """
    trained, deadline = Trained(), time.monotonic() + DEADLINE_S
    log = logging.getLogger("paceline")
    handler = Lines(trained.lines)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        # The planning process of a busy machine is slow.
        with mock.patch.object(local, "_LAST_REPORT_S", DEADLINE_S):
            return _train(trained, deadline, count, options, epochs, kills)
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


def train_second(count: int, options: dict[str, Any], epochs: int | None) -> Trained:
    """Train in a script's second session; the first one trains an epoch."""
    train(count, options, 1)
    return train(count, options, epochs)


class Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("epoch "):
            self._lines.append(record.getMessage())


def _train(
    trained: Trained,
    deadline: float,
    count: int,
    options: dict[str, Any],
    epochs: int | None,
    kills: int,
) -> Trained:
    session = paceline.Session(sessions.Sized(count), **options)
    loader = session.loader()
    model = session.wrap(sessions.network())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for epoch in session.epochs(10_000):
        samples, loads, sources = list[int](), list[float](), list[str]()
        kinds, policies, began = list[str](), set[str](), time.monotonic()
        for indices, x, y in loader:
            samples += indices.tolist() if session.batch.samples else []
            loads.append(session.batch.load)
            loss = mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (wiring := session._loop.wiring) and wiring.leader and wiring.leader._last:
                sources.append(wiring.leader._last.source)
                kinds.append(type(wiring.leader._last.synchroniser).__name__)
                policies.add(wiring.leader._last.policy)
        trained.samples.append(samples)
        trained.loads.append(loads)
        trained.sources.append(sources)
        trained.kinds.append(kinds)
        trained.policies.append(policies)
        trained.epoch_s.append(time.monotonic() - began)
        done = [epoch + 1 == epochs]
        if epochs is None:
            planned = set(sources) == {"local"}
            if planned and kills:
                kills -= 1
                kill_planners()
                planned = False
            done = [planned or time.monotonic() > deadline]
            if dist.is_initialized():
                dist.broadcast_object_list(done)
        if done[0]:
            break
    trained.planned = session._loop.context.planned
    trained.parameters = sessions.parameters(model)
    session.close()
    return trained


def planners() -> list[psutil.Process]:
    """The planning processes that this process has started."""
    found = []
    for child in psutil.Process(os.getpid()).children():
        # It may have ended just now.
        with contextlib.suppress(psutil.Error):
            found += [child] * any("planning" in word for word in child.cmdline())
    return found


def kill_planners() -> None:
    for process in planners():
        process.kill()
