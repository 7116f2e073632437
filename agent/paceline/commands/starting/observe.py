"""`paceline observe`: shows a training whose script does not use Paceline."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.commands import options
from paceline.commands.options import (
    Data,
    Name,
    Node,
    Server,
    Token,
    TokenFile,
    data_directory,
    given,
    node_name,
)

_Command = Annotated[
    list[str],
    typer.Argument(metavar="-- COMMAND …", help="What starts the ranks: torchrun, accelerate, …"),
]


def observe(
    command: _Command,
    name: Name = None,
    server: Server = None,
    node: Node = None,
    data: Data = None,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Run a command and show how its ranks train, which ranks are slow, and why.

    The script and its training are not changed, and nothing is planned. It may use
    DistributedDataParallel, FSDP2, Accelerate, Hugging Face's Trainer or Lightning::

        paceline observe -- torchrun --nproc-per-node 2 train.py
    """
    from paceline.node.starting import observing

    code = observing.observe(
        command,
        data=data_directory(data),
        node=node_name(node),
        server=server,
        default_server=options.DEFAULT_SERVER,
        token=given(token, token_file),
        name=name,
    )
    raise typer.Exit(code)
