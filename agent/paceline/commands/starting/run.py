"""`paceline run`: trains on this machine, or on nodes that a control plane chooses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.commands import options
from paceline.commands.options import (
    Data,
    Env,
    MaxRestarts,
    Name,
    Node,
    Parameters,
    Policy,
    RestartHung,
    Server,
    Token,
    TokenFile,
    connected,
    data_directory,
    given,
    node_name,
    parameters_of,
)
from paceline.core.errors import InputError

_Script = Annotated[str, typer.Argument(help="Python script to train with.")]
_Args = Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")]
_Nproc = Annotated[
    int | None, typer.Option(min=1, help="Ranks.", show_default="1, or one per emulated device")
]
_Nodes = Annotated[
    str | None,
    typer.Option(
        metavar="2:4",
        help="How many nodes, or least and most: agents train it, --nproc ranks on each.",
        show_default="this one",
    ),
]
_Spares = Annotated[
    int,
    typer.Option(min=0, help="With --nodes: idle nodes that are held back while it trains."),
]
_ReplaceSlowNodes = Annotated[
    bool,
    typer.Option(
        "--replace-slow-nodes",
        help="With --spares: a node that is slow for long makes way for a spare.",
    ),
]
_JoinCheck = Annotated[
    float | None,
    typer.Option(
        "--join-check",
        metavar="FACTOR",
        min=0,
        max=1000,
        help="With --nodes: leave out nodes so many times slower than the median; 0: none.",
        show_default="1.5",
    ),
]
_Backend = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Who gives the nodes, such as `slurm`; `paceline backends` lists all.",
        show_default="agents of nodes",
    ),
]
_BackendOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="An option of the backend; repeatable."),
]
_Observe = Annotated[
    bool,
    typer.Option("--observe", help="The script has no Session: only show how its ranks train."),
]
_Driver = Annotated[
    bool,
    typer.Option(
        "--driver",
        help="The script is no rank, but starts the ranks, as Ray Train's does: --nproc of them "
        "at most, anew --max-restarts times at most.",
    ),
]
_Slowdown = Annotated[
    str | None,
    typer.Option(metavar="1,1,1.5,3", help="Emulate device speeds: a factor for each rank."),
]
_SecondsPerUnit = Annotated[float, typer.Option(help="Emulated time of one size unit at factor 1.")]
_SecondsPerStep = Annotated[
    float, typer.Option(help="Emulated time that each step takes in addition, at any factor.")
]
_Emulate = Annotated[
    str | None,
    typer.Option(
        metavar="JSON|FILE", help="Emulate devices, all options: docs/training-scripts.md."
    ),
]


def run(
    script: _Script,
    args: _Args = None,
    nproc: _Nproc = None,
    nodes: _Nodes = None,
    spares: _Spares = 0,
    replace_slow_nodes: _ReplaceSlowNodes = False,
    join_check: _JoinCheck = None,
    backend: _Backend = None,
    backend_option: _BackendOption = None,
    observe: _Observe = False,
    driver: _Driver = False,
    policy: Policy = None,
    param: Parameters = None,
    name: Name = None,
    env: Env = None,
    max_restarts: MaxRestarts = 0,
    restart_hung: RestartHung = None,
    slowdown: _Slowdown = None,
    seconds_per_unit: _SecondsPerUnit = 1e-5,
    seconds_per_step: _SecondsPerStep = 0.005,
    emulate: _Emulate = None,
    server: Server = None,
    node: Node = None,
    data: Data = None,
    token: Token = None,
    token_file: TokenFile = None,
) -> None:
    """Run a training script on this machine, like torchrun. Options come before the script."""
    from paceline import observation
    from paceline.core import driver as drivers
    from paceline.node.starting import foreground, several
    from paceline.node.starting.resume import variables as variables_of
    from paceline.wire import Launch

    if backend_option and backend is None:
        raise InputError("--backend-option: name the backend with --backend")
    devices = _devices(emulate, slowdown, seconds_per_unit, seconds_per_step, nproc)
    variables = variables_of(env or [])
    if observe:
        policy = _observed(policy, param, emulates=devices is not None)
    if devices is not None:
        nproc = len(devices["a_s"])
        variables["PACELINE_EMULATE"] = json.dumps(devices)
    if driver:
        if restart_hung is not None:
            raise InputError(
                "--driver: whoever starts the ranks ends them: leave --restart-hung out"
            )
        variables[drivers.VARIABLE] = "1"
    launch = Launch(script, args or [], nproc or 1, variables, str(Path.cwd()), max_restarts)
    name = name or Path(script).stem
    if nodes is not None or backend is not None:
        asked = {
            "name": name,
            "parameters": parameters_of(param),
            "policy": policy,
            "join_check": join_check,
            "restart_hung_s": restart_hung,
            "backend": backend,
            "backend_options": parameters_of(backend_option, "--backend-option") or None,
            "spares": spares or None,
            "replace_slow_nodes": replace_slow_nodes or None,
        }
        choice = {field: value for field, value in asked.items() if value is not None}
        with connected(server, token, token_file) as client:
            raise typer.Exit(several.train(client, launch, nodes or "1", choice))
    # If agents start the ranks, the control plane sets this variable.
    if observe:
        launch.env[observation.VARIABLE] = "1"
    if join_check is not None:
        raise InputError("--join-check: only with --nodes")
    if spares or replace_slow_nodes:
        raise InputError("--spares and --replace-slow-nodes: only with --nodes")
    code = foreground.train(
        launch,
        data=data_directory(data),
        node=node_name(node),
        server=server,
        default_server=options.DEFAULT_SERVER,
        token=given(token, token_file),
        policy=policy,
        parameters=parameters_of(param),
        name=name,
        restart_hung_s=restart_hung,
    )
    raise typer.Exit(code)


def _devices(
    emulate: str | None,
    slowdown: str | None,
    seconds_per_unit: float,
    seconds_per_step: float,
    nproc: int | None,
) -> dict[str, Any] | None:
    from paceline.node.starting import foreground

    if emulate is not None and slowdown is not None:
        raise InputError("--emulate and --slowdown: give one of them")
    if emulate is not None:
        return foreground.whole_emulation(emulate, nproc)
    if slowdown is not None:
        return foreground.emulation(slowdown, seconds_per_unit, seconds_per_step, nproc)
    return None


def _observed(policy: str | None, param: list[str] | None, *, emulates: bool) -> str:
    """Return the name that stands in place of a policy; reject options that need a Session."""
    from paceline.wire import OBSERVED

    if policy is not None or param or emulates:
        raise InputError(
            "--observe: nothing is planned or emulated, so leave out --policy, --param, "
            "--slowdown and --emulate"
        )
    return OBSERVED
