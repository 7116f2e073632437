"""`paceline hang`: which ranks of a run wait for which. It also registers `paceline stacks`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import Connection, Json, RunId, grouped
from paceline.commands.printing import plain, print_json
from paceline.commands.stacks import asked, stacks, where
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
        float, typer.Option(min=0, max=86_400, help="Minimum number of seconds without a step.")
    ] = 30.0,
    with_stacks: Annotated[
        bool,
        typer.Option("--stacks", help="Show where in the code the blocking ranks are."),
    ] = False,
    connection: Connection,
    as_json: Json = False,
) -> None:
    """Report whether a run hangs, and which ranks wait for which. Exit code 4: it hangs."""
    with connection.client() as client:
        run_id = client.run(run_id)
        answer = client.call("GET", f"/runs/{run_id}/hang", params={"after_s": after})
        if with_stacks:
            answer["stacks"] = []
        if with_stacks and answer["hung"]:
            try:
                answer["stacks"] = _stacks(client, run_id, answer)
            # The hang itself is reported even without stacks.
            except PacelineError as error:
                typer.echo(f"paceline: {plain(str(error))}", err=True)
        words = answer["words"] or _state(client, run_id)
    if as_json:
        print_json(answer)
    else:
        places = [where(stack) for stack in answer.get("stacks", ())]
        typer.echo(plain(" ".join([words, *places])))
    raise typer.Exit(4 if answer["hung"] else 0)


def _state(client: Client, run: str) -> str:
    state = client.call("GET", f"/runs/{run}")["state"]
    return f"run {run} is {state}" + (" and does not hang" if state == "running" else "")


def _stacks(client: Client, run: str, hang: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the stacks of the ranks that block the others, or of all ranks if none does."""
    ranks = hang["holding"] or hang["waiting"]
    listed: list[dict[str, Any]] = asked(client, run, None)["stacks"]
    return [stack for stack in listed if not ranks or stack["rank"] in ranks]
