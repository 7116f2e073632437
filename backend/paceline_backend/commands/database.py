"""Command `paceline db`: maintenance of the whole database. No server needs to run."""

from __future__ import annotations

import getpass
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from paceline.commands.options import Json
from paceline.commands.printing import print_json
from paceline.core.errors import PacelineError
from paceline_backend.commands.options import DATA, Data, Database
from paceline_backend.store import Store
from paceline_backend.store.audit import Requester
from paceline_backend.store.upkeep import administration
from paceline_backend.store.upkeep import prune as pruning

# Exit codes; see docs/internals.md.
_FAILED, _ENVIRONMENT = 1, 3
_MIB = 2**20

app = typer.Typer(no_args_is_help=True, help="Upgrade, check, prune and copy the database.")


@contextmanager
def _opened(database: str | None, data: Path, *, new: bool = False) -> Iterator[Store]:
    """Open the database without migrating it; errors end the command.

    Unless `new` is true, the database must exist.
    """
    from paceline_backend.server.supervisor import embedded_database

    try:
        with Store(database or embedded_database(data)) as store:
            # Without this check, SQLite would create an empty file for a mistyped name.
            if store.is_sqlite and not new and not Path(str(store.url.database)).exists():
                raise PacelineError(f"there is no database {store.name}")
            yield store
    except PacelineError as error:
        typer.echo(f"paceline db: {error}", err=True)
        raise typer.Exit(_ENVIRONMENT) from error


@app.command()
def upgrade(database: Database = None, data: Data = DATA) -> None:
    """Create the tables of this version, as a server does when it starts."""
    with _opened(database, data, new=True) as store:
        Store.open(store.url.render_as_string(hide_password=False)).close()
        typer.echo(f"{store.name} has the tables of this version")


@app.command()
def check(database: Database = None, data: Data = DATA, as_json: Json = False) -> None:
    """Check the database file, the version of the tables, and stored sums over steps."""
    with _opened(database, data) as store:
        faults = list(administration.faults(store))
    if as_json:
        print_json({"faults": faults})
    else:
        typer.echo("\n".join(faults) if faults else f"{store.name} has no faults")
    if faults:
        raise typer.Exit(_FAILED)


@app.command()
def prune(
    keep_days: Annotated[
        float | None,
        typer.Option(min=0, help="Delete runs that ended more than this many days ago."),
    ] = None,
    keep_runs: Annotated[
        int | None,
        typer.Option(min=0, help="Keep this many of the newest ended runs."),
    ] = None,
    keep_bytes: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Delete the oldest ended runs until the database's rows take at most this many "
            "bytes.",
        ),
    ] = None,
    database: Database = None,
    data: Data = DATA,
    as_json: Json = False,
) -> None:
    """Delete runs that have ended, oldest first. A server may run meanwhile."""
    keep = pruning.Keep(keep_days, keep_runs, keep_bytes)
    if keep.everything:
        raise typer.BadParameter("give at least one of --keep-days, --keep-runs, --keep-bytes")
    with _opened(database, data) as store:
        deleted = []
        for run in pruning.prune(store, keep, _pause):
            deleted.append(run)
            if not as_json:
                typer.echo(f"deleted {run}")
        with store.read() as connection:
            used = pruning.used_bytes(connection)
    if as_json:
        print_json({"deleted": deleted, "bytes": used})
    else:
        typer.echo(f"the rows of the database take {used / _MIB:,.1f} MiB")


def _pause(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@app.command("rotate-secret")
def rotate_secret(
    yes: Annotated[
        bool, typer.Option("--yes", help="Replace the secret even while runs are active.")
    ] = False,
    database: Database = None,
    data: Data = DATA,
) -> None:
    """Replace the server's secret, if an attacker may have read it. Stop all servers first.

    Agents get new keys when a server runs again. Active runs lose their connection to the server,
    and continue to train without it until they are resumed. Browsers must log in again, and
    webhooks must be created again.
    """
    with _opened(database, data) as store:
        with store.read() as connection:
            active = administration.active_runs(connection)
        if active and not yes:
            raise PacelineError(
                f"{len(active)} runs are active and would lose their connection to the server "
                f"({', '.join(active[:5])}{', …' if active[5:] else ''}): stop them first, or give "
                "--yes"
            )
        user = f"database, by {getpass.getuser()}"
        administration.rotate_secret(store, Requester(user, "admin", via="paceline db"))
        typer.echo(f"{store.name} has a new secret: restart the servers")


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="File to create.")],
    database: Database = None,
    data: Data = DATA,
) -> None:
    """Copy the database to a file, for Postgres with pg_dump. Servers may run meanwhile."""
    with _opened(database, data) as store:
        administration.backup(store, file)
        typer.echo(f"{file} is a copy of {store.name}. It has the server's secret: keep it safe")


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(help="File that `paceline db backup` wrote.")],
    replace: Annotated[
        bool, typer.Option("--replace", help="Overwrite the database even if it has tables.")
    ] = False,
    database: Database = None,
    data: Data = DATA,
) -> None:
    """Restore the database from a copy, for Postgres with pg_restore. Stop all servers first."""
    with _opened(database, data, new=True) as store:
        administration.restore(store, file, replace=replace)
        typer.echo(f"{store.name} was restored from {file}")
