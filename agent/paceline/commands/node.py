"""`paceline node`: supervises one run, on a node that an engine or the user provides for it."""

from __future__ import annotations

import logging
import os
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.commands import linking
from paceline.commands.options import (
    Connection,
    Data,
    Notice,
    PolicyChoice,
    Restarts,
    Server,
    TokenOptions,
    data_directory,
    grouped,
    node_name,
)
from paceline.core.errors import InputError

if TYPE_CHECKING:
    from paceline.node.client import Client

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EnginePlace:
    """Options from an engine: the run, and the engine's names for this process and this machine."""

    run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="ID of an existing run to join. Engines such as Slurm pass it, with --slot.",
        ),
    ] = None
    slot: Annotated[
        str | None,
        typer.Option(
            help="The engine's name of this process, such as the numbers of its job and task. It "
            "becomes part of the node's name, to make the name unique.",
            show_default="from Slurm's variables",
        ),
    ] = None
    host: Annotated[
        str,
        typer.Option(
            help="The name that the engine uses for this machine, such as Slurm's "
            "$SLURMD_NODENAME. If it is given, `paceline cordon` can also stop the engine "
            "from giving the machine new jobs."
        ),
    ] = ""


@dataclass(frozen=True, kw_only=True)
class JobTraining:
    """Options for training a script on the nodes of a job that the user started."""

    script: Annotated[
        str | None,
        typer.Argument(
            help="Training script to run on this node; give it or --run.", show_default=False
        ),
    ] = None
    args: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script.", show_default=False)
    ] = None
    run_key: Annotated[
        str | None,
        typer.Option(
            envvar="PACELINE_RUN_KEY",
            help="With a script: text that identifies the run. It must be equal on all nodes of "
            "the run, and different for each run.",
            show_default="Slurm's job and step",
        ),
    ] = None
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="2:4",
            help="With a script: number of nodes of the run, or minimum and maximum.",
            show_default="1, or the number of tasks of Slurm's step",
        ),
    ] = None
    nproc: Annotated[
        int, typer.Option(min=1, help="With a script: number of ranks on each node.")
    ] = 1
    choice: PolicyChoice
    restarts: Restarts


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("node", context_settings={"allow_interspersed_args": False})(node)


@grouped
def node(
    *,
    place: EnginePlace,
    training: JobTraining,
    server: Server = None,
    data: Data = None,
    authentication: TokenOptions,
    notice: Notice = None,
) -> None:
    """Supervise one run on this node, until the run ends.

    With a script, start this command on each node of a job: the nodes then train the script
    together, as one run of the server. The output of rank 0 is shown. With --run, this node joins
    an existing run: engines such as Slurm use this form.

    The exit code is 0 if the run has finished or the node has left the run on request, 2 if the
    server rejects the request, and otherwise 1.
    """
    from paceline.node import machine
    from paceline.node.agent import Agent
    from paceline.node.duty import GIVE_UP_S, Duty
    from paceline.node.health.notice import Notices, provider_of

    notices = None if notice is None else Notices(provider_of(notice))
    connection = Connection(server=server, authentication=authentication)
    run, slot = place.run, place.slot
    shows = training.script is not None and run is None
    if training.script is not None and run is None:
        linking.log_to_stderr()
        with connection.client(timeout_s=5.0) as client:
            run, slot, token = _adopted(client, training.script, training, slot)
        connection = Connection(server=server, authentication=TokenOptions(token=token))
    elif training.script is not None or run is None:
        raise InputError("give either a script to train, or --run with the ID of an existing run")
    elif slot is None:
        raise InputError("--slot: required with --run, to make the node's name unique")
    node_id = node_name(f"{machine.default_name()}-{_plain(slot)}.{run}")
    directory = data_directory(_own_directory(data, node_id))
    linking.log_to_stderr()
    with ExitStack() as stack:
        client = stack.enter_context(connection.client(timeout_s=5.0))
        session = linking.wait_for_session(client, node_id, patience_s=GIVE_UP_S)
        link = stack.enter_context(linking.linked(session))
        duty = Duty(client, run, node_id, place.host, shows_output=shows)
        finder = linking.session_finder(client, node_id, None)
        Agent(link, node_id, directory, finder, duty, notices=notices).run()
    raise typer.Exit(duty.exit_code)


def _adopted(
    client: Client, script: str, training: JobTraining, slot: str | None
) -> tuple[str, str, str]:
    """Register this process with the server, as a node of the run that its run key names.

    The first node that registers creates the run. Return the run's id, this process's slot, and a
    token for the run's nodes.
    """
    from paceline.node import duty
    from paceline.node.starting.several import counted
    from paceline.wire import Launch

    nodes, restarts = training.nodes, training.restarts
    where = duty.place(os.environ, training.run_key, slot, alone=nodes is None)
    least, most = counted(nodes) if nodes is not None else (where.nodes, where.nodes)
    launch = Launch(
        script,
        training.args or [],
        training.nproc,
        {},
        str(Path.cwd()),
        restarts.max_restarts,
        nodes_min=least,
        nodes_max=most,
    )
    duty.check_launch(launch)
    choice = training.choice.rest_fields() | restarts.rest_fields()
    made = linking.patiently(lambda: duty.adopt(client, where, launch, choice), duty.GIVE_UP_S)
    _log.info(
        "joining run %s with the key %s: %s/runs/%s",
        made["run"],
        where.key,
        client.server,
        made["run"],
    )
    return str(made["run"]), where.slot, str(made["token"])


def _plain(slot: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", slot)


def _own_directory(data: Path | None, name: str) -> Path:
    """Return this node's own data directory: several nodes may see the same directory `data`."""
    from paceline.node import rundir

    return (data or rundir.default_data()) / "nodes" / name
