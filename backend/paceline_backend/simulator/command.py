"""Command `paceline simulate`, in this process or as a run of a server."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import typer

from paceline.node.client import Client
from paceline.wire import TELEMETRY, State, run_telemetry
from paceline.wire.bus import connect
from paceline_backend.simulator import summary
from paceline_backend.simulator.broadcast import Broadcast, register
from paceline_backend.simulator.scenario import Scenario
from paceline_backend.simulator.simulation import Simulation
from paceline_backend.simulator.summary import SegmentSums, Summary

_COLUMNS = (
    ("policy", "policy"),
    ("steps", "steps"),
    ("step_time_s", "step (s)"),
    ("se", "SE"),
    ("waste", "waste"),
    ("time_over_fluid", "÷ fluid limit"),
    ("ett_mape", "ETT error"),
    ("speedup", "speed-up"),
)
_OF_ROUNDS = (("rounds", "rounds"), ("contributors", "contributors"), ("dropped", "dropped"))


def in_memory(path: Path, names: list[str], warmup: int, as_json: bool) -> int:
    """Simulate a scenario in this process and print a table, or JSON.

    Return the exit code of the command. `names` are policies to compare; if it is empty, the
    scenario's own policy and switches are simulated. The figures leave out the first `warmup` steps
    of each policy.

    Raises:
        InputError: the scenario cannot be simulated, or has no more than `warmup` steps.
    """
    scenario = Scenario.load(path)
    if names:
        summaries = summary.compare(scenario, names, warmup)
    else:
        summaries = summary.with_speedups(summary.run(Simulation.of(scenario), warmup))
    show(scenario, summaries, as_json)
    return 0


def on_server(
    path: Path,
    policy: str | None,
    server: str,
    token: str | None,
    warmup: int,
    as_json: bool,
) -> int:
    """Simulate a scenario as a run of a server; on the server, users can follow and switch the run.

    Raises:
        InputError: the scenario cannot be simulated, or the server refused it.
        PacelineError: the server does not answer or speaks another protocol version.
    """
    scenario = Scenario.load(path)
    if policy is not None:
        scenario = summary.under(scenario, policy)
    simulation = Simulation.of(scenario)
    with Client(server, token) as client:
        info = client.version()
        run = register(client, scenario, str(path))
        typer.echo(f"watch the run at {client.server}/runs/{run}", err=True)
        session = client.session(f"/runs/{run}")
        stream = TELEMETRY if session is None else run_telemetry(run)
        with connect((session or info)["bus"]) as bus:
            broadcast = Broadcast(simulation, run, bus, client, time.time(), stream=stream)
            presets = _follow(broadcast, warmup)
    show(scenario, presets, as_json, run=run, state=broadcast.state)
    return 0 if broadcast.state is State.FINISHED else 1


def _follow(broadcast: Broadcast, warmup: int) -> dict[str, Summary]:
    tally = SegmentSums(warmup)
    try:
        for trained, devices in broadcast.segments():
            tally.add(trained, devices)
    except KeyboardInterrupt:
        broadcast.end(State.STOPPED, "interrupted")
        raise
    except Exception as error:
        broadcast.end(State.FAILED, f"{type(error).__name__}: {error}")
        raise
    finished = broadcast.state is State.FINISHED
    return summary.with_speedups(summary.counted(tally) if finished else tally.summaries())


def show(scenario: Scenario, summaries: dict[str, Summary], as_json: bool, **more: Any) -> None:
    """Print the summaries of a simulated scenario, by policy, as a table or as JSON.

    `more` are values that only the JSON contains.
    """
    sizes = scenario.hello().sizes_array()
    about = {
        "scenario": scenario.name,
        "workers": scenario.workers,
        "global_batch": scenario.global_batch,
        "samples": len(sizes),
        "mean": float(sizes.mean()),
        "dif": float(np.std(sizes, ddof=1)) if len(sizes) > 1 else 0.0,
        **more,
    }
    if as_json:
        presets = {name: result.as_dict() for name, result in summaries.items()}
        typer.echo(json.dumps({**about, "presets": presets}))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = (
        f"{scenario.name}: {scenario.workers} simulated workers, global batch "
        f"{scenario.global_batch}, {len(sizes)} samples of mean size {about['mean']:.4g} "
        f"(DIF {about['dif']:.4g})"
    )
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    columns = _COLUMNS + (_OF_ROUNDS if any(result.rounds for result in summaries.values()) else ())
    for _, head in columns:
        table.add_column(head, justify="left" if head == "policy" else "right")
    for name, result in summaries.items():
        values = {"policy": name, **result.as_dict()}
        table.add_row(*(_cell(values[column]) for column, _ in columns))
    Console(highlight=False, markup=False).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
