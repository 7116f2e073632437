"""Cases of real ranks that are in step, or not; each rank returns how its training ended."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from torch.nn.functional import mse_loss

from support.sessions import network, parameters, session

COUNT, EPOCHS, OPTIONS = 48, 2, {"global_batch": 4}


def trained(kind: str, rank: int, folder: Path) -> None:
    """Trains; one rank differs from the others. The processes end with it.

    Args:
        kind: how it differs; see the code.
        folder: where each rank writes the error that ended its training, or "done".
    """
    try:
        said = _trained(kind, dist.get_rank() == rank)
    except Exception as error:
        said = str(error)
    (folder / str(dist.get_rank())).write_text(said)
    os._exit(1)


def _trained(kind: str, differs: bool) -> str:
    with session(COUNT, OPTIONS) as run:
        loader, model = run.loader(), run.wrap(network())
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for _ in run.epochs(EPOCHS):
            for _, x, y in loader:
                loss = mse_loss(model(x), y)
                here = differs and run.step == 5
                if kind == "sums and skips":
                    dist.all_reduce(torch.ones(()))
                if here and kind in ("skips", "sums and skips"):
                    continue
                if here and kind == "zero":
                    loss = torch.zeros((), requires_grad=True)
                if here and kind == "raises":
                    raise ValueError("no such thing")
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if here and kind == "twice":
                    mse_loss(model(x), y).backward()
                if here and kind == "breaks":
                    break
            if kind == "stops" and differs:
                break
    return "done"


def regular(kind: str) -> tuple[torch.Tensor, int]:
    """Trains with an unusual rhythm that all ranks share; parameters and newest step."""
    with session(COUNT, OPTIONS) as run:
        loader, model, other = run.loader(), run.wrap(network()), run.wrap(network())
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.05)
        for epoch in run.epochs(EPOCHS):
            for place, (_, x, y) in enumerate(loader):
                if kind == "all skip" and run.step in (0, 5, 6):
                    continue
                accumulates = kind == "accumulates" and place % 3 < 2
                held: Any = contextlib.ExitStack()
                with held:
                    if accumulates:
                        held.enter_context(model.no_sync())
                    mse_loss(model(x), y).backward()
                if kind == "two models" or (kind == "sometimes two" and run.step in (3, 4, 9)):
                    mse_loss(other(x), y).backward()
                if not accumulates:
                    optimizer.step()
                    optimizer.zero_grad()
                if kind == "all break" and place == 3 + epoch:
                    break
        return torch.cat([parameters(model), parameters(other)]), run.step


def two_sessions(own_model: bool, batches: tuple[int, int]) -> str:
    """One model sees batches of two sessions in each step; what is refused.

    Args:
        own_model: the second session wraps a model of its own instead.
        batches: samples of each global batch. Limits let rank 0 have two of them.
    """
    options = [{"global_batch": batch, "limits": [2, batch]} for batch in batches]
    with session(COUNT, options[0]) as first, session(COUNT, options[1]) as second:
        model = first.wrap(network())
        other = second.wrap(network()) if own_model else model
        with contextlib.suppress(StopIteration):
            for (_, x, y), (_, u, v) in zip(first.loader(), second.loader(), strict=False):
                try:
                    (mse_loss(model(x), y) + mse_loss(other(u), v)).backward()
                except Exception as error:
                    return str(error)
    return "trained"


def gathers(kind: str, limits: list[int]) -> str:
    """Gathers in each step what is as long as the rank's batch; the error, or "trained".

    Args:
        kind: "all_gather", "reduce_scatter", "into_tensor", "differentiable", or "numbers", which
            has the same shape on all ranks.
    """
    with session(COUNT, {"global_batch": 8, "limits": limits}) as run:
        model = run.wrap(network())
        for _, x, y in run.loader():
            made, world = model(x), dist.get_world_size()
            try:
                if kind == "all_gather":
                    dist.all_gather([torch.empty_like(made) for _ in range(world)], made.detach())
                elif kind == "into_tensor":
                    into = torch.empty(world * len(made), *made.shape[1:])
                    dist.all_gather_into_tensor(into, made.detach())
                elif kind == "reduce_scatter":
                    every = [made.detach().clone() for _ in range(world)]
                    dist.reduce_scatter(torch.empty_like(made), every)
                elif kind == "differentiable":
                    made = torch.cat(dist.nn.functional.all_gather(made))[: len(y)]
                else:
                    dist.all_gather([torch.empty(3) for _ in range(world)], torch.ones(3))
                mse_loss(made, y).backward()
            except Exception as error:
                return f"{type(error).__name__}: {error}"
    return "trained"
