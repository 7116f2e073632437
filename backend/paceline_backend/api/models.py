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
        raise ValueError("contains a NUL character, which neither processes nor databases accept")
    if reason := problems.of_text(value, "it"):
        raise ValueError(reason)
    return value


def _operator(name: str) -> str:
    if name in RESERVED:
        raise ValueError(f"{name!r} is a name of the server itself: give your own name")
    return _text(name)


def _variable(name: str) -> str:
    if not name or "=" in name:
        raise ValueError("is not a valid variable name")
    return _text(name)


def bounded(texts: list[str]) -> list[str]:
    """Return the texts if they are not too long for command-line arguments."""
    # Each argument of a process ends with a NUL.
    size = sum(len(text) + 1 for text in texts)
    if size > _MOST_TEXT:
        raise ValueError(f"has {size:,} characters in total; at most {_MOST_TEXT:,} are allowed")
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
        default="api", description="client program, for the audit log", examples=["api"]
    )
    why: Why = Field(default="", description="reason, for the audit log", examples=[""])
    operator: Operator = Field(
        default="",
        description="name of the person, if several people share the token (`shared` of `GET "
        "/me`); otherwise ignored",
        examples=[""],
    )


class Version(BaseModel):
    """Version and identity of this server."""

    version: str = Field(examples=["0.1.0"])
    protocol: int = Field(description="protocol version of messages on the bus", examples=[1])
    id: str = Field(description="permanent id of this control plane", examples=["3f9a1c07be52d4e6"])
    bus: str = Field(description="URL of the bus for agents", examples=["redis://127.0.0.1:6379/0"])


class PolicyInfo(BaseModel):
    """A preset."""

    name: str = Field(examples=["chronica"])
    summary: str = Field(examples=["Balances the load of every step by learned speeds"])
    source: str = Field(examples=["CHRONICA (2022)"])
    parameters: dict[str, dict[str, Any]] = Field(
        description="JSON Schema of each", examples=[{"window": {"type": "integer", "default": 64}}]
    )
    changes: Changes = Field(
        description="what the preset changes in the training with default parameters, compared "
        "with plain DDP of the same seed: nothing; which samples share a global batch; or also "
        "which gradients are reduced together, and when",
        examples=["batches"],
    )
    changes_with: dict[str, dict[str, Changes]] = Field(
        description="the same for enum values of parameters that change the answer",
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
        description="10⁹ operations per second of one core, while all cores are busy",
        examples=[48.0],
    )
    memory_gbps: float = Field(
        description="10⁹ bytes per second that one core copies", examples=[9.5]
    )
    disk_mbps: float | None = Field(
        description="10⁶ bytes per second written to the agent's data directory", examples=[410.0]
    )


class InEngine(BaseModel):
    """State of a cordon, or of its end, in the node's engine."""

    backend: str = Field(examples=["slurm"])
    host: str | None = Field(description="the engine's name for the machine", examples=["gpu7"])
    cordoned: bool = Field(
        description="state that the engine must have; false: the cordon is lifted", examples=[True]
    )
    told_at: float | None = Field(
        description="Unix time at which the engine was notified; null without `refusal`: pending",
        examples=[1767225801.0],
    )
    refusal: str | None = Field(description="error message of the engine", examples=[None])


class GpuInfo(BaseModel):
    """State of a GPU at the last heartbeat; null: the driver does not report the value."""

    sm_mhz: int | None = Field(description="clock of the streaming multiprocessors", examples=[780])
    most_sm_mhz: int | None = Field(description="maximum clock", examples=[1980])
    throttled_by: list[str] = Field(
        description="why the clock is lower; empty: not throttled", examples=[["heat"]]
    )
    temperature_c: int | None = Field(examples=[87])
    power_w: float | None = Field(examples=[212.5])
    ecc_errors: int | None = Field(
        description="uncorrected memory errors since the driver was loaded", examples=[0]
    )


class NodeInfo(BaseModel):
    """A machine with an agent."""

    id: str = Field(examples=["node-1"])
    hostname: str = Field(examples=["node-1.example.org"])
    cores: int = Field(examples=[16])
    memory_bytes: int = Field(examples=[68719476736])
    gpus: list[str] = Field(examples=[[]])
    paceline: str = Field(description="Paceline version of the agent", examples=["0.1.0"])
    registered_at: float = Field(examples=[1767225600.0])
    heartbeat_at: float = Field(description="Unix time", examples=[1767225660.0])
    alive: bool = Field(description="the agent sent a heartbeat in the last 7 s", examples=[True])
    runs: list[str] = Field(examples=[["3f9a1c07be52"]])
    cordoned: Cordoned | None = Field(description="null: not cordoned")
    spare_of: str | None = Field(
        description="run for which the node is reserved as a spare", examples=[None]
    )
    check: NodeSpeed | None = Field(description="null: not measured yet")
    checked_at: float | None = Field(
        description="Unix time, by the node's clock", examples=[1767225602.0]
    )
    gpu_states: list[GpuInfo] | None = Field(
        description="state of each GPU, in the driver's order; null: unknown"
    )
    revoked: bool = Field(
        description="the token that admitted the node was revoked or has expired", examples=[False]
    )
    only_run: str | None = Field(
        description="only run that this agent serves, because an engine started it; null: any run",
        examples=[None],
    )
    host: str | None = Field(
        description="the engine's name for the machine; null: no engine, or unknown",
        examples=[None],
    )
    in_engine: InEngine | None = Field(
        description="null: no cordon, or end of a cordon, to report to an engine"
    )


class NodeSession(BaseModel):
    """Credentials of a node's agent for the bus. Secret."""

    id: str = Field(description="id of this control plane", examples=["3f9a1c07be52d4e6"])
    bus: str = Field(
        description="URL of the bus with the node's own user",
        examples=["redis://user:password@host:6379/0"],
    )
    key: str = Field(description="key for MACs and seals, in hexadecimal", examples=["c0ffee"])


class RunSession(BaseModel):
    """Credentials of a run's processes for the bus. Secret."""

    bus: str = Field(
        description="URL of the bus with the run's own user",
        examples=["redis://user:password@host:6379/0"],
    )
    key: str = Field(description="key for MACs, in hexadecimal", examples=["c0ffee"])


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

    script: Location = Field(
        min_length=1, description="path on the node; absolute, or relative to `cwd`"
    )
    args: Annotated[list[Text], AfterValidator(bounded)] = []
    nproc: int = Field(ge=1, le=100_000, description="ranks on each node")
    nodes_min: int = Field(
        default=1, ge=1, le=1000, description="minimum number of nodes; at most `nodes_max`"
    )
    nodes_max: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="maximum number of nodes; above 1: the run trains on several nodes",
    )
    spares: int = Field(
        default=0, ge=0, le=1000, description="number of idle nodes to reserve while the run trains"
    )
    replace_slow_nodes: bool = Field(
        default=False,
        description="replace a node by a spare if verdicts report it as slow for long",
    )
    restart_hung_s: float | None = Field(
        default=None,
        ge=10,
        le=86_400,
        description="seconds of a hang after which all ranks restart, counted in `max_restarts`; "
        "if none is left, the run fails; null: never",
    )
    join_check: float = Field(
        default=1.5,
        ge=0,
        le=1000,
        description="with several nodes: how many times slower than the median a node may be to "
        "be chosen automatically; 1 or more; 0: no limit",
    )
    policy: PolicyName = "paceline"
    parameters: dict[str, Any] = {}
    name: Name | None = Field(default=None, description="default: the script's name")
    node: NodeName | None = Field(
        default=None, description="default: the least busy node that is alive"
    )
    env: Annotated[dict[Variable, Text], AfterValidator(bounded_variables)] = {}
    cwd: Location | None = None
    max_restarts: int = Field(default=0, ge=0, le=1000)
    launch: bool = Field(default=True, description="false: the caller starts the run itself")
    backend: Annotated[Text, StringConstraints(max_length=200)] = Field(
        default="local",
        description="name of a backend in `GET /backends`",
        json_schema_extra={"enum": list(backends.names())},
    )
    backend_options: Annotated[dict[str, Any], AfterValidator(_plain)] = Field(
        default={}, description="options of the backend; `GET /backends` has the schemas"
    )
    scenario: Annotated[dict[str, Any], AfterValidator(_plain)] | None = Field(
        default=None, description="scenario of a simulated run; see docs/simulator.md"
    )


class ControllerState(BaseModel):
    """Controller that plans a run."""

    owner: str = Field(examples=["host:4711"])
    alive: bool = Field(description="the controller's lease has not expired", examples=[True])


class BackendJobs(BaseModel):
    """Jobs that an engine runs for a run."""

    launch: int = Field(description="number of times that the run was resumed", examples=[0])
    jobs: dict[str, str | None] = Field(
        description="the engine's names of the run's first job, and of the job for each node that "
        "was requested later; null: not submitted yet",
        examples=[{"0": "4711"}],
    )


class RunFigures(BaseModel):
    """Sums and means over all complete steps of a run, some seconds old while it trains."""

    steps: int = Field(examples=[12_000])
    wall_s: float = Field(description="sum of the step times", examples=[3_600.0])
    step_s: float | None = Field(description="mean", examples=[0.3])
    se: float | None = Field(description="mean", examples=[0.1])
    waste: float | None = Field(description="mean", examples=[0.06])


class RunCost(BaseModel):
    """Cost of a run's rank hours in its steps so far, at the server's `--hour-price`."""

    amount: float = Field(examples=[31.0])
    waited: float = Field(
        description="part of the amount that is due to waiting for slower ranks", examples=[7.75]
    )
    currency: str = Field(examples=["EUR"])


class RunInfo(BaseModel):
    """A run. Fields that only its leader knows are null until the leader has sent its Hello."""

    id: str = Field(examples=["3f9a1c07be52"])
    name: str = Field(examples=["train"])
    state: State = Field(examples=["running"])
    backend: str = Field(examples=["local"])
    node: str | None = Field(
        description="node of the run; with several nodes, the rendezvous host", examples=["node-1"]
    )
    script: str = Field(examples=["/home/me/train.py"])
    args: list[str] = Field(examples=[["--epochs", "3"]])
    cwd: str | None = Field(examples=[None])
    nproc: int = Field(description="ranks on each node", examples=[4])
    nodes_min: int = Field(description="minimum number of nodes", examples=[1])
    nodes_max: int = Field(description="maximum number of nodes", examples=[1])
    spares: int = Field(description="number of idle nodes to reserve for the run", examples=[0])
    replace_slow_nodes: bool = Field(
        description="replace a node that is slow for long by a spare", examples=[False]
    )
    join_check: float = Field(
        description="how many times slower than the median a node may be to be chosen "
        "automatically; 0: no limit",
        examples=[1.5],
    )
    max_restarts: int = Field(examples=[0])
    restart_hung_s: float | None = Field(
        description="seconds of a hang after which all ranks restart; null: never",
        examples=[None],
    )
    driver: bool = Field(
        description="its script is not a rank, but starts the ranks, as Ray Train's does: agents "
        "have the script's log, but no stacks of ranks",
        examples=[False],
    )
    policy: str = Field(description="policy in force, or the last requested one", examples=["bsp"])
    version: int = Field(description="policy version: +1 at each switch", examples=[0])
    created_at: float = Field(examples=[1767225600.0])
    started_at: float | None = Field(examples=[1767225603.5])
    ended_at: float | None = Field(examples=[None])
    exit_code: int | None = Field(examples=[None])
    message: str | None = Field(
        description="why the run failed; for a queued run: why it waits", examples=[None]
    )
    dropped: int = Field(description="telemetry records lost to a full spool", examples=[0])
    attempt: int | None = Field(examples=[0])
    first_attempt: int = Field(
        description="first attempt of its latest start; above 0 if the run was resumed after its "
        "end",
        examples=[0],
    )
    world: int | None = Field(examples=[4])
    samples: int | None = Field(examples=[1074])
    global_batch: int | None = Field(
        description="samples of a step; with a token budget, the mean", examples=[64]
    )
    token_budget: float | None = Field(
        description="maximum load of a step, in the unit of the sizes; null: each step has "
        "`global_batch` samples",
        examples=[None],
    )
    steps_per_epoch: int | None = Field(
        description="with a token budget: steps of one epoch; other epochs differ by a few",
        examples=[17],
    )
    seed: int | None = Field(examples=[0])
    epochs: int | None = Field(examples=[15])
    device: str | None = Field(examples=["cpu"])
    emulated: dict[str, Any] | None = Field(
        description="emulated device speeds", examples=[{"a_s": [1e-5, 2e-5], "b_s": [0, 0]}]
    )
    dif: float | None = Field(description="DIF of the data set", examples=[140.2])
    epoch: int | None = Field(description="epoch of the last complete step", examples=[1])
    step: int | None = Field(description="last complete step", examples=[25])
    controller: ControllerState | None
    revision: int = Field(description="+1 with each requested change", examples=[0])
    backend_options: dict[str, Any] | None = Field(
        description="options that its backend was given; null: none", examples=[None]
    )
    backend_jobs: BackendJobs | None = Field(
        description="jobs of a run on an engine; null for other runs", examples=[None]
    )
    tags: list[str] = Field(description="labels to find the run by", examples=[["nightly"]])
    note: str = Field(description="free text about the run", examples=[""])
    figures: RunFigures | None = Field(description="null: no step has been summed up yet")
    cost: RunCost | None = Field(
        default=None,
        description="null: the server has no price, no step has been summed up yet, or the run is "
        "simulated. In `GET /runs` and `GET /runs/{id}` only",
    )
    queued_s: float | None = Field(
        description="seconds from its creation until it started to train: in a queue, and while "
        "its processes started",
        examples=[3.5],
    )
    jct_s: float | None = Field(
        description="job completion time: seconds from its start to its end; null: it has not "
        "ended",
        examples=[None],
    )
    eta_at: float | None = Field(
        description="expected end as Unix time, from its newest steps and the pause between its "
        "epochs; null: it is not training, or its number of epochs is unknown",
        examples=[1767225900.0],
    )
    target: Target | None = Field(description="null: no target is set")
    evaluation: EvaluationInfo | None = Field(description="newest evaluation; null: none")
    notice: str | None = Field(
        description="why the run shows no steps, or is not planned, in words; null: no notice",
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
        default={},
        description="environment variables; their values are not stored: give all that the "
        "run needs",
    )
    launch: bool = Field(default=True, description="false: the caller starts the run itself")
    backend: Annotated[Text, StringConstraints(max_length=200)] | None = Field(
        default=None,
        description="backend on which the run continues; default: as before",
        examples=[None],
    )
    backend_options: Annotated[dict[str, Any], AfterValidator(_plain)] | None = Field(
        default=None,
        description="options of the backend; default: as before, or the defaults of another "
        "backend",
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
        description="one past the last step that earlier attempts had reported by then",
        examples=[47],
    )
    again: int = Field(description="number of steps that it repeats: `step` … `reached` − 1")


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
    effective_step: int | None = Field(
        description="first step that the policy planned", examples=[64]
    )
    effective_at: float | None = Field(examples=[1767225700.8])


class Me(BaseModel):
    """The caller."""

    name: str = Field(description="name of the caller in the audit log", examples=["ada"])
    scope: Literal["viewer", "operator", "agent", "admin"] = Field(
        description="role of the caller", examples=["operator"]
    )
    shared: bool = Field(
        description="several people may share the token, so a change may name the person in "
        "`operator`"
    )


class Health(BaseModel):
    """Response of a process that serves requests."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """State of each part: `ok`, or what is wrong. The server's log has the reason."""

    database: str = Field(examples=["ok"])
    bus: str = Field(examples=["ok"])
    worker: str = Field(examples=["ok"])
