"""Request and response bodies that several resources share, and the types of their fields.

Text fields of requests have types with length limits (`Name`, `Why`, `Location` and so on). `In` is
the base class of request bodies, and `ChangeRequest` the base class of requests that the audit log
records. `RunInfo` describes a run; routes of several resources return it. A body that only one
resource uses is defined in the module of that resource. `docs/rest.md` describes all fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from paceline.wire import State, defects
from paceline_backend.store.audit import RESERVED


def _text(value: str) -> str:
    if "\0" in value:
        raise ValueError("contains a NUL character, which neither processes nor databases accept")
    if reason := defects.of_text(value, "it"):
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
    """Return the texts; raise ValueError if they are too long for command-line arguments."""
    # Each argument of a process ends with a NUL character, which counts, too.
    size = sum(len(text) + 1 for text in texts)
    if size > _MOST_TEXT:
        raise ValueError(f"has {size:,} characters in total; at most {_MOST_TEXT:,} are allowed")
    return texts


def bounded_variables(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables; raise ValueError if they are too long for a process's environment."""
    bounded([*variables, *variables.values()])
    return variables


def plain(value: dict[str, Any]) -> dict[str, Any]:
    """Return the value; raise ValueError if JSON or MessagePack cannot represent it."""
    if reason := defects.of_plain(value, "it"):
        raise ValueError(reason)
    return value


# Maximum total length of a run's arguments, and of its environment variables. Linux limits a single
# argument to this length. The limit also keeps lists of runs small, which contain all arguments.
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
    """Request body. An unknown field is an error, so that a misspelt field is not ignored."""

    model_config = ConfigDict(extra="forbid")


class ChangeRequest(In):
    """Request for a change. The audit log records `by`, `why`, `operator` and the caller's name."""

    by: Name = Field(
        default="api",
        description="name of the client program, for the audit log",
        examples=["api"],
    )
    why: Why = Field(
        default="", description="reason for the change, for the audit log", examples=[""]
    )
    operator: Operator = Field(
        default="",
        description="name of the person who requests the change; ignored unless several people "
        "share the token (`shared` of `GET /me`)",
        examples=[""],
    )


Direction = Literal[">=", "<="]
Source = Literal["evaluations", "training"]


class EvaluationInfo(BaseModel):
    """An evaluation: measurements on held-out data after a step."""

    step: int = Field(
        description="last step before the evaluation; -1: no step came before it", examples=[279]
    )
    epoch: int = Field(description="epoch of the last step before the evaluation", examples=[19])
    attempt: int = Field(examples=[0])
    trained: int = Field(
        description="number of samples that the run had trained on before the evaluation",
        examples=[17_180],
    )
    at: float = Field(description="Unix time of the evaluation", examples=[1767225704.0])
    after_s: float | None = Field(
        description="seconds from the start of the run to the evaluation; null: unknown",
        examples=[100.5],
    )
    ranks: int = Field(description="number of ranks whose values are combined", examples=[1])
    metrics: dict[str, float | None] = Field(
        description="value of each metric by name; null: not a finite number",
        examples=[{"accuracy": 0.91}],
    )


class Met(BaseModel):
    """First value that met a target, from an evaluation or from the training loss."""

    step: int = Field(description="last step before the target was met", examples=[279])
    epoch: int = Field(
        description="epoch of the last step before the target was met", examples=[19]
    )
    trained: int = Field(
        description="number of samples that the run had trained on when it met the target",
        examples=[17_180],
    )
    at: float = Field(description="Unix time at which the target was met", examples=[1767225704.0])
    after_s: float | None = Field(
        description="time to target: seconds from the start of the run until it met the target; "
        "null: unknown",
        examples=[100.5],
    )
    value: float = Field(examples=[0.91])


class Target(BaseModel):
    """Target that an operator has set for a metric of a run."""

    metric: str = Field(examples=["accuracy"])
    value: float = Field(examples=[0.9])
    direction: Direction = Field(examples=[">="])
    source: Source = Field(
        description="source of the values that are compared with the target: `evaluations`, or "
        "`training` for means of the training loss over 100 steps"
    )
    met: Met | None = Field(description="first value that met the target; null: not met yet")
    best: float | None = Field(
        description="best value of the metric so far; null: no value yet", examples=[0.91]
    )
    best_step: int | None = Field(
        description="last step before the best value was measured; null: no value yet",
        examples=[279],
    )


class ControllerState(BaseModel):
    """Controller that plans a run."""

    owner: str = Field(examples=["host:4711"])
    alive: bool = Field(
        description="true: the controller's lease on the run has not expired", examples=[True]
    )


class BackendJobs(BaseModel):
    """Jobs that an engine runs for a run."""

    launch: int = Field(description="number of times that the run was resumed", examples=[0])
    jobs: dict[str, str | None] = Field(
        description="the engine's names of the jobs: `0` is the run's first job, and each other "
        "key is the job of a node that was requested later; null: not submitted yet",
        examples=[{"0": "4711"}],
    )


class RunFigures(BaseModel):
    """Sums and means over all complete steps of a run, updated every few seconds."""

    steps: int = Field(examples=[12_000])
    wall_s: float = Field(description="sum of the step times in seconds", examples=[3_600.0])
    step_s: float | None = Field(description="mean step time in seconds", examples=[0.3])
    se: float | None = Field(
        description="mean straggler effect (SE) of the steps; null: unknown", examples=[0.1]
    )
    waste: float | None = Field(
        description="straggler waste: mean share of a step's compute phase that a rank spends "
        "waiting for the slowest rank; null: unknown",
        examples=[0.06],
    )


class RunCost(BaseModel):
    """Cost of the ranks' time in a run's complete steps, at the server's `--hour-price`."""

    amount: float = Field(examples=[31.0])
    waited: float = Field(
        description="part of `amount` for the time that ranks waited for slower ranks",
        examples=[7.75],
    )
    currency: str = Field(examples=["EUR"])


class RunInfo(BaseModel):
    """A run. Fields from its leader's Hello are null until the leader has sent the Hello."""

    id: str = Field(examples=["3f9a1c07be52"])
    name: str = Field(examples=["train"])
    state: State = Field(examples=["running"])
    backend: str = Field(examples=["local"])
    node: str | None = Field(
        description="node that the run trains on; for several nodes, the one that serves the "
        "rendezvous; null: not chosen yet",
        examples=["node-1"],
    )
    script: str = Field(examples=["/home/me/train.py"])
    args: list[str] = Field(examples=[["--epochs", "3"]])
    cwd: str | None = Field(examples=[None])
    nproc: int = Field(description="number of ranks on each node", examples=[4])
    nodes_min: int = Field(description="minimum number of nodes", examples=[1])
    nodes_max: int = Field(description="maximum number of nodes", examples=[1])
    spares: int = Field(description="number of idle nodes to reserve for the run", examples=[0])
    replace_slow_nodes: bool = Field(
        description="true: a spare replaces a node that stays slow", examples=[False]
    )
    join_check: float = Field(
        description="maximum slowness of a node that is chosen automatically: 1.5 allows nodes "
        "up to 1.5 times slower than the median node; 0: no limit",
        examples=[1.5],
    )
    max_restarts: int = Field(examples=[0])
    restart_hung_s: float | None = Field(
        description="seconds for which the run must hang before all ranks are restarted; null: "
        "never restarted",
        examples=[None],
    )
    driver: bool = Field(
        description="true: the script is a driver, which starts the ranks itself, as with Ray "
        "Train; agents can read the driver's log, but no stacks of ranks",
        examples=[False],
    )
    policy: str = Field(description="policy that was requested last", examples=["bsp"])
    version: int = Field(
        description="policy version: 0 at the run's start, plus 1 at each switch", examples=[0]
    )
    created_at: float = Field(examples=[1767225600.0])
    started_at: float | None = Field(examples=[1767225603.5])
    ended_at: float | None = Field(examples=[None])
    exit_code: int | None = Field(examples=[None])
    message: str | None = Field(
        description="why the run failed or was stopped; for a queued run, why it waits; null: no "
        "message",
        examples=[None],
    )
    dropped: int = Field(
        description="number of telemetry records that were lost because a spool was full",
        examples=[0],
    )
    attempt: int | None = Field(examples=[0])
    first_attempt: int = Field(
        description="first attempt of the run's latest launch; above 0 if the run was launched "
        "again, for example resumed after its end",
        examples=[0],
    )
    world: int | None = Field(examples=[4])
    samples: int | None = Field(examples=[1074])
    global_batch: int | None = Field(
        description="number of samples of a step; with a token budget, the mean number",
        examples=[64],
    )
    token_budget: float | None = Field(
        description="token budget: maximum load of a step, in the unit of the samples' sizes; "
        "null: no token budget",
        examples=[None],
    )
    steps_per_epoch: int | None = Field(
        description="number of steps of an epoch; with a token budget, epochs differ by a few "
        "steps; null: unknown",
        examples=[17],
    )
    seed: int | None = Field(examples=[0])
    epochs: int | None = Field(examples=[15])
    device: str | None = Field(examples=["cpu"])
    emulated: dict[str, Any] | None = Field(
        description="emulated device speeds of the ranks, such as seconds per size unit (`a_s`) "
        "and per step (`b_s`); null: not emulated",
        examples=[{"a_s": [1e-5, 2e-5], "b_s": [0, 0]}],
    )
    dif: float | None = Field(
        description="data imbalance factor (DIF): sample standard deviation of the sizes of the "
        "data set's samples; null: unknown",
        examples=[140.2],
    )
    epoch: int | None = Field(
        description="epoch of the last complete step; null: no complete step", examples=[1]
    )
    step: int | None = Field(
        description="number of the last complete step, from 0; null: no complete step",
        examples=[25],
    )
    controller: ControllerState | None = Field(
        description="controller that plans the run; null: none"
    )
    revision: int = Field(
        description="0 at the run's start, plus 1 with each requested change of the run",
        examples=[0],
    )
    backend_options: dict[str, Any] | None = Field(
        description="options of the run's backend; null: none", examples=[None]
    )
    backend_jobs: BackendJobs | None = Field(
        description="jobs of the run in its engine; null: the run is not on an engine",
        examples=[None],
    )
    tags: list[str] = Field(
        description="labels that users gave to the run, to find it", examples=[["nightly"]]
    )
    note: str = Field(description="free text about the run", examples=[""])
    figures: RunFigures | None = Field(
        description="sums and means over the run's complete steps; null: not computed yet"
    )
    cost: RunCost | None = Field(
        default=None,
        description="cost of the run so far, only in `GET /runs` and `GET /runs/{id}`; null: no "
        "price is set, no step was counted yet, or the run is simulated",
    )
    queued_s: float | None = Field(
        description="seconds from the run's creation to its start, in which it was queued and its "
        "processes started; null: not started, or simulated",
        examples=[3.5],
    )
    jct_s: float | None = Field(
        description="job completion time: seconds from the run's start to its end; null: not "
        "started, or not ended",
        examples=[None],
    )
    eta_at: float | None = Field(
        description="expected end of the run as Unix time, predicted from its newest steps and "
        "its newest pause between epochs; null: not training, or number of epochs unknown",
        examples=[1767225900.0],
    )
    target: Target | None = Field(description="target of the run; null: no target is set")
    evaluation: EvaluationInfo | None = Field(
        description="newest evaluation of the run's model; null: none"
    )
    notice: str | None = Field(
        description="sentence that explains why the run shows no steps, or why no policy plans "
        "it; null: nothing to explain",
        examples=[None],
    )
