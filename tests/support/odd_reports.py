"""Cases of odd reports: what a script gives `session.log`, `session.evaluated`, meshes, profiles.

Each runs on every rank, and returns what the script sees: words of an error, or None.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import fractions
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import paceline
from support.odd_scripts import Points, loss_of, plain, rows_of

VALUES: dict[str, Any] = {
    "float": 0.5,
    "int": 3,
    "tensor": torch.tensor(0.5),
    "tensor with a graph": torch.tensor(0.5, requires_grad=True) * 2,
    "tensor of integers": torch.tensor(3),
    "tensor of bfloat16": torch.tensor(0.5, dtype=torch.bfloat16),
    "numpy.float32": np.float32(0.5),
    "numpy.float64": np.float64(0.5),
    "numpy.int64": np.int64(3),
    "NaN": math.nan,
    "numpy NaN": np.float32("nan"),
    "infinite": torch.tensor(math.inf),
    "Fraction": fractions.Fraction(1, 2),
    "bool": True,
    "tensor of bool": torch.tensor(True),
}
WRONG: dict[str, Any] = {
    "tensor with a dimension": torch.ones(1),
    "tensor of several": torch.ones(3),
    "complex tensor": torch.tensor(1j),
    "complex": 1j,
    "word": "0.5",
    "None": None,
    "list": [0.5],
    "numpy array": np.ones(2),
}


def error_of(call: Callable[..., Any], *args: Any, **options: Any) -> str | None:
    """Kind and words of the error that a call ends with."""
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def training() -> Iterator[tuple[Any, ...]]:
    """A session with loader, wrapped model and optimiser."""
    torch.manual_seed(3)
    session = paceline.Session(Points(16), global_batch=8)
    try:
        loader = session.loader()
        model = session.wrap(plain())
        yield session, loader, model, torch.optim.SGD(model.parameters(), lr=0.1)
    finally:
        session.close()


def turns(session: Any, loader: Any, model: nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    """Turns of the loop over one epoch: the loss of each."""
    for indices, *_ in loader:
        loss = loss_of(model, rows_of(Points(16), indices.tolist()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


def values() -> dict[str, tuple[str | None, str | None, str | None]]:
    """Value → errors of `log(loss=…)`, of a metric of `log`, and of `evaluated`."""
    answers = {}
    with training() as (session, *parts):
        for loss in turns(session, *parts):
            for name, value in [*VALUES.items(), *WRONG.items()]:
                answers[name] = (
                    error_of(session.log, loss=value),
                    error_of(session.log, loss=loss, accuracy=value),
                    error_of(session.evaluated, accuracy=value),
                )
            session.log(loss=loss)
    return answers


def places() -> dict[str, str | None]:
    """Place of the call → its error."""
    said = {}
    with training() as (session, *parts):
        said["log before the loop"] = error_of(session.log, loss=1.0)
        said["evaluated before the loop"] = error_of(session.evaluated, accuracy=0.1)
        for loss in turns(session, *parts):
            said["log"] = error_of(session.log, loss=loss)
            said["log twice"] = error_of(session.log, loss=loss, more=1.0)
            said["log without a loss"] = error_of(session.log, accuracy=1.0)
            if session.rank == 0:
                said["log"] = error_of(session.log, loss=loss, of_rank_0=1.0)
                said["evaluated"] = error_of(session.evaluated, accuracy=0.5)
        said["log after the loop"] = error_of(session.log, loss=1.0)
        said["evaluated after the loop"] = error_of(session.evaluated, accuracy=0.3)
        said["evaluated nothing"] = error_of(session.evaluated)
        for samples in (0, 5, -1, 1.5, "8", True):
            said[f"samples={samples!r}"] = error_of(
                session.evaluated, samples=samples, accuracy=0.3
            )
        session.close()
        said["log after close"] = error_of(session.log, loss=1.0)
        said["evaluated after close"] = error_of(session.evaluated, accuracy=0.3)
        said["close again"] = error_of(session.close)
    return said


def mesh_of_all() -> str | None:
    """The error of a Session whose mesh splits nothing."""
    given = init_device_mesh("cpu", (dist.get_world_size(),))
    return error_of(lambda: paceline.Session(Points(16), global_batch=8, mesh=given).close())


# Profiles


def profile(what: str) -> str | None:
    with training() as (session, _, model, optimizer):
        data = Points(16)

        def passes(n: int) -> None:
            loss_of(model, rows_of(data, [i % len(data) for i in range(n)])).backward()

        def steps(n: int) -> None:
            passes(n)
            optimizer.step()

        def steps_another(n: int) -> None:
            passes(n)
            torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1).step()

        runs: dict[str, Any] = {
            "None": None,
            "steps": steps,
            "steps another": steps_another,
        }
        if what == "a loss":
            return error_of(session.profile, loss_of(model, rows_of(data, [0])))
        if what in runs:
            return error_of(session.profile, runs[what])
        most = {"most 0": 0, "most 2.5": 2.5, "most 64": 64}
        return error_of(session.profile, passes, most=most.get(what))
