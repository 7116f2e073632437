"""Cases for ranks: the profiling phase, and training after it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import mse_loss

from paceline.core.errors import PacelineError
from paceline.train.checkpoint.position import Position
from paceline.train.environment import Environment
from paceline.train.profile import Profile
from paceline.train.wiring import Findings, describe
from paceline.wire import Hello
from support.sessions import WIDTH, network, parameters, session

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
