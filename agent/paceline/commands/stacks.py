"""`paceline stacks`: prints where in its code each rank of a run is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.lines import safe
from paceline.commands.options import Connection, Json, RunId, grouped
from paceline.commands.printing import plain, print_json
from paceline.core.errors import PacelineError

if TYPE_CHECKING:
    from paceline.node.client import Client


@grouped
def stacks(
    *,
    run_id: RunId,
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only this rank.", show_default="all ranks")
    ] = None,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Print the Python stacks of a run's ranks, also of ranks that hang.

    Needs the role operator. Exit code 3: the stacks of a rank are missing.
    """
    with connection.client() as client:
        answer = asked(client, client.run(run_id), rank)
    if as_json:
        print_json(answer)
    else:
        typer.echo("\n\n".join(_block(stack) for stack in answer["stacks"]))
        for node in answer["nodes"]:
            if node["problem"] is not None:
                typer.echo(f"paceline: {plain(node['problem'])}", err=True)
    problems = (each["problem"] for each in (*answer["stacks"], *answer["nodes"]))
    if any(problem is not None for problem in problems):
        raise typer.Exit(PacelineError.exit_code)


def asked(client: Client, run: str, rank: int | None) -> dict[str, Any]:
    """Return the answer of ``GET /runs/{id}/stacks``."""
    query = {} if rank is None else {"rank": rank}
    answer: dict[str, Any] = client.call("GET", f"/runs/{run}/stacks", params=query)
    return answer


def where(stack: dict[str, Any]) -> str:
    """Describe where a rank is, in a sentence."""
    who = f"Rank {stack['rank']}"
    if stack["problem"] is not None:
        return f"{who}: {plain(stack['problem'])}."
    return f"{who} is at {plain(stack['frame'] or 'no line of the script')}."


def _block(stack: dict[str, Any]) -> str:
    head = f"rank {stack['rank']} on {stack['node']}: "
    return head + plain(stack["problem"] or stack["frame"]) + "\n" + safe(stack["text"].rstrip())
