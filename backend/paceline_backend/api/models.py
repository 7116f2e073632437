"""Request and response bodies. `docs/rest.md` describes the fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from paceline.wire import State, problems
from paceline_backend import backends
from paceline_backend.api.quality_models import EvaluationInfo, Target
from paceline_backend.policies import Changes
from paceline_backend.store.audit import RESERVED


def _text(value: str) -> str:
    if "\0" in value:
        raise ValueError("holds a NUL character, which neither a process nor a database takes")
    if reason := problems.of_text(value, "it"):
        raise ValueError(reason)
    return value


def _operator(name: str) -> str:
    if name in RESERVED:
        raise ValueError(f"{name!r} is what the server itself is called: give your own name")
    return _text(name)


def _variable(name: str) -> str:
    if not name or "=" in name:
        raise ValueError("is no name of a variable")
    return _text(name)


def bounded(texts: list[str]) -> list[str]:
    """Return the texts if they are not too long for command-line arguments."""
    # Each argument of a process ends with a NUL.
    size = sum(len(text) + 1 for text in texts)
    if size > _MOST_TEXT:
        raise ValueError(f"has {size:,} characters altogether; at most {_MOST_TEXT:,} are taken")
    return texts


def bounded_variables(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables if they are not too long for an environment."""
    bounded([*variables, *variables.values()])
    return variables


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    if reason := problems.of_plain(value, "it"):
        raise ValueError(reason)
    return value


# Maximum length of all arguments together, and of all variables together. Linux allows no more in a
# single argument, and each response that lists runs repeats the arguments.
_MOST_TEXT = 131_072  # characters

Text = Annotated[str, AfterValidator(_text)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(_text)]
Why = Annotated[str, StringConstraints(max_length=500), AfterValidator(_text)]
Operator = Annotated[str, StringConstraints(max_length=200), AfterValidator(_operator)]
# Linux limits paths to 4096 bytes (PATH_MAX).
Location = Annotated[str, StringConstraints(max_length=4096), AfterValidator(_text)]
PolicyName = Annotated[str, StringConstraints(max_length=200), AfterValidator(_text)]
NodeName = Annotated[str, StringConstraints(max_length=255), AfterValidator(_text)]
Variable = Annotated[str, AfterValidator(_variable)]


class In(BaseModel):
    """Request body. Unknown fields are errors, so that a misspelt field is not ignored."""

    model_config = ConfigDict(extra="forbid")


class ChangeRequest(In):
    """Fields of a change for the audit log. The caller's identity comes from the request."""

    by: Name = Field(
        default="api", description="the program that asks, for the audit log", examples=["api"]
    )
    why: Why = Field(default="", description="for the audit log", examples=[""])
    operator: Operator = Field(
        default="",
        description="the name of who asks, where several people share the token "
        "(`shared` of `GET /me`); of no effect elsewhere",
        examples=[""],
    )


class Version(BaseModel):
    """Version and identity of this server."""

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


class Cordoned(BaseModel):
    """Cordon of a node: who set it, when, and why."""

    by: str = Field(description="a token's name", examples=["ada"])
    at: float = Field(description="Unix time", examples=[1767225800.0])
    reason: str = Field(examples=["its disk is slow"])


class NodeSpeed(BaseModel):
    """Speed of a machine, measured by its agent while no rank trained there."""

    compute_gflops: float = Field(
        description="10⁹ operations in a second of one core, while all cores work", examples=[48.0]
    )
    memory_gbps: float = Field(
        description="10⁹ bytes in a second that one core copies", examples=[9.5]
    )
    disk_mbps: float | None = Field(
        description="10⁶ bytes in a second that its data directory takes", examples=[410.0]
    )


class InEngine(BaseModel):
    """State of a cordon, or of its end, in the node's engine."""

    backend: str = Field(examples=["slurm"])
    host: str | None = Field(description="what the engine calls the machine", examples=["gpu7"])
    cordoned: bool = Field(
        description="what the engine is told: false, the cordon is lifted", examples=[True]
    )
    told_at: float | None = Field(
        description="Unix time; null with no `refusal`: a worker will tell it",
        examples=[1767225801.0],
    )
    refusal: str | None = Field(description="in the engine's words", examples=[None])


class GpuInfo(BaseModel):
    """State of a GPU at the last heartbeat; null: the driver does not report the value."""

    sm_mhz: int | None = Field(description="clock of its processors", examples=[780])
    most_sm_mhz: int | None = Field(description="at most", examples=[1980])
    throttled_by: list[str] = Field(
        description="why the clock is lower; empty: nothing lowers it", examples=[["heat"]]
    )
    temperature_c: int | None = Field(examples=[87])
    power_w: float | None = Field(examples=[212.5])
    ecc_errors: int | None = Field(
        description="of memory, not corrected, since the driver was loaded", examples=[0]
    )


class NodeInfo(BaseModel):
    """A machine with an agent."""

    id: str = Field(examples=["node-1"])
    hostname: str = Field(examples=["node-1.example.org"])
    cores: int = Field(examples=[16])
    memory_bytes: int = Field(examples=[68719476736])
    gpus: list[str] = Field(examples=[[]])
    paceline: str = Field(description="version", examples=["0.1.0"])
    registered_at: float = Field(examples=[1767225600.0])
    heartbeat_at: float = Field(description="Unix time", examples=[1767225660.0])
    alive: bool = Field(description="a heartbeat in the last 7 s", examples=[True])
    runs: list[str] = Field(examples=[["3f9a1c07be52"]])
    cordoned: Cordoned | None = Field(description="null: it is not")
    spare_of: str | None = Field(description="the run that it is held back for", examples=[None])
    check: NodeSpeed | None = Field(description="null: it was not measured yet")
    checked_at: float | None = Field(
        description="Unix time, by the node's clock", examples=[1767225602.0]
    )
    gpu_states: list[GpuInfo] | None = Field(
        description="of each GPU, in the driver's order; null: unknown"
    )
    revoked: bool = Field(
        description="the token that admitted it was revoked or has expired", examples=[False]
    )
    only_run: str | None = Field(
        description="the only run that it looks after, as an engine started it; null: any",
        examples=[None],
    )
    host: str | None = Field(
        description="what its engine calls the machine; null: it has none, or did not say",
        examples=[None],
    )
    in_engine: InEngine | None = Field(
        description="null: no engine has to know of a cordon, or of its end"
    )


class NodeSession(BaseModel):
    """Credentials of a node's agent for the bus. Secret."""

    id: str = Field(description="of this control plane", examples=["3f9a1c07be52d4e6"])
    bus: str = Field(
        description="URL with the node's own user", examples=["redis://user:password@host:6379/0"]
    )
    key: str = Field(description="for MACs and seals, in hexadecimal", examples=["c0ffee"])


class RunSession(BaseModel):
    """Credentials of a run's processes for the bus. Secret."""

    bus: str = Field(
        description="URL with the run's own user", examples=["redis://user:password@host:6379/0"]
    )
    key: str = Field(description="for MACs, in hexadecimal", examples=["c0ffee"])


class RunCreate(In):
    """Request to start a run."""

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
    args: Annotated[list[Text], AfterValidator(bounded)] = []
    nproc: int = Field(ge=1, le=100_000, description="ranks on each node")
    nodes_min: int = Field(
        default=1, ge=1, le=1000, description="fewest nodes; no more than `nodes_max`"
    )
    nodes_max: int = Field(
        default=1, ge=1, le=1000, description="most nodes; above 1 the run trains on several"
    )
    spares: int = Field(
        default=0, ge=0, le=1000, description="idle nodes that are held back while it trains"
    )
    replace_slow_nodes: bool = Field(
        default=False,
        description="a node that a verdict names slow for long makes way for a spare",
    )
    restart_hung_s: float | None = Field(
        default=None,
        ge=10,
        le=86_400,
        description="when the run has hung for so many seconds, all ranks start again: one of "
        "`max_restarts`, then the run fails; null: it is left alone",
    )
    join_check: float = Field(
        default=1.5,
        ge=0,
        le=1000,
        description="of several nodes: so many times slower than the median a node may be that is "
        "taken without being named; 1 or more; 0: any",
    )
    policy: PolicyName = "paceline"
    parameters: dict[str, Any] = {}
    name: Name | None = Field(default=None, description="default: the script's")
    node: NodeName | None = Field(default=None, description="default: the least busy one alive")
    env: Annotated[dict[Variable, Text], AfterValidator(bounded_variables)] = {}
    cwd: Location | None = None
    max_restarts: int = Field(default=0, ge=0, le=1000)
    launch: bool = Field(default=True, description="false: the caller starts it itself")
    backend: Annotated[Text, StringConstraints(max_length=200)] = Field(
        default="local",
        description="a name of `GET /backends`",
        json_schema_extra={"enum": list(backends.names())},
    )
    backend_options: Annotated[dict[str, Any], AfterValidator(_plain)] = Field(
        default={}, description="what the backend takes; `GET /backends` has the schemas"
    )
    scenario: Annotated[dict[str, Any], AfterValidator(_plain)] | None = Field(
        default=None, description="what a simulated run simulates; docs/simulator.md"
    )


class ControllerState(BaseModel):
    """Controller that plans a run."""

    owner: str = Field(examples=["host:4711"])
    alive: bool = Field(description="its lease has not expired", examples=[True])


class BackendJobs(BaseModel):
    """Jobs that an engine runs for a run."""

    launch: int = Field(description="counts how often the run was resumed", examples=[0])
    jobs: dict[str, str | None] = Field(
        description="the engine's names: of the job that the run begins with, and of each node "
        "that was asked for later; null: not submitted yet",
        examples=[{"0": "4711"}],
    )


class RunFigures(BaseModel):
    """Sums and means over all complete steps of a run, some seconds old while it trains."""

    steps: int = Field(examples=[12_000])
    wall_s: float = Field(description="sum of their times", examples=[3_600.0])
    step_s: float | None = Field(description="mean", examples=[0.3])
    se: float | None = Field(description="mean", examples=[0.1])
    waste: float | None = Field(description="mean", examples=[0.06])


class RunCost(BaseModel):
    """Cost of a run's rank hours in its steps so far, at the server's `--hour-price`."""

    amount: float = Field(examples=[31.0])
    waited: float = Field(description="of it, what they waited for slower ranks", examples=[7.75])
    currency: str = Field(examples=["EUR"])


class RunInfo(BaseModel):
    """A run. Fields that only its leader knows are null until the leader has sent its Hello."""

    id: str = Field(examples=["3f9a1c07be52"])
    name: str = Field(examples=["train"])
    state: State = Field(examples=["running"])
    backend: str = Field(examples=["local"])
    node: str | None = Field(
        description="of several nodes: that serves the rendezvous", examples=["node-1"]
    )
    script: str = Field(examples=["/home/me/train.py"])
    args: list[str] = Field(examples=[["--epochs", "3"]])
    cwd: str | None = Field(examples=[None])
    nproc: int = Field(description="ranks on each node", examples=[4])
    nodes_min: int = Field(description="fewest nodes", examples=[1])
    nodes_max: int = Field(description="most nodes", examples=[1])
    spares: int = Field(description="nodes to be held back for it", examples=[0])
    replace_slow_nodes: bool = Field(
        description="a node that is slow for long makes way for a spare", examples=[False]
    )
    join_check: float = Field(
        description="so many times slower than the median a node may be that joins by number; "
        "0: any",
        examples=[1.5],
    )
    max_restarts: int = Field(examples=[0])
    restart_hung_s: float | None = Field(
        description="so long it may hang before all ranks start again; null: it is left alone",
        examples=[None],
    )
    driver: bool = Field(
        description="its script is no rank, but starts the ranks, as Ray Train's does: agents have "
        "the script's log, and no stacks of ranks",
        examples=[False],
    )
    policy: str = Field(description="in force, or requested last", examples=["bsp"])
    version: int = Field(description="of the policy: +1 at each switch", examples=[0])
    created_at: float = Field(examples=[1767225600.0])
    started_at: float | None = Field(examples=[1767225603.5])
    ended_at: float | None = Field(examples=[None])
    exit_code: int | None = Field(examples=[None])
    message: str | None = Field(
        description="why it failed; of a queued run: why it waits", examples=[None]
    )
    dropped: int = Field(description="records lost to a full spool", examples=[0])
    attempt: int | None = Field(examples=[0])
    first_attempt: int = Field(
        description="of its latest start: above 0 if the run goes on after its end", examples=[0]
    )
    world: int | None = Field(examples=[4])
    samples: int | None = Field(examples=[1074])
    global_batch: int | None = Field(
        description="samples of a step; with a token budget, of a mean step", examples=[64]
    )
    token_budget: float | None = Field(
        description="what a step holds at most, in the unit of the sizes; null: each step has "
        "`global_batch` samples",
        examples=[None],
    )
    steps_per_epoch: int | None = Field(
        description="with a token budget, of one epoch: others differ by a few", examples=[17]
    )
    seed: int | None = Field(examples=[0])
    epochs: int | None = Field(examples=[15])
    device: str | None = Field(examples=["cpu"])
    emulated: dict[str, Any] | None = Field(
        description="emulated device speeds", examples=[{"a_s": [1e-5, 2e-5], "b_s": [0, 0]}]
    )
    dif: float | None = Field(description="of the data set", examples=[140.2])
    epoch: int | None = Field(description="of the last complete step", examples=[1])
    step: int | None = Field(description="last complete step", examples=[25])
    controller: ControllerState | None
    revision: int = Field(description="+1 with each change that somebody asked for", examples=[0])
    backend_options: dict[str, Any] | None = Field(
        description="what its backend was asked for; null: nothing", examples=[None]
    )
    backend_jobs: BackendJobs | None = Field(
        description="of a run on an engine; null of another", examples=[None]
    )
    tags: list[str] = Field(description="short words to find it by", examples=[["nightly"]])
    note: str = Field(description="what people wrote about it", examples=[""])
    figures: RunFigures | None = Field(description="null: no step was summed up yet")
    cost: RunCost | None = Field(
        default=None,
        description="null: the server has no price, no step was summed up yet, or the run is "
        "simulated. In `GET /runs` and `GET /runs/{id}` only",
    )
    queued_s: float | None = Field(
        description="from its creation until it began: in a queue, and while its processes started",
        examples=[3.5],
    )
    jct_s: float | None = Field(
        description="job completion time, from its begin to its end; null: it has not ended",
        examples=[None],
    )
    eta_at: float | None = Field(
        description="when it will end, Unix time, by its newest steps and the pause between its "
        "epochs; null: it does not train, or its number of epochs is unknown",
        examples=[1767225900.0],
    )
    target: Target | None = Field(description="null: nobody has set one")
    evaluation: EvaluationInfo | None = Field(description="the newest; null: there is none")
    notice: str | None = Field(
        description="why it shows no steps, or is not planned, in words; null: nothing to say",
        examples=[None],
    )


class RunPage(BaseModel):
    """Runs in the requested order."""

    items: list[RunInfo]
    next_cursor: str | None = Field(description="null: the last page", examples=["MTIz"])


class Stop(ChangeRequest):
    """Request to stop a run."""

    force: bool = Field(
        default=False,
        description="true: end the processes now; false: at the next segment",
        examples=[False],
    )


class Resume(ChangeRequest):
    """Request to resume a run."""

    max_restarts: int | None = Field(
        default=None, ge=0, le=1000, description="default: as before", examples=[None]
    )
    env: Annotated[dict[Variable, Text], AfterValidator(bounded_variables)] = Field(
        default={}, description="values are not stored: give all that the run needs"
    )
    launch: bool = Field(default=True, description="false: the caller starts it itself")
    backend: Annotated[Text, StringConstraints(max_length=200)] | None = Field(
        default=None, description="where it goes on; default: as before", examples=[None]
    )
    backend_options: Annotated[dict[str, Any], AfterValidator(_plain)] | None = Field(
        default=None,
        description="what the backend takes; default: as before, on another backend its defaults",
        examples=[None],
    )
    nodes_min: int | None = Field(
        default=None, ge=1, le=1000, description="default: as before", examples=[None]
    )
    nodes_max: int | None = Field(
        default=None, ge=1, le=1000, description="default: as before", examples=[None]
    )
    nproc: int | None = Field(
        default=None, ge=1, le=100_000, description="default: as before", examples=[None]
    )


class Attempt(BaseModel):
    """Start of an attempt of a run."""

    attempt: int = Field(examples=[1])
    started_at: float = Field(examples=[1767225700.0])
    step: int = Field(description="its first step", examples=[40])
    reached: int = Field(
        description="one past the last step that attempts before it had reported by then",
        examples=[47],
    )
    again: int = Field(description="steps that it trains again: `step` … `reached` − 1")


class SwitchInfo(BaseModel):
    """A request for a policy, and the step from which the policy plans.

    Version 0 is the policy at the run's start.
    """

    version: int = Field(examples=[1])
    policy: str = Field(examples=["chronica"])
    parameters: dict[str, Any] = Field(examples=[{}])
    requested_at: float = Field(examples=[1767225700.0])
    requested_by: str = Field(
        description="a token's name, or the name that its holder gave, or `auto`", examples=["ada"]
    )
    why: str = Field(description="the reason that was given", examples=["rank 3 is slow"])
    effective_step: int | None = Field(description="first step planned by it", examples=[64])
    effective_at: float | None = Field(examples=[1767225700.8])


class Me(BaseModel):
    """The caller."""

    name: str = Field(description="as the audit log names it", examples=["ada"])
    scope: Literal["viewer", "operator", "agent", "admin"] = Field(
        description="what it may do", examples=["operator"]
    )
    shared: bool = Field(
        description="it is nobody's own token, so a change may say in `operator` who asks"
    )


class Health(BaseModel):
    """Response of a process that serves requests."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """State of each part: `ok`, or what is wrong. The server's log has the reason."""

    database: str = Field(examples=["ok"])
    bus: str = Field(examples=["ok"])
    worker: str = Field(examples=["ok"])
