"""Bodies that several resources share, and the types of their fields.

Texts of requests have types with limits (`Name`, `Why`, `Location` and so on). `In` is the base of
request bodies, `ChangeRequest` of those that the audit log records. `RunInfo` is a run, as routes
of several resources return it. All other bodies are in the modules of their routes. `docs/rest.md`
describes the fields.
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


def plain(value: dict[str, Any]) -> dict[str, Any]:
    """Return the value if JSON and MessagePack can hold it."""
    if reason := defects.of_plain(value, "it"):
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


Direction = Literal[">=", "<="]
Source = Literal["evaluations", "training"]


class EvaluationInfo(BaseModel):
    """An evaluation: measurements on held-out data after a step."""

    step: int = Field(description="last step before the evaluation; -1: none", examples=[279])
    epoch: int = Field(description="epoch of that step", examples=[19])
    attempt: int = Field(examples=[0])
    trained: int = Field(
        description="samples that the run had trained on by then", examples=[17_180]
    )
    at: float = Field(description="Unix time", examples=[1767225704.0])
    after_s: float | None = Field(
        description="seconds since the start of the run; null: unknown", examples=[100.5]
    )
    ranks: int = Field(description="number of ranks whose values it combines", examples=[1])
    metrics: dict[str, float | None] = Field(
        description="values by name; null: not a finite number", examples=[{"accuracy": 0.91}]
    )


class Met(BaseModel):
    """First evaluation that met a target."""

    step: int = Field(description="last step before it", examples=[279])
    epoch: int = Field(description="epoch of that step", examples=[19])
    trained: int = Field(description="samples trained on by then", examples=[17_180])
    at: float = Field(description="Unix time", examples=[1767225704.0])
    after_s: float | None = Field(
        description="time to target: seconds since the start of the run; null: unknown",
        examples=[100.5],
    )
    value: float = Field(examples=[0.91])


class Target(BaseModel):
    """Target that an operator has set for a run."""

    metric: str = Field(examples=["accuracy"])
    value: float = Field(examples=[0.9])
    direction: Direction = Field(examples=[">="])
    source: Source = Field(
        description="source of the values: evaluations, or means of the training loss over 100 "
        "steps"
    )
    met: Met | None = Field(description="null: not met yet")
    best: float | None = Field(description="best value so far; null: none", examples=[0.91])
    best_step: int | None = Field(description="last step before it", examples=[279])


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
