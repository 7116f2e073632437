"""Command `paceline whatif`: gets a forecast from a server, or computes it from the database.

`from_server` and `from_database` raise `PacelineError` if the run does not exist, or if the server
or the database is unavailable.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from paceline.node.client import Client
from paceline_backend.insight.whatif.answer import FORECAST_STEPS
from paceline_backend.store import Store, runs

# Forecasts have low priority, so they take long on a busy machine.
_TIMEOUT_S = 300.0


def from_server(server: str, token: str | None, run: str, as_json: bool) -> int:
    """Print a server's forecast and return the exit code."""
    with Client(server, token, _TIMEOUT_S) as client:
        body = client.call("GET", f"/runs/{client.run(run)}/whatif")
    return _print(body, as_json)


def from_database(database: str, run: str, as_json: bool) -> int:
    """Print a new forecast without storing it, and return the exit code."""
    from paceline_backend.insight.whatif.forecast import forecast

    with Store.open(database) as store:
        with store.read() as connection:
            run = runs.whole_id(connection, run)
        body = msgspec.to_builtins(forecast(store, run, steps=FORECAST_STEPS))
    del body["decision"]
    return _print(body, as_json)


def _print(body: dict[str, Any], as_json: bool) -> int:
    if as_json:
        typer.echo(json.dumps(body))
        return 0
    current = body["current"]
    if body["reason"] is not None:
        typer.echo(f"run {body['run']}, {current['policy']}: no forecast: {body['reason']}")
        return 0
    typer.echo(
        f"run {body['run']}, {current['policy']} in force, from steps {body['first_step']} to "
        f"{body['step']}; the models' error in these steps is {100 * body['fit_error']:.1f} %"
    )
    table = Table("policy", "step time, s", "95 %", "", box=box.SIMPLE)
    for preset in body["forecasts"]:
        span = f"{preset['low_s']:.3g} to {preset['high_s']:.3g}"
        table.add_row(preset["label"], f"{preset['step_time_s']:.3g}", span, preset["words"])
    for preset in body["left_out"]:
        table.add_row(preset["policy"], "", "", preset["reason"])
    Console(highlight=False, markup=False).print(table)
    for preset in body["forecasts"]:
        if preset["harmful"]:
            typer.echo(f"warning: {preset['warnings'][0]}")
    return 0
