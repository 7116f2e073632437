"""REST: telemetry that a run's ranks reported.

Steps are returned as columns, either for the whole run or for each rank. If a range has more steps
than the requested number of points, each point is the mean of several steps. Segments, rounds of
relaxed synchronisation, and the data that nodes fetched are returned as rows. Coverage shows
whether each epoch used each sample exactly once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field, RootModel, create_model

from paceline import policies
from paceline.policies import Predictor
from paceline_backend.api.errors import RUN_REFUSALS
from paceline_backend.api.queries import Points, Ranks, Since, StepRange, Steps, Until, ranks_of
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.state import reused_of, store_of
from paceline_backend.insight import workers
from paceline_backend.insight.report import round_words
from paceline_backend.requests import InvalidRequestError
from paceline_backend.store import choices, coverage, reads, rounds, switches
from paceline_backend.store import runs as runs_store
from paceline_backend.store.details import epochs
from paceline_backend.store.rollups.metrics import METRICS
from paceline_backend.store.rollups.reading import RankChoice

log = logging.getLogger(__name__)
router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])

# Maximum number of changes of the synchroniser in a response, because a chart cannot show more.
_MOST_CHOICES = 200

# Maximum number of rows that a request may read for columns whose sums over steps are not stored.
_MOST_PLAIN_ROWS = 2_000_000

Column = list[float | None]
# Columns that `GET worker-steps` returns only if the request names them.
MoreColumn = Literal[
    "data_s",
    "sync_s",
    "step_s",
    "loss",
    "memory_bytes",
    "squares",
    "longest",
    "recompiles",
    "ended_at",
    "epoch",
    "segment",
    "attempt",
]


class DeviceInfo(BaseModel):
    """Device of a rank, as the rank reported it."""

    kind: str = Field(description="PyTorch's device type", examples=["cuda"])
    name: str = Field(description="model of the device", examples=["NVIDIA A100-SXM4-80GB"])
    cores: int = Field(
        description="number of CPU cores that the rank's process may use", examples=[8]
    )
    memory_bytes: int = Field(
        description="bytes of memory of the accelerator; if the device is a CPU, of the machine",
        examples=[85_000_000_000],
    )
    threads: int = Field(
        description="number of CPU threads that the script computes with; 0: one per core",
        examples=[8],
    )
    flops: float | None = Field(
        description="floating-point operations per second, measured in a trial before the "
        "training; null: not measured",
        examples=[None],
    )
    emulated: bool = Field(description="true: the rank only emulates the device")


class WorkerSummary(BaseModel):
    """Means over a rank's newest steps, unless the description of a field says otherwise."""

    rank: int = Field(examples=[0])
    steps: int = Field(
        description="number of steps over which the rank's means are computed", examples=[50]
    )
    samples: float = Field(examples=[16.0])
    load: float = Field(examples=[5120.5])
    missing: int = Field(
        description="number of steps that the rank made, but whose records were lost", examples=[0]
    )
    share: float = Field(
        description="load of the rank ÷ load of all ranks, in a step", examples=[0.25]
    )
    compute_s: float = Field(examples=[0.19])
    ett_s: float | None = Field(examples=[0.2])
    data_s: float = Field(examples=[0.001])
    wait_s: float = Field(
        description="seconds per step that the rank waited for slower ranks", examples=[0.02]
    )
    sync_s: float = Field(
        description="seconds per step of waiting and communication", examples=[0.03]
    )
    memory_bytes: int = Field(description="peak memory in bytes", examples=[350000000])
    ett_error: float | None = Field(
        description="mean of |ETT − T| ÷ T, for the estimated (ETT) and the measured compute time "
        "(T) of a step; null: no estimate",
        examples=[0.02],
    )
    slowest_share: float = Field(
        description="share of the steps in which no rank computed longer", examples=[0.1]
    )
    a: float | None = Field(
        description="seconds per size unit in the model fitted to the rank; null: unknown",
        examples=[3.6e-05],
    )
    c: float | None = Field(
        description="seconds per sample in the model fitted to the rank; null: unknown",
        examples=[0.0],
    )
    b: float | None = Field(
        description="seconds per step in the model fitted to the rank; null: unknown",
        examples=[0.005],
    )
    recompiles: int = Field(
        default=0,
        description="number of recompilations by torch.compile in the newest steps",
        examples=[2],
    )
    last_step: int = Field(examples=[120])
    device: DeviceInfo | None = Field(description="device of the rank; null: unknown")


class StepAxis(BaseModel):
    """The steps that columns cover, and the number of steps per point."""

    from_: int | None = Field(
        alias="from", description="first step in the range that has data; null: none", examples=[0]
    )
    to: int | None = Field(
        description="last step in the range that has data; null: none", examples=[999]
    )
    bucket: int = Field(
        description="number of steps per point; above 1: a point combines several steps",
        examples=[1],
    )
    step: list[int] = Field(description="first step of each point", examples=[[0, 1]])

    model_config = ConfigDict(populate_by_name=True)


class _StepColumns(StepAxis):
    epoch: list[int] = Field(examples=[[0, 0]])
    ended_at: list[float] = Field(examples=[[1767225604.2, 1767225604.4]])


def _metric_fields() -> dict[str, Any]:
    fields: dict[str, Any] = {name: (Column, Field(examples=[[0.21, 0.2]])) for name in METRICS}
    for name in METRICS:
        for extreme in ("min", "max"):
            fields[f"{name}_{extreme}"] = (Column | None, None)
    return fields


StepColumns = create_model(
    "StepColumns",
    __base__=_StepColumns,
    __doc__="Complete steps as columns; `…_min` and `…_max` exist only if `bucket` is above 1.",
    **_metric_fields(),
)


class WorkerStepColumns(StepAxis):
    """Steps of ranks, as columns ``column[rank][step]`` with ranks in the order of `ranks`.

    A value is null if there is no record of the rank's step.
    """

    ranks: list[int] = Field(examples=[[0, 1]])
    compute_s: list[Column] = Field(examples=[[[0.19, 0.2], [0.2, 0.19]]])
    ett_s: list[Column]
    wait_s: list[Column]
    samples: list[Column]
    load: list[Column]
    share: list[Column]
    data_s: list[Column] | None = Field(
        default=None, description="seconds that a rank waited for its data loader before a step"
    )
    sync_s: list[Column] | None = Field(
        default=None, description="seconds of waiting and communication in a step"
    )
    step_s: list[Column] | None = Field(
        default=None, description="seconds from the start of a step to the start of the next step"
    )
    loss: list[Column] | None = None
    memory_bytes: list[Column] | None = Field(default=None, description="peak memory in bytes")
    squares: list[Column] | None = Field(
        default=None, description="sum of the squared sizes of the samples in a local batch"
    )
    longest: list[Column] | None = Field(
        default=None, description="largest size of a sample in a local batch"
    )
    recompiles: list[Column] | None = Field(
        default=None, description="number of recompilations by torch.compile in a step"
    )
    ended_at: list[Column] | None = Field(
        default=None, description="Unix time at which a rank ended a step"
    )
    epoch: list[Column] | None = None
    segment: list[Column] | None = Field(
        default=None, description="`seq` of the segment to which a step belongs"
    )
    attempt: list[Column] | None = None
    compute_s_min: list[Column] | None = None
    compute_s_max: list[Column] | None = None


class Coast(RootModel[tuple[int, int]]):
    """First and last of consecutive steps that no controller planned."""


class SegmentInfo(BaseModel):
    """A segment that ran."""

    attempt: int = Field(examples=[0])
    seq: int = Field(examples=[12])
    epoch: int = Field(examples=[1])
    first_step: int = Field(examples=[24])
    steps: int = Field(examples=[2])
    policy: str = Field(examples=["chronica"])
    version: int = Field(examples=[1])
    source: Literal["controller", "local", "coast", "equal"] = Field(
        description="controller: the controller planned the segment; local: rank 0 planned it "
        "with the same policy, because no controller did; coast: the leader repeated the last "
        "split of the load, because no plan came in time; equal: the leader planned equal batches, "
        "because the script's loss allows no others",
        examples=["controller"],
    )
    moved: int = Field(description="number of samples that moved to another rank", examples=[0])
    across: int = Field(
        description="number of samples that moved to a rank on another node", examples=[0]
    )
    plan_s: float = Field(examples=[0.004])
    adopted_at: float = Field(examples=[1767225700.8])
    synchroniser: str = Field(
        description="planned kind of gradient synchronisation", examples=["allreduce"]
    )
    why: str = Field(
        description="why the policy chose the synchroniser; empty: the policy has only one",
        examples=["all-reduce: fewer than 16 steps have been measured since the last change"],
    )
    synchroniser_digest: str = Field(
        description="digest of the synchroniser and its parameters",
        examples=["b2a6c1d00f4e7a93"],
    )
    fallback: str = Field(
        description="why ranks all-reduced gradients although another synchroniser was planned; "
        "empty: they used the planned one, or it is not known yet, for example before the "
        "optimiser's first step",
        examples=[""],
    )


class RoundInfo(BaseModel):
    """A round of relaxed synchronisation: a partial reduction of gradients, or a mean of replicas.

    One of the ranks that take part in a round reports it.
    """

    attempt: int = Field(examples=[0])
    rank: int = Field(description="rank that reported the round", examples=[0])
    seq: int = Field(
        description="number of the round among all rounds that the reporting rank reported in the "
        "attempt, from 0",
        examples=[118],
    )
    segment: int = Field(examples=[5])
    number: int = Field(description="number of the round in its segment, from 0", examples=[22])
    step: int = Field(
        description="step in which the reporting rank was when the round ended", examples=[84]
    )
    world: int = Field(
        description="number of ranks that took part, whether or not they contributed", examples=[4]
    )
    contributors: int = Field(
        description="number of ranks that contributed gradients or a replica", examples=[3]
    )
    staleness: list[int] = Field(
        description="number of contributed gradients by age in rounds: 0, 1, 2, …; the last item "
        "also counts older gradients",
        examples=[[2, 1, 0, 0]],
    )
    dropped: int = Field(
        description="number of samples whose gradients were too old to be applied", examples=[0]
    )
    waited_s: float = Field(
        description="response time: seconds from the end of the previous round until this round "
        "was started; for a mean of two replicas, from a rank's request until the request reached "
        "the other rank; for a mean of all replicas, 0",
        examples=[0.012],
    )
    reduced_s: float = Field(
        description="seconds from the end of the response time (`waited_s`) until the result was "
        "available",
        examples=[0.003],
    )
    bytes: int = Field(
        description="number of bytes that the reporting rank contributed", examples=[65536]
    )
    ended_at: float = Field(
        description="Unix time at which the round ended", examples=[1767225604.2]
    )
    copied_s: float = Field(
        description="seconds for copying the reporting rank's contribution from its device to the "
        "CPU",
        examples=[0.001],
    )


class NodeEpoch(BaseModel):
    """Data that a node fetched in an epoch of a run whose data is stored on its nodes."""

    attempt: int = Field(examples=[0])
    epoch: int = Field(examples=[3])
    node: str = Field(examples=["node-2"])
    planned_bytes: int = Field(
        description="bytes that the plan moves to the node for the epoch, without bytes that the "
        "node already has",
        examples=[48_300_000],
    )
    moved_bytes: int = Field(
        description="bytes that the node prefetched for the epoch", examples=[48_300_000]
    )
    moved: int = Field(
        description="number of samples that the node prefetched for the epoch", examples=[412]
    )
    moved_s: float = Field(
        description="seconds from the plan until the last prefetched sample had arrived",
        examples=[3.9],
    )
    read_bytes: int = Field(
        description="bytes that steps read from the source, because the node did not have them",
        examples=[0],
    )
    read: int = Field(
        description="number of samples that steps read from the source, because the node did not "
        "have them",
        examples=[0],
    )
    waits: int = Field(
        description="number of steps of the node's ranks that waited for reads from the source",
        examples=[0],
    )
    waited_s: float = Field(
        description="total seconds that steps of the node's ranks waited for reads from the source",
        examples=[0.0],
    )
    held_bytes: int = Field(
        description="bytes of the data set in the node's directory at the end of the epoch",
        examples=[9_000_000_000],
    )
    at: float = Field(description="Unix time of the end of the epoch", examples=[1767225604.2])


class InForce(BaseModel):
    """Sums and means over the rounds of relaxed synchronisation under one policy version."""

    model_config = ConfigDict(populate_by_name=True)

    version: int = Field(description="policy version", examples=[1])
    policy: str = Field(examples=["rna"])
    synchroniser: str = Field(examples=["partial"])
    from_: int = Field(
        alias="from", description="step in which the first round ended", examples=[64]
    )
    to: int = Field(description="step in which the last round ended", examples=[311])
    rounds: int = Field(examples=[1204])
    world: int = Field(
        description="maximum number of ranks that took part in a round", examples=[4]
    )
    contributors: float = Field(
        description="mean number of ranks that contributed to a round", examples=[3.1]
    )
    staleness: list[int] = Field(
        description="number of gradients by age in rounds: 0, 1, 2, …; the last item also counts "
        "older gradients",
        examples=[[3000, 700, 32, 0]],
    )
    samples: int = Field(
        description="number of samples in the policy version's complete steps, without segments "
        "that were all-reduced",
        examples=[15872],
    )
    dropped: int = Field(
        description="number of samples whose gradients were not applied", examples=[48]
    )
    dropped_share: float | None = Field(
        description="share of the samples whose gradients were not applied; null: no samples",
        examples=[0.003],
    )
    waited_s: float = Field(
        description="median response time of rounds (`waited_s` of `GET rounds`) in seconds",
        examples=[0.012],
    )
    waited_s_p95: float = Field(
        description="95th percentile of the response time of a round in seconds", examples=[0.041]
    )
    reduced_s: float = Field(
        description="mean seconds from the end of the response time to the result of a round",
        examples=[0.003],
    )
    copied_s: float = Field(
        description="mean seconds for copying a rank's contribution from its device to the CPU",
        examples=[0.001],
    )
    bytes: int = Field(
        description="total bytes that the rank which reported each round contributed to it",
        examples=[78905344],
    )
    rounds_per_s: float | None = Field(examples=[61.5])
    gradients_per_s: float | None = Field(
        description="number of gradients that were applied per second; null: unknown",
        examples=[190.6],
    )
    words: str = Field(examples=["rna (partial), steps 64–311: 1,204 rounds of 3.1 of 4 ranks"])


class RoundsOverTime(BaseModel):
    """Rounds by the step in which they ended. Points without rounds are left out."""

    bucket: int = Field(description="number of steps per point", examples=[1])
    step: list[int] = Field(
        description="first step of each point; points in which no round ended are left out",
        examples=[[64, 65]],
    )
    rounds: list[int] = Field(examples=[[4, 5]])
    contributors: list[float] = Field(
        description="mean number of ranks that contributed to a round", examples=[[3.25, 3.0]]
    )
    contributors_min: list[int] = Field(examples=[[2, 1]])
    contributors_max: list[int] = Field(examples=[[4, 4]])
    dropped: list[int] = Field(
        description="number of samples whose gradients were not applied", examples=[[0, 4]]
    )
    waited_s: list[float] = Field(
        description="mean response time of a round in seconds", examples=[[0.012, 0.014]]
    )
    waited_s_max: list[float] = Field(examples=[[0.03, 0.041]])
    reduced_s: list[float] = Field(
        description="mean seconds from the end of the response time to the result of a round",
        examples=[[0.003, 0.003]],
    )
    copied_s: list[float] = Field(
        description="mean seconds for copying a rank's contribution from its device to the CPU",
        examples=[[0.001, 0.001]],
    )
    bytes: list[int] = Field(
        description="total bytes that the rank which reported each round contributed to it",
        examples=[[262144, 327680]],
    )


class Chosen(BaseModel):
    """First choice of a synchroniser by a policy version, or a later change of the choice.

    A change of the synchroniser's parameters counts as a change of the choice.
    """

    attempt: int = Field(examples=[0])
    version: int = Field(description="policy version", examples=[1])
    policy: str = Field(examples=["paceline-relaxed"])
    synchroniser: str = Field(examples=["pairwise"])
    from_: int = Field(
        alias="from", description="first step under the chosen synchroniser", examples=[128]
    )
    why: str = Field(
        description="reason for the choice, with the measurements on which it was based",
        examples=["all-reduce: fewer than 16 steps have been measured since the last change"],
    )

    before: str | None = Field(
        description="previous synchroniser of the policy version; null: this is its first",
        examples=["allreduce"],
    )

    model_config = ConfigDict(populate_by_name=True)


class Fallbacks(BaseModel):
    """Segments that used an all-reduce instead of the planned synchroniser, for one reason."""

    version: int = Field(examples=[1])
    policy: str = Field(examples=["rna"])
    synchroniser: str = Field(
        description="synchroniser that was planned, but not used", examples=["partial"]
    )
    from_: int = Field(alias="from", description="first step of the first segment", examples=[64])
    to: int = Field(description="last step of the last segment", examples=[127])
    segments: int = Field(description="number of segments that were all-reduced", examples=[4])
    why: str = Field(examples=["the script steps its optimiser with a closure"])

    model_config = ConfigDict(populate_by_name=True)


class Synchronisation(BaseModel):
    """Relaxed gradient synchronisation in a range of steps."""

    model_config = ConfigDict(populate_by_name=True)

    from_: int | None = Field(
        alias="from",
        description="step in which the first round of the range ended; null: no round",
        examples=[64],
    )
    to: int | None = Field(
        description="step in which the last round of the range ended; null: no round",
        examples=[311],
    )
    newest: int | None = Field(
        description="step in which the run's last round ended; null: the run has no rounds",
        examples=[311],
    )
    in_force: list[InForce]
    over_time: RoundsOverTime
    chosen: list[Chosen] = Field(
        description="the newest 200 choices of a synchroniser in the range of steps; empty: no "
        "policy of the run chooses its synchroniser"
    )
    fallbacks: list[Fallbacks] = Field(
        description="segments whose gradients were all-reduced although their policy relaxes "
        "synchronisation, by policy version and reason; empty: none"
    )


class EpochCoverage(BaseModel):
    """Samples that an epoch used. A sample counts as used once its rank has reported the step."""

    epoch: int = Field(examples=[0])
    samples: int = Field(
        description="number of samples in the data set; for a stream, up to the last sample that "
        "the epoch used",
        examples=[1074],
    )
    used: int = Field(
        description="total number of uses of samples, with repetitions", examples=[1074]
    )
    distinct: int = Field(
        description="number of samples that were used at least once", examples=[1074]
    )
    missing: int = Field(description="number of samples that were not used", examples=[0])
    duplicated: int = Field(
        description="number of samples that were used more than once", examples=[0]
    )
    complete: bool = Field(
        description="true: all ranks have reported the last step of the epoch", examples=[True]
    )
    exact: bool = Field(
        description="true: each sample was used exactly once, apart from samples that `drop_last` "
        "omits; in an unfinished epoch, no sample was used twice",
        examples=[True],
    )
    dropped: int = Field(
        description="number of samples that were used, but whose gradients were too old to be "
        "applied",
        examples=[0],
    )


class Coverage(BaseModel):
    """Use of samples in all epochs that the run has begun."""

    epochs: list[EpochCoverage]
    exact: bool = Field(examples=[True])
    dropped: int = Field(
        description="number of samples in all epochs whose gradients were too old to be applied",
        examples=[0],
    )


class WorkerStepQuery(StepRange):
    """Query parameters that select steps of ranks, and their columns."""

    points: Points = 1000
    ranks: Ranks = None
    since: Since = None
    until: Until = None
    columns: Annotated[
        list[MoreColumn],
        Query(
            max_length=20,
            description="columns to return in addition to the default columns",
            examples=[["data_s", "loss"]],
        ),
    ] = []  # noqa: RUF012


@router.get("/workers", response_model=list[WorkerSummary])
def list_workers(
    request: Request,
    run: str,
    last: Annotated[
        int,
        Query(ge=1, le=1000, description="number of newest steps over which means are computed"),
    ] = 50,
) -> Any:
    """List the ranks of a run, each with means over its newest steps."""
    store = store_of(request)
    asked = switches.rows(store, run)
    predictor = _predictor(asked[-1]) if asked else None
    with store.read() as connection:
        key = runs_store.key_of(connection, run)

    def summary() -> list[dict[str, Any]]:
        with store.read() as connection:
            return workers.summary(connection, key, last, predictor)

    return reused_of(request).get(
        ("workers", key, last, asked[-1]["version"] if asked else None), summary
    )


def _predictor(switch: Mapping[str, Any]) -> Predictor | None:
    """Return the predictor of a policy, or None if this server no longer has the policy."""
    try:
        return policies.make(switch["policy"], switch["parameters"]).predictor
    except ValueError as error:
        log.info("cannot create the predictor of a policy: %s", error)
        return None


@router.get("/steps", response_model=StepColumns, response_model_exclude_unset=True)
def list_steps(
    request: Request,
    run: str,
    steps: Steps,
    points: Points = 1000,
    since: Since = None,
    until: Until = None,
) -> Any:
    """Return the complete steps of a run as columns."""
    with store_of(request).read() as connection:
        key = runs_store.key_of(connection, run)
        span = reads.steps_between(connection, key, since, until, steps.span)
        return reads.step_columns(connection, key, span, points)


@router.get("/worker-steps", response_model=WorkerStepColumns, response_model_exclude_unset=True)
def list_worker_steps(
    request: Request, run: str, steps: Annotated[WorkerStepQuery, Query()]
) -> Any:
    """Return the steps of each rank as columns.

    If the run has more than 1,024 ranks and the request names none, the response has only every
    k-th rank, and fewer points.
    """
    only, points = ranks_of(steps.ranks), steps.points
    store = store_of(request)
    world = runs_store.get(store, run)["world"]
    more = tuple(dict.fromkeys(steps.columns))
    with store.read() as connection:
        key = runs_store.key_of(connection, run)
        span = reads.steps_between(connection, key, steps.since, steps.until, steps.span)
        if more:
            _refuse_long(reads.reported_bounds(connection, key, span), world)
        every = reads.shown_every(world)
        if only is None:
            points = reads.shown_steps(world, points)
        which = RankChoice(only, every)
        return reads.worker_step_columns(connection, key, span, points, which, more)


def _refuse_long(span: reads.Range, world: int | None) -> None:
    first, last = span
    if first is None or last is None or (last - first + 1) * (world or 1) <= _MOST_PLAIN_ROWS:
        return
    most = max(1, _MOST_PLAIN_ROWS // (world or 1))
    message = (
        f"with the requested columns, at most {most:,} steps can be read at once: narrow the range "
        "with `from` and `to`, or use GET export?table=worker-steps"
    )
    raise InvalidRequestError("columns", message)


@router.get("/segments", response_model=list[SegmentInfo])
def list_segments(
    request: Request,
    run: str,
    steps: Steps,
    limit: Annotated[
        int,
        Query(ge=1, le=100_000, description="maximum number of segments; the newest are returned"),
    ] = 10_000,
) -> Any:
    """List the segments that ran, oldest first."""
    with store_of(request).read() as connection:
        key = runs_store.key_of(connection, run)
        return reads.segment_rows(connection, key, steps.span, limit)


@router.get("/coasts", response_model=list[Coast])
def list_coasts(request: Request, run: str, steps: Steps, points: Points = 1000) -> Any:
    """List spans of steps that no controller planned: first and last step of each."""
    with store_of(request).read() as connection:
        key = runs_store.key_of(connection, run)
        return reads.coasts(connection, key, steps.span, points)


@router.get("/rounds", response_model=list[RoundInfo])
def list_rounds(
    request: Request,
    run: str,
    steps: Steps,
    limit: Annotated[
        int,
        Query(ge=1, le=100_000, description="maximum number of rounds; the newest are returned"),
    ] = 10_000,
) -> Any:
    """List rounds of relaxed synchronisers, oldest first. An all-reduce has no rounds."""
    with store_of(request).read() as connection:
        key = runs_store.key_of(connection, run)
        return rounds.rows(connection, key, steps.span, limit)


@router.get("/data", response_model=list[NodeEpoch])
def list_data(
    request: Request,
    run: str,
    limit: Annotated[
        int, Query(ge=1, le=100_000, description="maximum number of rows; the newest are returned")
    ] = 10_000,
) -> Any:
    """List the data that each node fetched per epoch, and how long steps waited for data."""
    with store_of(request).read() as connection:
        key = runs_store.key_of(connection, run)
        return epochs.data_moved(connection, key, limit)


@router.get("/synchronisation", response_model=Synchronisation)
def get_synchronisation(request: Request, run: str, steps: Steps, points: Points = 200) -> Any:
    """Return how gradients were synchronised.

    The response has sums per policy version, values over time, the policies' choices of
    synchronisers, and segments that used an all-reduce instead of their synchroniser. An all-reduce
    has no rounds.
    """
    with store_of(request).read() as connection:
        key = runs_store.key_of(connection, run)
        summary = rounds.summary(connection, key, steps.span, points)
        summary["chosen"] = choices.chosen(connection, key, steps.span, _MOST_CHOICES)
        summary["fallbacks"] = choices.fallbacks(connection, key, steps.span)
    for version in summary["in_force"]:
        version["words"] = round_words(version)
    return summary


@router.get("/coverage", response_model=Coverage)
def get_coverage(request: Request, run: str) -> Any:
    """Return whether each epoch used each sample once, and the number of dropped samples."""
    with store_of(request).read() as connection:
        return coverage.coverage(connection, runs_store.key_of(connection, run))
