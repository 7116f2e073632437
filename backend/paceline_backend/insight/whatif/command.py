"""`paceline whatif`: asks a server, or computes from the database alone."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from paceline.node.client import Client
from paceline_backend.insight.whatif.answer import STEPS
from paceline_backend.store import Store, runs

_TIMEOUT_S = 300.0  # on a busy machine forecasts, which are niced, take their time


def from_server(server: str, token: str | None, run: str, as_json: bool) -> int:
    """Prints what a server forecasts; the exit code.

    Raises:
        PacelineError: no such run, or nothing answers.
    """
    with Client(server, token, _TIMEOUT_S) as client:
        answer = client.call("GET", f"/runs/{client.run(run)}/whatif")
    return _print(answer, as_json)


def from_database(database: str, run: str, as_json: bool) -> int:
    """Prints a new forecast, which is not kept; the exit code.

    Raises:
        PacelineError: no such run, or the database cannot be used.
    """
    from paceline_backend.insight.whatif.forecast import forecast

    with Store.open(database) as store:
        with store.read() as connection:
            run = runs.whole_id(connection, run)
        answer = msgspec.to_builtins(forecast(store, run, steps=STEPS))
    del answer["decision"]
    return _print(answer, as_json)


def _print(answer: dict[str, Any], as_json: bool) -> int:
    if as_json:
        typer.echo(json.dumps(answer))
        return 0
    current = answer["current"]
    if answer["reason"] is not None:
        typer.echo(f"run {answer['run']}, {current['policy']}: no forecast: {answer['reason']}")
        return 0
    typer.echo(
        f"run {answer['run']}, {current['policy']} in force, from steps {answer['first_step']} to "
        f"{answer['step']}; the models are {100 * answer['fit_error']:.1f} % off on these"
    )
    table = Table("policy", "step time, s", "95 %", "", box=box.SIMPLE)
    for preset in answer["forecasts"]:
        span = f"{preset['low_s']:.3g} to {preset['high_s']:.3g}"
        table.add_row(preset["policy"], f"{preset['step_time_s']:.3g}", span, preset["words"])
    for preset in answer["left_out"]:
        table.add_row(preset["policy"], "", "", preset["reason"])
    Console(highlight=False, markup=False).print(table)
    return 0
