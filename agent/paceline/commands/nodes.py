"""`paceline nodes`, `check`, `cordon` and `uncordon`: machines with agents."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from paceline.commands.options import Connection, Json, Why, grouped
from paceline.commands.printing import local_time, print_json, print_table
from paceline.core.errors import PacelineError

COLUMNS = ("id", "state", "cores", "check", "runs", "spare_of", "cordoned", "paceline")
_MEASURING_S = 90.0
_POLL_S = 0.5

Name = Annotated[
    str, typer.Argument(metavar="NODE", help="Name of the node, as `paceline nodes` lists it.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    group = typer.Typer(help="List the nodes, or remove a node that is out of use.")
    group.callback(invoke_without_command=True)(nodes)
    group.command("forget")(forget)
    app.add_typer(group, name="nodes")
    app.command("check")(check)
    app.command("cordon")(cordon)
    app.command("uncordon")(uncordon)


@grouped
def nodes(
    context: typer.Context,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """List the nodes, with their measured speeds, the runs that they train, and cordons."""
    if context.invoked_subcommand is not None:
        return
    with connection.client() as client:
        listed = client.call("GET", "/nodes")
    if as_json:
        print_json(listed)
    else:
        print_table(COLUMNS, [_row(node) for node in listed])


@grouped
def forget(
    *,
    node: Name,
    why: Why = "",
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Remove a node that is out of use from the list, and delete its key and its bus user.

    An agent with a valid token registers the node again: to prevent this, revoke its token first.
    """
    with connection.client() as client:
        answer = client.call("DELETE", f"/nodes/{_quoted(node)}", params={"by": "cli", "why": why})
    _say(answer, f"node {node} is forgotten", as_json)


@grouped
def check(
    node: Name,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Measure the compute, memory and disk speed of a node, as soon as no rank trains on it."""
    with connection.client() as client:
        before = client.call("POST", f"/nodes/{_quoted(node)}/check", params={"by": "cli"})
        deadline = time.monotonic() + _MEASURING_S
        after = before
        while after["checked_at"] == before["checked_at"]:
            if time.monotonic() > deadline:
                raise PacelineError(
                    f"node {node} has not reported its speeds within {_MEASURING_S:g} s: "
                    "`paceline nodes` shows them once the node has measured them"
                )
            time.sleep(_POLL_S)
            listed = client.call("GET", "/nodes")
            after = next((each for each in listed if each["id"] == node), before)
    _say(after, f"node {node}: {_speeds(after['check'])}", as_json)


@grouped
def cordon(
    *,
    node: Name,
    why: Why = "",
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Exclude a node from runs that it does not train yet; runs that it trains continue."""
    path = f"/nodes/{_quoted(node)}/cordon"
    with connection.client() as client:
        answer = client.call("PUT", path, {"reason": why, "by": "cli"})
    _say(answer, f"node {node} is cordoned: `paceline uncordon {node}` lifts it", as_json)


@grouped
def uncordon(
    *,
    node: Name,
    why: Why = "",
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Allow a node to get runs again, after `paceline cordon`."""
    path = f"/nodes/{_quoted(node)}/cordon"
    with connection.client() as client:
        answer = client.call("DELETE", path, params={"by": "cli", "why": why})
    _say(answer, f"node {node} can get runs again", as_json)


def _say(answer: dict[str, Any], words: str, as_json: bool) -> None:
    if as_json:
        print_json(answer)
    else:
        typer.echo(words)


def _quoted(node: str) -> str:
    from urllib.parse import quote

    return quote(node, safe="")


def _speeds(check: dict[str, Any] | None) -> str | None:
    if check is None:
        return None
    words = (
        f"{check['compute_gflops']:.3g} GFLOP/s per core, {check['memory_gbps']:.3g} GB/s memory"
    )
    disk = check["disk_mbps"]
    return words if disk is None else f"{words}, {disk:.3g} MB/s disk"


def _row(node: dict[str, Any]) -> dict[str, Any]:
    cordoned = node["cordoned"]
    if cordoned is not None:
        why = f": {cordoned['reason']}" if cordoned["reason"] else ""
        cordoned = f"by {cordoned['by']} at {local_time(cordoned['at'])}{why}"
    if (in_engine := node["in_engine"]) is not None:
        cordoned = "; ".join(filter(None, (cordoned, _in_engine(in_engine))))
    return {
        **node,
        "state": _state(node),
        "check": _speeds(node["check"]),
        "runs": ", ".join(node["runs"]),
        "cordoned": cordoned,
    }


def _state(node: dict[str, Any]) -> str:
    if node["revoked"]:
        return "revoked"
    return "answers" if node["alive"] else "silent"


def _in_engine(known: dict[str, Any]) -> str:
    what = "cordon" if known["cordoned"] else "end of the cordon"
    if known["refusal"] is not None:
        return f"{known['backend']} refuses the {what}: {known['refusal']}"
    if known["told_at"] is None:
        return f"{known['backend']} has not received the {what} yet"
    return f"cordoned in {known['backend']}: {known['host']}"
