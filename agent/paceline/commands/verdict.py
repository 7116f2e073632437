"""`paceline verdict`: reports which ranks slow a run down, why, since when, and the cost."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from paceline.commands.options import Connection, Json, grouped
from paceline.commands.printing import money, plain, print_json

OptionalRun = Annotated[
    str | None,
    typer.Argument(help="ID of a run, or a unique prefix of its ID; omit it with --fleet."),
]
Fleet = Annotated[
    bool, typer.Option("--fleet", help="Report on all active runs instead of one run.")
]
First = Annotated[
    int | None,
    typer.Option(
        "--from",
        min=0,
        help="First step of the range that is judged.",
        show_default="500 steps before the last",
    ),
]
Last = Annotated[
    int | None,
    typer.Option(
        "--to", min=0, help="Last step of the range that is judged.", show_default="the newest"
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command()(verdict)


@grouped
def verdict(
    *,
    run_id: OptionalRun = None,
    fleet: Fleet = False,
    first: First = None,
    last: Last = None,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Report which ranks slow a run down, why, since when, what it costs, and what to do.

    With --fleet, report on all active runs, the costliest first.
    """
    if fleet == (run_id is not None):
        raise typer.BadParameter("give a run, or --fleet for all active runs", param_hint="RUN_ID")
    if run_id is None:
        with connection.client() as client:
            answer = client.call("GET", "/verdict")
        if as_json:
            print_json(answer)
        else:
            typer.echo("\n".join(fleet_lines(answer)))
        return
    span = {"from": first, "to": last}
    params = {name: step for name, step in span.items() if step is not None}
    with connection.client() as client:
        answer = client.call("GET", f"/runs/{client.run(run_id)}/verdict", params=params)
    if as_json:
        print_json(answer)
        return
    typer.echo("\n".join(lines(answer)))


def lines(answer: dict[str, Any]) -> list[str]:
    """Format a run's verdict for people: each cause of slowness, and what to do about it."""
    if not answer["causes"]:
        return [plain(answer["words"])]
    made = []
    for cause in answer["causes"]:
        made += [plain(cause["words"]), f"  What to do: {plain(cause['to_do'])}."]
    costly = [cause for cause in answer["causes"] if cause["cost_s"] > 0]
    if (price := answer.get("price")) is not None and costly:
        # The price is per worker-hour, but the total cost is in seconds. A cause has its cost in
        # both units, so their ratio converts the total cost.
        hours = answer["cost_s"] * costly[0]["worker_hours"] / costly[0]["cost_s"]
        cost = money(hours * price["amount"], price["currency"])
        made.append(f"In these steps that is {hours:.3g} worker-hours, {cost}.")
    return made


def fleet_lines(answer: dict[str, Any]) -> list[str]:
    """Format the verdict on all runs for people: what slows each run down, and the slow nodes."""
    made = [plain(answer["words"])]
    if not answer["runs"]:
        return made
    currency = answer["currency"]

    def waited(of: dict[str, Any]) -> str:
        words = f"{of['waited_hours']:.2f} worker-hours"
        return words if currency is None else f"{words} ({money(of['waited_cost'], currency)})"

    made.append(f"The ranks of these runs have waited {waited(answer)} so far.")
    for run in answer["runs"]:
        cost = f"{run['lost_workers']:.2f} of {run['workers']} workers lost"
        what = plain(run["what"]) or "no verdict yet"
        name = plain(run["name"])
        made.append(f"{run['run']}  {name}  {run['level']}: {what} ({cost}, {waited(run)} waited)")
    for node in answer["nodes"]:
        runs = "; ".join(f"ranks {_listed(run['ranks'])} of {run['run']}" for run in node["runs"])
        made.append(f"node {plain(node['node'])}: {node['lost_workers']:.2f} workers lost, {runs}")
    return made


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
