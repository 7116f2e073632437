"""Commands that start a training script: `run`, `observe` and `doctor`.

`paceline run` trains on this machine, or on nodes that a control plane chooses. `paceline observe`
shows a training whose script does not use Paceline. `paceline doctor` checks a script by running
its first steps, without a server. Options come before the script or command.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.commands.options import (
    Env,
    Json,
    Name,
    NodeConnection,
    PolicyChoice,
    Restarts,
    data_directory,
    grouped,
    node_name,
    parameters_of,
)
from paceline.commands.printing import plain, print_json
from paceline.core.errors import InputError

if TYPE_CHECKING:
    from paceline.node.starting.examining import Finding

_ObservedCommand = Annotated[
    list[str],
    typer.Argument(
        metavar="-- COMMAND …",
        help="Command that starts the ranks, such as torchrun or accelerate launch, with its "
        "arguments.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class RankPlacement:
    """The nodes on which the ranks run."""

    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of ranks; with --nodes or --backend, number of ranks on each node.",
            show_default="1, or one per emulated device",
        ),
    ] = None
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="2:4",
            help="Number of nodes to train on, or minimum and maximum. The server chooses the "
            "nodes, and their agents start the ranks.",
            show_default="this machine only",
        ),
    ] = None
    spares: Annotated[
        int,
        typer.Option(
            min=0,
            help="With --nodes: number of idle nodes to reserve for the run, as replacements for "
            "nodes that are lost or slow.",
        ),
    ] = 0
    replace_slow_nodes: Annotated[
        bool,
        typer.Option(
            "--replace-slow-nodes",
            help="With --spares: replace slow nodes by reserved nodes automatically.",
        ),
    ] = False
    join_check: Annotated[
        float | None,
        typer.Option(
            "--join-check",
            metavar="FACTOR",
            min=0,
            max=1000,
            help="With --nodes: exclude nodes whose measured speed is more than this many times "
            "slower than the median. 0: exclude none.",
            show_default="1.5",
        ),
    ] = None
    backend: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Training backend that provides the nodes, such as `slurm`; `paceline "
            "backends` lists all backends.",
            show_default="this machine, or with --nodes the nodes with agents",
        ),
    ] = None
    backend_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Option for the training backend; repeatable. `paceline backends` lists options.",
        ),
    ] = None

    @property
    def remote(self) -> bool:
        """True if the server chooses the nodes; else the ranks run on this machine."""
        return self.nodes is not None or self.backend is not None

    def check(self) -> None:
        """Raise an InputError if an option is given without another option that it requires."""
        if self.backend_option and self.backend is None:
            raise InputError("--backend-option: name the backend with --backend")
        if not self.remote and self.join_check is not None:
            raise InputError("--join-check: only with --nodes")
        if not self.remote and (self.spares or self.replace_slow_nodes):
            raise InputError("--spares and --replace-slow-nodes: only with --nodes")

    def rest_fields(self) -> dict[str, Any]:
        """Return the fields of ``POST /runs`` for nodes that the server chooses."""
        asked = {
            "join_check": self.join_check,
            "backend": self.backend,
            "backend_options": parameters_of(self.backend_option, "--backend-option") or None,
            "spares": self.spares or None,
            "replace_slow_nodes": self.replace_slow_nodes or None,
        }
        return {field: value for field, value in asked.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Program:
    """The training script, its arguments, and whether the script is observed or is a driver."""

    script: Annotated[str, typer.Argument(help="Training script, a Python file.")]
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None
    observe: Annotated[
        bool,
        typer.Option(
            "--observe",
            help="Show how the script's ranks train, and plan nothing: for a script that creates "
            "no paceline.Session.",
        ),
    ] = False
    driver: Annotated[
        bool,
        typer.Option(
            "--driver",
            help="For a script that starts the ranks itself, as with Ray Train: at most --nproc "
            "ranks, which it restarts at most --max-restarts times.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class RunTerms:
    """Policy, environment and restarts of a new run."""

    choice: PolicyChoice
    env: Env = None
    restarts: Restarts


@dataclass(frozen=True, kw_only=True)
class DeviceEmulation:
    """Emulated speeds of the ranks' devices."""

    slowdown: Annotated[
        str | None,
        typer.Option(
            metavar="1,1,1.5,3",
            help="Emulate devices of different speeds. Each rank has a factor, by which "
            "--seconds-per-unit is multiplied.",
        ),
    ] = None
    seconds_per_unit: Annotated[
        float,
        typer.Option(
            help="With --slowdown: emulated seconds that one unit of the samples' sizes takes on a "
            "rank with factor 1."
        ),
    ] = 1e-5
    seconds_per_step: Annotated[
        float,
        typer.Option(
            help="With --slowdown: emulated seconds that are added to each step of each rank."
        ),
    ] = 0.005
    emulate: Annotated[
        str | None,
        typer.Option(
            metavar="JSON|FILE",
            help="Emulate the devices that a JSON object, or a file with one, describes. "
            "docs/training-scripts.md lists its fields.",
        ),
    ] = None

    def devices(self, nproc: int | None) -> dict[str, Any] | None:
        """Return the value of ``PACELINE_EMULATE``, or None if nothing is emulated."""
        from paceline.node.starting import foreground

        if self.emulate is not None and self.slowdown is not None:
            raise InputError("--emulate and --slowdown: give one of them")
        if self.emulate is not None:
            return foreground.whole_emulation(self.emulate, nproc)
        if self.slowdown is not None:
            return foreground.emulation(
                self.slowdown, self.seconds_per_unit, self.seconds_per_step, nproc
            )
        return None


@grouped
def run(
    *,
    placement: RankPlacement,
    program: Program,
    terms: RunTerms,
    emulation: DeviceEmulation,
    connection: NodeConnection,
) -> None:
    """Run a training script, on this machine like torchrun, or on nodes that the server chooses.

    Options come before the script.
    """
    from paceline import observation
    from paceline.core import driver as drivers
    from paceline.node.starting import foreground, several
    from paceline.node.starting.resume import variables as variables_of
    from paceline.wire import Launch

    placement.check()
    script, nproc, restarts = program.script, placement.nproc, terms.restarts
    devices = emulation.devices(nproc)
    variables = variables_of(terms.env or [])
    choice = terms.choice.rest_fields() | restarts.rest_fields()
    choice["name"] = terms.choice.name or Path(script).stem
    if program.observe:
        choice["policy"] = _observed(terms.choice, emulates=devices is not None)
    if devices is not None:
        nproc = len(devices["a_s"])
        variables["PACELINE_EMULATE"] = json.dumps(devices)
    if program.driver:
        if restarts.restart_hung is not None:
            raise InputError(
                "--restart-hung: leave it out with --driver, because the script itself restarts "
                "the ranks"
            )
        variables[drivers.VARIABLE] = "1"
    launch = Launch(
        script, program.args or [], nproc or 1, variables, str(Path.cwd()), restarts.max_restarts
    )
    with connection.client() as client:
        if placement.remote:
            choice |= placement.rest_fields()
            raise typer.Exit(several.train(client, launch, placement.nodes or "1", choice))
        # Only ranks that this process starts need the variable here: for ranks of agents, the
        # control plane sets it.
        if program.observe:
            launch.env[observation.VARIABLE] = "1"
        code = foreground.train(
            launch,
            client,
            choice,
            node=node_name(connection.node),
            data=data_directory(connection.data),
            required=connection.required,
        )
    raise typer.Exit(code)


def _observed(choice: PolicyChoice, *, emulates: bool) -> str:
    from paceline.wire import OBSERVED

    if choice.policy is not None or choice.param or emulates:
        raise InputError(
            "--observe: nothing is planned or emulated, so leave out --policy, --param, "
            "--slowdown and --emulate"
        )
    return OBSERVED


@grouped
def observe(*, command: _ObservedCommand, name: Name = None, connection: NodeConnection) -> None:
    """Run a command; the server shows how its ranks train, which ranks are slow, and why.

    The script and its training are not changed, and nothing is planned. The script may use
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


@dataclass(frozen=True, kw_only=True)
class DoctorTrial:
    """Number of ranks and steps of the trial, and its time limit."""

    nproc: Annotated[int, typer.Option(min=1, help="Number of ranks that run the script.")] = 2
    steps: Annotated[int, typer.Option(min=1, help="Number of steps that the check runs.")] = 2
    timeout: Annotated[
        float,
        typer.Option(min=1, metavar="SECONDS", help="Maximum number of seconds for the check."),
    ] = 600.0


@grouped
def doctor(
    *,
    script: Annotated[str, typer.Argument(help="Python script to check.")],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the script.")] = None,
    trial: DoctorTrial,
    env: Env = None,
    as_json: Json = False,
) -> None:
    """Check a script by running its first steps. Options come before the script.

    Nothing is reported to a server. Checkpoints of session.checkpoint are saved to a temporary
    folder. Files that the script saves itself are kept: pass the script another folder to save to.
    Exit code 1: the check found problems.
    """
    from paceline.node.starting.examining import Level, examine
    from paceline.node.starting.foreground import say
    from paceline.node.starting.resume import variables
    from paceline.wire import Launch

    steps, nproc = trial.steps, trial.nproc
    launch = Launch(script, args or [], nproc, variables(env or []), str(Path.cwd()))
    say(f"{script}: {_count(steps, 'step')} on {_count(nproc, 'rank')}")
    findings = examine(launch, steps, trial.timeout)
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    if as_json:
        listed = [_document(finding) for finding in findings]
        print_json({"script": script, "ranks": nproc, "problems": problems, "findings": listed})
    else:
        for finding in findings:
            typer.echo(_lines(finding))
        typer.echo(f"{_count(problems, 'problem')} found")
    raise typer.Exit(1 if problems else 0)


def _document(finding: Finding) -> dict[str, object]:
    return {
        "check": finding.check,
        "level": finding.level.value,
        "says": finding.says,
        "do": finding.do,
        "figures": finding.figures,
    }


def _lines(finding: Finding) -> str:
    first, *more = finding.says.split("\n")
    lines = [
        f"{finding.level.value:8} {finding.check}: {first}",
        *(f"{'':9}{line}" for line in more),
    ]
    if finding.do:
        lines.append(f"{'':9}→ {finding.do}")
    return "\n".join(map(plain, lines))


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
