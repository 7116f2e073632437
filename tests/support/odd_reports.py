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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import paceline
from support.odd_scripts import WIDTH, Points, loss_of, plain, rows_of

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
def training(**options: Any) -> Iterator[tuple[Any, ...]]:
    """A session with loader, wrapped model and optimiser."""
    torch.manual_seed(3)
    session = paceline.Session(Points(16), global_batch=8, **options)
    try:
        loader = session.loader()
        model = session.wrap(plain())
        yield session, loader, model, torch.optim.SGD(model.parameters(), lr=0.1)
    finally:
        session.close()


def turns(session: Any, loader: Any, model: nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    """Turns of the loop over one epoch: the loss of each."""
    for indices, *_ in loader:
        loss = loss_of(model, rows_of(Points(16), indices.tolist(), None))
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


def names() -> dict[str, tuple[str | None, str | None]]:
    """Name → errors of `log` and of `evaluated`."""
    answers = {}
    with training() as (session, *parts):
        for loss in turns(session, *parts):
            for name in ("val/top-5", "a" * 64, "_x", "", "5x", "a b", "a" * 65, "ä", "/x"):
                answers[name] = (
                    error_of(session.log, loss=loss, **{name: 1.0}),
                    error_of(session.evaluated, **{name: 1.0}),
                )
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


def many_names() -> tuple[list[str | None], list[str | None]]:
    """Errors of 40 names of `log`, five at once and others in each call, and of `evaluated`."""
    with training() as (session, *parts):
        for loss in turns(session, *parts):
            logged = [
                error_of(session.log, loss=loss, **{f"m{part}_{i}": 1.0 for i in range(5)})
                for part in range(8)
            ]
        evaluated = [error_of(session.evaluated, **{f"e{number}": 1.0}) for number in range(40)]
    return logged, evaluated


# Meshes


def whole() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


MESHES: dict[str, Callable[[], Any]] = {
    "a word": lambda: "dp",
    "a number": lambda: 2,
    "names": lambda: ("dp", "tp"),
    "a process group": lambda: whole()["dp"].get_group(),
    "some ranks": lambda: DeviceMesh("cpu", [0, 1]),
    "another order": lambda: DeviceMesh("cpu", [3, 2, 1, 0]),
    "another order of groups": lambda: DeviceMesh(
        "cpu", [[2, 3], [0, 1]], mesh_dim_names=("dp", "tp")
    )["dp"],
    "on some ranks": lambda: [whole()["dp"], None][dist.get_rank() // 2],
    "the data-parallel part": lambda: whole()["dp"],
    "all ranks": lambda: init_device_mesh("cpu", (4,)),
}


def mesh(kind: str, **options: Any) -> str | None:
    """The error of a Session with this mesh."""
    given = MESHES[kind]()
    return error_of(
        lambda: paceline.Session(Points(16), global_batch=8, mesh=given, **options).close()
    )


def in_a_mesh(what: str) -> str | None:
    """What a session with groups refuses later."""
    session = paceline.Session(Points(16), global_batch=8, mesh=whole()["dp"])
    try:
        if what == "wrap":
            return error_of(session.wrap, nn.Linear(WIDTH, 1))
        return error_of(session.profile, lambda n: None)
    finally:
        session.close()


# Profiles


def profile(what: str) -> str | None:
    """The error of a call of `profile`."""
    with training() as (session, loader, model, optimizer):
        data = Points(16)

        def passes(n: int) -> None:
            loss_of(model, rows_of(data, [i % len(data) for i in range(n)], None)).backward()

        def steps(n: int) -> None:
            passes(n)
            optimizer.step()

        def steps_another(n: int) -> None:
            passes(n)
            torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1).step()

        def fails(n: int) -> None:
            if session.rank == 1:
                raise KeyError("a column is missing")
            passes(n)

        def never_fits(n: int) -> None:
            raise MemoryError

        def typical(n: int) -> None:
            assert len(loader.typical(n)[0]) == n
            passes(n)

        runs: dict[str, Any] = {
            "typical": typical,
            "None": None,
            "steps": steps,
            "steps another": steps_another,
            "fails on rank 1": fails,
            "never fits": never_fits,
        }
        if what == "a loss":
            return error_of(session.profile, loss_of(model, rows_of(data, [0], None)))
        if what in runs:
            return error_of(session.profile, runs[what])
        if what == "twice":
            session.profile(passes)
        if what == "after training":
            list(turns(session, loader, model, optimizer))
        most = {"most 0": 0, "most -4": -4, "most 2.5": 2.5, "most '8'": "8", "most 64": 64}
        return error_of(session.profile, passes, most=most.get(what))
