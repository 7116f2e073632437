"""`paceline switch`: switches a run's policy; `paceline switches`: lists the switches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import (
    ChangeOptions,
    Connection,
    Json,
    Parameters,
    RunId,
    grouped,
    parameters_of,
)
from paceline.commands.printing import local_time, plain, print_json
from paceline.core.errors import PacelineError

if TYPE_CHECKING:
    from paceline.node.client import Client

_CHANGES = {
    "nothing": "The training stays as under plain DDP.",
    "batches": "Global batches will have other samples than under plain DDP.",
    "training": "THIS CHANGES THE TRAINING: a step no longer averages the gradients of all ranks.",
}


@grouped
def switch(
    *,
    run_id: RunId,
    policy: Annotated[
        str,
        typer.Argument(
            metavar="POLICY", help="Name of the new policy; `paceline policies` lists all policies."
        ),
    ],
    param: Parameters = None,
    change: ChangeOptions,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Switch a run to another policy while it trains.

    If another user changes the run before the switch, the switch fails, and the error names that
    user.
    """
    given_parameters = parameters_of(param)
    body = {"policy": policy, "parameters": given_parameters, **change.audit_fields}
    with connection.client() as client:
        run_id = client.run(run_id)
        # The revision is read first. If the run changes while the user decides, the switch fails.
        seen = client.revision(run_id)
        # The effects of the policy are requested before the switch. If a request failed after the
        # switch, it would look as if the run was not switched.
        words, warnings = "", []
        if not as_json:
            words = _changes_of(client.call("GET", "/policies"), policy, given_parameters)
            warnings = _warnings(client, run_id, policy, given_parameters)
        change.confirm(f"{words} Switch run {run_id} to {policy}?".lstrip(), as_json)
        answer = client.change("POST", run_id, "policy", body, revision=seen)
    if as_json:
        print_json(answer)
        return
    typer.echo(f"run {run_id} switches to {policy} at its next segment")
    if words:
        typer.echo(words)
    for warning in warnings:
        typer.echo(f"warning: {warning}", err=True)


def _changes_of(known: list[dict[str, Any]], policy: str, parameters: Mapping[str, Any]) -> str:
    """Return a sentence on how a policy changes the training; empty if the policy is unknown."""
    preset = next((each for each in known if each["name"] == policy), None)
    if preset is None:
        return ""
    gravest = list(_CHANGES).index
    of: list[str | None] = [
        preset["changes_with"].get(name, {}).get(str(v)) for name, v in parameters.items()
    ]
    return _CHANGES[max([*filter(None, of)] or [str(preset["changes"])], key=gravest)]


def _warnings(client: Client, run: str, policy: str, parameters: Mapping[str, Any]) -> list[str]:
    """Return warnings about a switch; empty if the server rejects the switch."""
    params = {"policy": policy, "parameters": json.dumps(parameters)}
    try:
        answer = client.call("GET", f"/runs/{run}/policy/warnings", params=params)
    except PacelineError:
        return []
    return list(answer["warnings"])


@grouped
def switches(
    run_id: RunId,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """List a run's policy switches: who requested them, why, and their forecast and effect."""
    with connection.client() as client:
        run_id = client.run(run_id)
        made = client.call("GET", f"/runs/{run_id}/switches")
        effects = {each["version"]: each for each in client.call("GET", f"/runs/{run_id}/effects")}
    rows = [{**row, "effect": effects.get(row["version"])} for row in made]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        typer.echo("\n".join(_lines(row)))


def _lines(row: Mapping[str, Any]) -> list[str]:
    asked = f"{row['policy']}: requested {local_time(row['requested_at'])} by {row['requested_by']}"
    why = f": {row['why']}" if row["why"] else ""
    step = row["effective_step"]
    since = "has yet to take effect" if step is None else f"in force from step {step}"
    lines = [f"{plain(asked + why)}; {since}"]
    if row["effect"] is not None:
        lines.append(f"  {plain(row['effect']['words'])}")
        if measured := row["effect"]["metrics_words"]:
            lines.append(f"  {plain(measured)}")
    return lines
