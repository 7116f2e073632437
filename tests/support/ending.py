"""Ranks that get a signal while they train with a declared checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch.nn.functional import mse_loss

from support.sessions import network, session


def signalled(
    folder: Path, number: int | None, rank: int, late: bool
) -> tuple[int, bool, list[str]]:
    """Trains; one rank gets a signal in step 5.

    Args:
        number: of the signal; None: rank 0's leader ends the plan, as after `paceline stop`.
        late: the script sets its handler in the loop, and not before the session.

    Returns:
        The newest step, whether the session was stopped, and what the script's handler saw: the
        newest checkpoint.
    """
    seen: list[str] = []

    def handler(*_: object) -> None:
        seen.extend(sorted(path.name for path in folder.iterdir()))

    before = signal.getsignal(number) if number is not None else None
    if number is not None and not late:
        signal.signal(number, handler)
    with session(4000, {"global_batch": 4}) as run:
        loader, model = run.loader(), run.wrap(network())
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        run.checkpoint(folder, model, optimizer, every_steps=4000)
        for epoch in run.epochs(100):
            if number is not None and late and epoch == 0:
                signal.signal(number, handler)
            for _, x, y in loader:
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                optimizer.step()
                if run.step == 5 and run.rank == rank:
                    if number is None:
                        run._loop.end_plan()
                    else:
                        os.kill(os.getpid(), number)
        ended = run.step, run.stopped, seen
    if number is not None:
        assert signal.getsignal(number) is handler, "the script has its handler back"
        signal.signal(number, before)
    return ended


def terminated(folder: Path) -> None:
    """Rank 1 gets SIGTERM, for which the script has no handler."""
    with session(4000, {"global_batch": 4}) as run:
        loader, model = run.loader(), run.wrap(network())
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        run.checkpoint(folder, model, optimizer, every_steps=4000)
        for _ in run.epochs(100):
            for _, x, y in loader:
                mse_loss(model(x), y).backward()
                optimizer.step()
                if run.step == 5 and run.rank == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
