"""`paceline hang` and `paceline stacks`: which ranks wait for which, and where in the code.

Both need a running server: `hang` reads the ranks' reports, and `stacks` requests the ranks' stacks
from the agents of the run's nodes. `hang --stacks` does both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import Connection, Json, RunId, grouped
from paceline.commands.printing import plain, print_json, safe
from paceline.core.errors import PacelineError

if TYPE_CHECKING:
    from paceline.node.client import Client


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(hang)
    app.command()(stacks)


@grouped
def hang(
    *,
    run_id: RunId,
    after: Annotated[
        float,
        typer.Option(
            min=0,
            max=86_400,
            help="Number of seconds without a completed step after which a run counts as hung.",
        ),
    ] = 30.0,
    with_stacks: Annotated[
        bool,
        typer.Option(
            "--stacks",
            help="If the run hangs, also show the current line of code of each rank that blocks "
            "others. If no such rank is known, show the lines of the ranks that wait.",
        ),
    ] = False,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Report whether a run hangs, and which ranks wait for which. Exit code 4: the run hangs."""
    with connection.client() as client:
        run_id = client.run(run_id)
        answer = client.call("GET", f"/runs/{run_id}/hang", params={"after_s": after})
        if with_stacks:
            answer["stacks"] = []
        if with_stacks and answer["hung"]:
            try:
                answer["stacks"] = _blocking_stacks(client, run_id, answer)
            # The hang is reported even if the stacks cannot be read.
            except PacelineError as error:
                typer.echo(f"paceline: {plain(str(error))}", err=True)
        words = answer["words"] or _state(client, run_id)
    if as_json:
        print_json(answer)
    else:
        places = [_where(stack) for stack in answer.get("stacks", ())]
        typer.echo(plain(" ".join([words, *places])))
    raise typer.Exit(4 if answer["hung"] else 0)


def _state(client: Client, run: str) -> str:
    state = client.call("GET", f"/runs/{run}")["state"]
    return f"run {run} is {state}" + (" and does not hang" if state == "running" else "")


def _blocking_stacks(client: Client, run: str, hang: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the stacks of the blocking ranks, else of the waiting ranks, else of all ranks."""
    ranks = hang["holding"] or hang["waiting"]
    listed: list[dict[str, Any]] = _stacks_of(client, run, None)["stacks"]
    return [stack for stack in listed if not ranks or stack["rank"] in ranks]


@grouped
def stacks(
    *,
    run_id: RunId,
    rank: Annotated[
        int | None,
        typer.Option(min=0, help="Print only the stacks of this rank.", show_default="all ranks"),
    ] = None,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Print the Python stacks of a run's ranks, also of ranks that hang.

    The token must have the role operator. Exit code 3: the stacks of a rank are missing.
    """
    with connection.client() as client:
        answer = _stacks_of(client, client.run(run_id), rank)
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


def _stacks_of(client: Client, run: str, rank: int | None) -> dict[str, Any]:
    query = {} if rank is None else {"rank": rank}
    answer: dict[str, Any] = client.call("GET", f"/runs/{run}/stacks", params=query)
    return answer


def _where(stack: dict[str, Any]) -> str:
    who = f"Rank {stack['rank']}"
    if stack["problem"] is not None:
        return f"{who}: {plain(stack['problem'])}."
    return f"{who} is at {plain(stack['frame'] or 'no line of the script')}."


def _block(stack: dict[str, Any]) -> str:
    head = f"rank {stack['rank']} on {stack['node']}: "
    return head + plain(stack["problem"] or stack["frame"]) + "\n" + safe(stack["text"].rstrip())
