"""Bodies of requests and answers; field names as in docs/rest.md."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, create_model

from paceline.wire import problems
from paceline_backend.policies import Changes
from paceline_backend.store.reads import METRICS


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


Text = Annotated[str, AfterValidator(_text)]
Name = Annotated[Text, StringConstraints(min_length=1, max_length=200)]
State = Literal["pending", "starting", "running", "finished", "failed", "stopped"]
Column = list[float | None]


class _In(BaseModel):
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


class RunCreate(_In):
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

    script: Annotated[Text, StringConstraints(min_length=1)] = Field(
        description="path on the node; absolute, or from `cwd`"
    )
    args: list[Text] = []
    nproc: int = Field(ge=1, le=10_000, description="ranks")
    policy: Text = "paceline"
    parameters: dict[str, Any] = {}
    name: Name | None = Field(default=None, description="default: the script's")
    node: Text | None = Field(default=None, description="default: the least busy one alive")
    env: dict[Annotated[str, AfterValidator(_variable)], Text] = {}
    cwd: Text | None = None
    max_restarts: int = Field(default=0, ge=0, le=1000)
    launch: bool = Field(default=True, description="false: the caller starts it itself")
    backend: Literal["local", "simulated"] = "local"
    scenario: dict[str, Any] | None = Field(
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


class Stop(_In):
    """How to stop."""

    force: bool = Field(
        default=False,
        description="true: end the processes now; false: at the next segment",
        examples=[False],
    )


class PolicySwitch(_In):
    """The policy to switch to."""

    policy: Text = Field(examples=["chronica"])
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


class Worker(BaseModel):
    """A rank, over the last steps; means, unless said otherwise."""

    rank: int = Field(examples=[0])
    steps: int = Field(description="how many of them it reported", examples=[50])
    samples: float = Field(examples=[16.0])
    load: float = Field(examples=[5120.5])
    missing: int = Field(description="of these steps, those without its record: lost", examples=[0])
    share: float = Field(description="of the load of a step", examples=[0.25])
    compute_s: float = Field(examples=[0.19])
    ett_s: float | None = Field(examples=[0.2])
    data_s: float = Field(examples=[0.001])
    wait_s: float = Field(description="for slower ranks", examples=[0.02])
    sync_s: float = Field(description="wait and communication", examples=[0.03])
    memory_bytes: int = Field(description="peak", examples=[350000000])
    ett_error: float | None = Field(description="|ETT − T| / T", examples=[0.02])
    slowest_share: float = Field(description="of the steps it was the slowest in", examples=[0.1])
    a: float | None = Field(description="s per size unit, as predicted", examples=[3.6e-05])
    c: float | None = Field(description="s per sample", examples=[0.0])
    b: float | None = Field(description="s per step", examples=[0.005])
    last_step: int = Field(examples=[120])


class _Span(BaseModel):
    from_: int | None = Field(
        alias="from", description="first step there is in the range", examples=[0]
    )
    to: int | None = Field(description="last step there is in the range", examples=[999])
    bucket: int = Field(description="steps per point; above 1: means", examples=[1])
    step: list[int] = Field(description="of a bucket the first", examples=[[0, 1]])

    model_config = ConfigDict(populate_by_name=True)


class _StepColumns(_Span):
    epoch: list[int] = Field(examples=[[0, 0]])
    ended_at: list[float] = Field(examples=[[1767225604.2, 1767225604.4]])


def _metric_fields() -> dict[str, Any]:
    """One column per metric, and its extremes where buckets hold several steps."""
    fields: dict[str, Any] = {name: (Column, Field(examples=[[0.21, 0.2]])) for name in METRICS}
    for name in METRICS:
        for extreme in ("min", "max"):
            fields[f"{name}_{extreme}"] = (Column | None, None)
    return fields


StepColumns = create_model(
    "StepColumns",
    __base__=_StepColumns,
    __doc__="Complete steps as columns. `…_min` and `…_max` only where `bucket` is above 1.",
    **_metric_fields(),
)


class WorkerStepColumns(_Span):
    """Each rank's steps: ``column[rank][step]``, ranks in the order of `ranks`; null: no record."""

    ranks: list[int] = Field(examples=[[0, 1]])
    compute_s: list[Column] = Field(examples=[[[0.19, 0.2], [0.2, 0.19]]])
    ett_s: list[Column]
    wait_s: list[Column]
    samples: list[Column]
    load: list[Column]
    share: list[Column]
    compute_s_min: list[Column] | None = None
    compute_s_max: list[Column] | None = None


class SegmentInfo(BaseModel):
    """A plan that ran."""

    attempt: int = Field(examples=[0])
    seq: int = Field(examples=[12])
    epoch: int = Field(examples=[1])
    first_step: int = Field(examples=[24])
    steps: int = Field(examples=[2])
    policy: str = Field(examples=["chronica"])
    version: int = Field(examples=[1])
    source: Literal["controller", "coast"] = Field(
        description="coast: the leader planned by itself", examples=["controller"]
    )
    moved: int = Field(description="samples that changed their holder", examples=[0])
    plan_s: float = Field(examples=[0.004])
    adopted_at: float = Field(examples=[1767225700.8])
    synchroniser: str = Field(description="how gradients met", examples=["allreduce"])
    why: str = Field(
        description="this synchroniser; empty: the policy has no other",
        examples=["all-reduce: too few steps are known: 4 of 16"],
    )
    synchroniser_digest: str = Field(
        description="another one where the synchroniser, or any of its parameters, is another",
        examples=["b2a6c1d00f4e7a93"],
    )


class Snapshot(BaseModel):
    """All that a page needs before it follows `events?since=`."""

    since: str = Field(examples=["1767225700800-0"])
    run: Run
    begins: int | None = Field(description="its first complete step", examples=[0])
    steps: StepColumns
    worker_steps: WorkerStepColumns
    switches: list[Switch]
    segments: list[SegmentInfo]


class PolicyInForce(BaseModel):
    """What savings are measured against."""

    policy: str = Field(examples=["bsp"])
    parameters: dict[str, Any] = Field(examples=[{}])
    version: int = Field(examples=[0])
    step_time_s: float | None = Field(
        description="forecast, on batches alike the presets'", examples=[0.41]
    )
    measured_s: float | None = Field(
        description="of its last steady steps, at a mean batch's load; null: too few",
        examples=[0.42],
    )
    measured_steps: int = Field(examples=[64])


class PresetForecast(BaseModel):
    """What a preset would take; `low` and `high` bound 95 %."""

    policy: str = Field(examples=["chronica"])
    parameters: dict[str, Any] = Field(description="{}: defaults", examples=[{}])
    step_time_s: float = Field(description="mean, at a mean batch's load", examples=[0.25])
    low_s: float = Field(examples=[0.24])
    high_s: float = Field(examples=[0.26])
    saving: float = Field(description="1 − step_time_s / that of the policy in force")
    saving_low: float = Field(examples=[0.36])
    saving_high: float = Field(examples=[0.41])
    words: str = Field(examples=["chronica would save 38 % ± 2 of the time"])
    relaxed: bool = Field(description="ranks do not wait for all: another training")


class LeftOut(BaseModel):
    """A preset of which nothing can be said."""

    policy: str = Field(examples=["ep4ddl"])
    reason: str


class WhatIf(BaseModel):
    """What each preset would take, best first; or `reason` why nothing can be said."""

    run: str = Field(examples=["3f9a1c07be52"])
    made_at: float = Field(description="Unix time", examples=[1767225700.0])
    step: int | None = Field(description="last one that it rests on", examples=[263])
    first_step: int | None = Field(examples=[200])
    steps: int = Field(description="complete ones that it rests on", examples=[64])
    current: PolicyInForce
    fit_error: float | None = Field(
        description="of the models, on the batches that ran; widens all intervals", examples=[0.01]
    )
    reason: str | None = Field(examples=[None])
    forecasts: list[PresetForecast]
    left_out: list[LeftOut]
    speeds: list[float] = Field(
        description="of each rank s per size unit, for an equal share", examples=[[3.6e-05]]
    )
    replicates: int = Field(description="simulations of each preset", examples=[8])


class AutoMode(_In):
    """What `auto` may do."""

    mode: Literal["off", "recommend", "switch"] = Field(examples=["switch"])
    relaxed: bool | None = Field(
        default=None,
        description="presets that change the training may be chosen, too; null: as it was",
    )
    by: Name = Field(default="api", examples=["api"])


class AutoDecision(BaseModel):
    """What `auto` made of a forecast; savings as ratios."""

    decided: Literal["stay", "wait", "recommend", "switch", "back"] = Field(examples=["switch"])
    reason: str = Field(examples=["chronica would save 38 % ± 2 of the time"])
    policy: str | None = Field(description="the one to go on with", examples=["chronica"])
    parameters: dict[str, Any] = Field(examples=[{}])
    saving: float | None = Field(examples=[0.38])
    low: float | None = Field(examples=[0.36])
    high: float | None = Field(examples=[0.41])
    at: float = Field(description="Unix time", examples=[1767225700.0])


class Auto(BaseModel):
    """What `auto` may do with a run, and what it decided last."""

    mode: Literal["off", "recommend", "switch"] = Field(examples=["switch"])
    relaxed: bool = Field(description="presets that change the training may be chosen, too")
    requested_at: float | None = Field(examples=[1767225650.0])
    requested_by: str | None = Field(examples=["api"])
    last: AutoDecision | None


class Health(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """Each part: "ok", or what is wrong with it."""

    database: str = Field(examples=["ok"])
    bus: str = Field(examples=["ok"])
    worker: str = Field(examples=["ok"])
