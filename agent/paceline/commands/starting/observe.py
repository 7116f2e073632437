"""`paceline observe`: shows a training whose script does not use Paceline."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.commands.options import Name, NodeConnection, data_directory, grouped, node_name

_Command = Annotated[
    list[str],
    typer.Argument(
        metavar="-- COMMAND …", help="Command that starts the ranks: torchrun, accelerate, …"
    ),
]


@grouped
def observe(*, command: _Command, name: Name = None, connection: NodeConnection) -> None:
    """Run a command and show how its ranks train, which ranks are slow, and why.

    The script and its training are not changed, and nothing is planned. It may use
    DistributedDataParallel, FSDP2, Accelerate, Hugging Face's Trainer or Lightning::

        paceline observe -- torchrun --nproc-per-node 2 train.py
    """
    from paceline.node.starting import observing

    with connection.client() as client:
        code = observing.observe(
            command,
            client,
            name=name,
            node=node_name(connection.node),
            data=data_directory(connection.data),
            required=connection.required,
        )
    raise typer.Exit(code)
