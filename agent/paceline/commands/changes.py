"""`paceline audit`, `auto` and `target`: the log of changes, automatic switching, and targets."""

from __future__ import annotations

import contextlib
import math
import re
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

import typer

from paceline.commands.options import ChangeOptions, Connection, Json, RunId, grouped
from paceline.commands.printing import local_time, print_json, print_table
from paceline.core.errors import InputError

COLUMNS = ("at", "who", "action", "run", "revision", "what", "why", "via", "address")


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("audit")(audit)
    app.command("auto")(auto)
    app.command("target")(target)


@grouped
def audit(
    *,
    run_id: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="List only changes of this run, given by its ID or a unique prefix of its ID.",
        ),
    ] = None,
    who: Annotated[
        str | None, typer.Option(help="List only changes made with the token of this name.")
    ] = None,
    action: Annotated[
        str | None, typer.Option(help="List only changes of this kind, such as run.policy.")
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=500, help="Maximum number of changes to list.")
    ] = 20,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """List the newest changes in the audit log: who requested them, when, from where, and why."""
    with connection.client() as client:
        run = None if run_id is None else client.run(run_id)
        query = {"run": run, "who": who, "action": action, "limit": limit}
        given = {name: value for name, value in query.items() if value is not None}
        page = client.call("GET", "/audit", params=given)
    if as_json:
        print_json(page)
    else:
        print_table(COLUMNS, [_row(change) for change in page["items"]])


@grouped
def auto(
    *,
    run_id: RunId,
    mode: Annotated[
        Literal["off", "recommend", "switch"] | None,
        typer.Argument(
            help="What `auto` may do with the run's policy: nothing (off), recommend another one, "
            "or switch to it. Omit it to show the present setting."
        ),
    ] = None,
    relaxed: Annotated[
        bool | None,
        typer.Option(
            "--relaxed/--no-relaxed",
            help="Allow `auto` to choose relaxed presets, too. They change the training: a step no "
            "longer averages the gradients of all ranks.",
            show_default="unchanged",
        ),
    ] = None,
    change: ChangeOptions,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Show or set what `auto` may do with a run's policy.

    `auto` is the part of the server that looks for faster policies.
    """
    with connection.client() as client:
        run = client.run(run_id)
        if mode is None:
            answer = client.call("GET", f"/runs/{run}/auto")
        else:
            seen = client.revision(run)
            further = " with relaxed presets" if relaxed else ""
            change.confirm(f"Set auto of run {run} to {mode}{further}?", as_json)
            body = {"mode": mode, "relaxed": relaxed, **change.audit_fields}
            answer = client.change("PUT", run, "auto", body, revision=seen)
    if as_json:
        print_json(answer)
    else:
        words = ", relaxed presets too" if answer["relaxed"] else ""
        typer.echo(f"run {run}: auto is set to {answer['mode']}{words}")


@grouped
def target(
    *,
    run_id: RunId,
    wanted: Annotated[
        str | None,
        typer.Argument(
            metavar="METRIC>=VALUE",
            help="Value that a metric should reach, such as 'accuracy>=0.9' or 'loss<=0.3', in "
            "quotes. Omit it to show the run's target.",
        ),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the run's target.")] = False,
    change: ChangeOptions,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Show, set or remove a run's target, which is a value that a metric should reach.

    If the run has reached its target, also show when, and in which step and epoch.
    """
    if remove and wanted is not None:
        raise InputError("--remove: give a target or --remove, not both")
    body = None if wanted is None else {**_target(wanted), **change.audit_fields}
    with connection.client() as client:
        run = client.run(run_id)
        seen = client.revision(run)
        if body is not None:
            change.confirm(f"Set the target of run {run} to {wanted}?", as_json)
            answer = client.change("PUT", run, "target", body, revision=seen)
        elif remove:
            change.confirm(f"Remove the target of run {run}?", as_json)
            path = f"target?{urlencode(change.audit_fields)}"
            answer = client.change("DELETE", run, path, {}, revision=seen)
        else:
            answer = client.call("GET", f"/runs/{run}")
    if as_json:
        print_json(answer["target"])
    else:
        typer.echo(f"run {run}: {_target_words(answer['target'])}")


def _target(text: str) -> dict[str, Any]:
    match = re.fullmatch(r"\s*([^\s<>=]+)\s*(>=|<=)\s*(\S+)\s*", text)
    if match is not None:
        with contextlib.suppress(ValueError):
            if math.isfinite(value := float(match[3])):
                return {"metric": match[1], "direction": match[2], "value": value}
    raise InputError(f"{text}: give a metric, >= or <=, and a number, such as 'accuracy>=0.9'")


def _target_words(present: dict[str, Any] | None) -> str:
    if present is None:
        return "no target is set"
    words = f"{present['metric']} {present['direction']} {present['value']:g}"
    met, best = present["met"], present["best"]
    if met is None:
        return f"{words} is not met yet" + (
            ""
            if best is None
            else f"; the best so far is {best:g}, after step {present['best_step']:,}"
        )
    after = "" if met["after_s"] is None else f" after {met['after_s']:.1f} s"
    return (
        f"{words} was met{after}: in step {met['step']:,}, epoch {met['epoch']}, with "
        f"{met['trained']:,} samples ({met['value']:g})"
    )


def _row(change: dict[str, Any]) -> dict[str, Any]:
    details = change["details"]
    what = details.get("policy") or details.get("mode") or change["target"]
    return {**change, "at": local_time(change["at"]), "what": what}
