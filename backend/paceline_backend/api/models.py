"""Bodies of requests and answers; field names as in docs/rest.md."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from paceline.wire import problems
from paceline_backend.policies import Changes


def _text(value: str) -> str:
    if "\0" in value:
        raise ValueError("holds a NUL character, which neither a process nor a database takes")
    if reason := problems.of_text(value, "it"):
        raise ValueError(reason)
    return value


def _variable(name: str) -> str:
    if not name or "=" in name:
        raise ValueError("is no name of a variable")
    return _text(name)


def _bounded(texts: list[str]) -> list[str]:
    size = sum(len(text) + 1 for text in texts)  # each ends with a NUL where a process begins
    if size > _MOST_TEXT:
        raise ValueError(f"has {size:,} characters altogether; at most {_MOST_TEXT:,} are taken")
    return texts


def _bounded_variables(variables: dict[str, str]) -> dict[str, str]:
    _bounded([*variables, *variables.values()])
    return variables


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    if reason := problems.of_plain(value, "it"):
        raise ValueError(reason)
    return value


# Of all arguments, or of all variables. Linux takes no more in a single argument, and each answer
# that lists runs repeats the arguments.
_MOST_TEXT = 131_072

Text = Annotated[str, AfterValidator(_text)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(_text)]
Location = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_text)]  # PATH_MAX
PolicyName = Annotated[str, StringConstraints(max_length=200), AfterValidator(_text)]
NodeName = Annotated[str, StringConstraints(max_length=255), AfterValidator(_text)]
Variable = Annotated[str, AfterValidator(_variable)]
State = Literal["pending", "starting", "running", "finished", "failed", "stopped"]


class In(BaseModel):
    """A request: a field we do not know is a mistake, not a wish to ignore."""

    model_config = ConfigDict(extra="forbid")


class Version(BaseModel):
    """This server."""

    version: str = Field(examples=["0.1.0"])
    protocol: int = Field(description="of messages on the bus", examples=[1])
    id: str = Field(description="of this control plane, lasting", examples=["3f9a1c07be52d4e6"])
    bus: str = Field(description="for agents", examples=["redis://127.0.0.1:6379/0"])


class PolicyInfo(BaseModel):
    """A preset."""

    name: str = Field(examples=["chronica"])
    summary: str = Field(examples=["Balances the load of every step by learned speeds"])
    source: str = Field(examples=["CHRONICA (2022)"])
    parameters: dict[str, dict[str, Any]] = Field(
        description="JSON Schema of each", examples=[{"window": {"type": "integer", "default": 64}}]
    )
    changes: Changes = Field(
        description="what it changes in the training, compared with plain DDP of the same seed, "
        "with default parameters: nothing; which samples meet in a global batch; or also which "
        "gradients meet, and when",
        examples=["batches"],
    )
    changes_with: dict[str, dict[str, Changes]] = Field(
        description="the same for those values of parameters with an enum that change it",
        examples=[{"mode": {"free": "batches"}}],
    )


class Node(BaseModel):
    """A machine with an agent."""

    id: str = Field(examples=["node-1"])
    hostname: str = Field(examples=["node-1.example.org"])
    cores: int = Field(examples=[16])
    memory_bytes: int = Field(examples=[68719476736])
    gpus: list[str] = Field(examples=[[]])
    paceline: str = Field(description="release", examples=["0.1.0"])
    registered_at: float = Field(examples=[1767225600.0])
    heartbeat_at: float = Field(description="Unix time", examples=[1767225660.0])
    alive: bool = Field(description="a heartbeat in the last 10 s", examples=[True])
    runs: list[str] = Field(examples=[["3f9a1c07be52"]])


class RunCreate(In):
    """A run to start."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "script": "/home/me/train.py",
                    "args": ["--epochs", "3"],
                    "nproc": 4,
                    "policy": "chronica",
                }
            ]
        },
    )

    script: Location = Field(min_length=1, description="path on the node; absolute, or from `cwd`")
    args: Annotated[list[Text], AfterValidator(_bounded)] = []
    nproc: int = Field(ge=1, le=10_000, description="ranks")
    policy: PolicyName = "paceline"
    parameters: dict[str, Any] = {}
    name: Name | None = Field(default=None, description="default: the script's")
    node: NodeName | None = Field(default=None, description="default: the least busy one alive")
    env: Annotated[dict[Variable, Text], AfterValidator(_bounded_variables)] = {}
    cwd: Location | None = None
    max_restarts: int = Field(default=0, ge=0, le=1000)
    launch: bool = Field(default=True, description="false: the caller starts it itself")
    backend: Literal["local", "simulated"] = "local"
    scenario: Annotated[dict[str, Any], AfterValidator(_plain)] | None = Field(
        default=None, description="what a simulated run simulates; docs/simulator.md"
    )


class Controller(BaseModel):
    """Who plans a run."""

    owner: str = Field(examples=["host:4711"])
    alive: bool = Field(description="its lease has not expired", examples=[True])


class Run(BaseModel):
    """A run. What only its leader knows is null until it has said hello."""

    id: str = Field(examples=["3f9a1c07be52"])
    name: str = Field(examples=["train"])
    state: State = Field(examples=["running"])
    backend: str = Field(examples=["local"])
    node: str | None = Field(examples=["node-1"])
    script: str = Field(examples=["/home/me/train.py"])
    args: list[str] = Field(examples=[["--epochs", "3"]])
    cwd: str | None = Field(examples=[None])
    nproc: int = Field(examples=[4])
    max_restarts: int = Field(examples=[0])
    policy: str = Field(description="in force, or requested last", examples=["bsp"])
    version: int = Field(description="of the policy: +1 at each switch", examples=[0])
    created_at: float = Field(examples=[1767225600.0])
    started_at: float | None = Field(examples=[1767225603.5])
    ended_at: float | None = Field(examples=[None])
    exit_code: int | None = Field(examples=[None])
    message: str | None = Field(description="why it failed", examples=[None])
    dropped: int = Field(description="records lost to a full spool", examples=[0])
    attempt: int | None = Field(examples=[0])
    world: int | None = Field(examples=[4])
    samples: int | None = Field(examples=[1074])
    global_batch: int | None = Field(examples=[64])
    seed: int | None = Field(examples=[0])
    epochs: int | None = Field(examples=[15])
    device: str | None = Field(examples=["cpu"])
    emulated: dict[str, Any] | None = Field(
        description="emulated device speeds", examples=[{"a_s": [1e-5, 2e-5], "b_s": [0, 0]}]
    )
    dif: float | None = Field(description="of the data set", examples=[140.2])
    epoch: int | None = Field(description="of the last complete step", examples=[1])
    step: int | None = Field(description="last complete step", examples=[25])
    controller: Controller | None


class RunPage(BaseModel):
    """Runs, newest first."""

    items: list[Run]
    next_cursor: str | None = Field(description="null: the last page", examples=["MTIz"])


class Stop(In):
    """How to stop."""

    force: bool = Field(
        default=False,
        description="true: end the processes now; false: at the next segment",
        examples=[False],
    )


class PolicySwitch(In):
    """The policy to switch to."""

    policy: PolicyName = Field(examples=["chronica"])
    parameters: dict[str, Any] = Field(default={}, examples=[{}])
    by: Name = Field(default="api", examples=["api"])


class Switch(BaseModel):
    """A request for a policy, and since when it plans. Version 0 is the policy at the start."""

    version: int = Field(examples=[1])
    policy: str = Field(examples=["chronica"])
    parameters: dict[str, Any] = Field(examples=[{}])
    requested_at: float = Field(examples=[1767225700.0])
    requested_by: str = Field(examples=["api"])
    effective_step: int | None = Field(description="first step planned by it", examples=[64])
    effective_at: float | None = Field(examples=[1767225700.8])


class Health(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """Each part: "ok", or the state that it is in; the reason is in the server's log."""

    database: str = Field(examples=["ok"])
    bus: str = Field(examples=["ok"])
    worker: str = Field(examples=["ok"])
