"""What REST answers about recorded runs, and what of it may differ from time to time."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from unit.golden import data, product

_SERVER = (
    "/healthz",
    "/readyz",
    "/metrics",
    "/api/v1/version",
    "/api/v1/policies",
    "/api/v1/nodes",
    "/api/v1/runs",
    "/api/v1/runs?limit=2",
    "/api/v1/runs?state=finished&policy=paceline",
    "/api/v1/runs?name=switch",
    "/api/v1/runs?cursor=nonsense",
    "/api/v1/runs/nobody",
    "/api/v1/nothing",
)
_RUN = (
    "",
    "/scenario",
    "/switches",
    "/workers",
    "/workers?last=10",
    "/steps",
    "/steps?from=5&to=24&points=5",
    "/worker-steps",
    "/worker-steps?ranks=0,3&to=20&points=7",
    "/worker-steps?ranks=x",
    "/segments",
    "/segments?from=10&limit=3",
    "/coasts",
    "/rounds",
    "/rounds?from=10&to=30&limit=5",
    "/synchronisation",
    "/synchronisation?from=12&points=4",
    "/coverage",
    "/report",
    "/report?warmup=2",
    "/attribution",
    "/attribution?from=0&to=30&points=6",
    "/auto",
    "/view?last=12",
    "/view?since=20",
)
_KEPT = "/whatif"  # where a forecast is kept: a new one would be made at other times
_DECIMALS = 9
_WORDING = ("summary", "description")  # of presets and their parameters: text for people


def _run(answers: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """Runs a coroutine in a thread: this one may have an event loop, as after browser tests."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, answers).result()


def runs(database: Path) -> dict[str, str]:
    """The ids of the recorded runs, by name."""
    connection = sqlite3.connect(database)
    ids = dict(connection.execute("SELECT name, id FROM runs ORDER BY key").fetchall())
    connection.close()
    return ids


def paths(database: Path) -> list[str]:
    """All that is asked: of the server, and of each run."""
    connection = sqlite3.connect(database)
    forecast = {
        run
        for (run,) in connection.execute(
            "SELECT DISTINCT id FROM runs JOIN forecasts ON run = key"
        ).fetchall()
    }
    connection.close()
    of_runs = [
        f"/api/v1/runs/{run}{path}"
        for run in runs(database).values()
        for path in (*_RUN, *([_KEPT] if run in forecast else []))
    ]
    return [*_SERVER, *of_runs]


def answered(database: Path) -> dict[str, Any]:
    """The answers to record: without those that are errors of the server itself."""
    return {
        path: answer
        for path, answer in ask(database).items()
        if answer["status"] < 500 or path == "/readyz"  # which says so that the bus is away
    }


def ask(database: Path) -> dict[str, Any]:
    """The answers by path: status, media type and normalised document."""
    asked = paths(database)
    answers = _run(product.answers(database, asked))
    return {
        path: {
            "status": answer.status_code,
            "type": answer.headers.get("content-type", "").partition(";")[0],
            "document": normalised(path, _content(answer)),
        }
        for path, answer in zip(asked, answers, strict=True)
    }


def _content(answer: Any) -> Any:
    kind = answer.headers.get("content-type", "")
    return answer.json() if "json" in kind else answer.text.splitlines()


def normalised(path: str, document: Any) -> Any:
    """A document without what depends on the time or the place of asking.

    Removed are: whether a node or a controller is alive; the bus's error message; the version; and
    the wording with which presets and parameters are described. The values that a parameter may
    have are sorted: their order says nothing. Attribution is rounded: it is computed with BLAS,
    whose sums differ in the last bits from CPU to CPU.
    """
    if "/attribution" in path:
        return _rounded(document)
    if path == "/readyz":
        return {**document, "bus": document["bus"].partition(":")[0]}
    if path == "/api/v1/version":
        return {**document, "version": None}
    if path == "/metrics":
        return sorted(
            line for line in document if not line.startswith(("# HELP", "paceline_nodes_alive "))
        )
    if path == "/api/v1/policies":
        return sorted_enums(_without(document, ("alive", *_WORDING)))
    return _without(document, ("alive",))


def sorted_enums(value: Any) -> Any:
    """The same with the values of each JSON Schema's enum sorted."""
    if isinstance(value, dict):
        return {
            key: sorted(item) if key == "enum" else sorted_enums(item)
            for key, item in value.items()
        }
    return [sorted_enums(item) for item in value] if isinstance(value, list) else value


def _rounded(value: Any) -> Any:
    """The same value with floats of so many decimals."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, _DECIMALS) + 0.0 if isinstance(value, float) else value  # no -0.0


def _without(value: Any, keys: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, keys) for key, item in value.items() if key not in keys}
    if isinstance(value, list):
        return [_without(item, keys) for item in value]
    return value


def forecasts(database: Path) -> dict[str, Any]:
    """A new forecast of a recorded run, rounded, without the time at which it was made."""
    known = runs(database)
    return {
        name: data.rounded({**product.forecast_again(database, known[name]), "made_at": None})
        for name in ("switches",)
    }
