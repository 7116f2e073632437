"""REST: telemetry that a run's ranks reported.

Steps come as columns, of the run or of each rank, thinned out to the requested number of points.
Segments, rounds of relaxed synchronisers and the data that nodes fetched come as rows. Coverage
counts from the same records whether each epoch used each sample once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field, RootModel, create_model

from paceline_backend import policies
from paceline_backend.api.errors import RUN_REFUSALS
from paceline_backend.api.queries import Points, Ranks, Since, StepRange, Steps, Until, ranks_of
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.state import reused_of, store_of
from paceline_backend.insight import workers
from paceline_backend.insight.report import round_words
from paceline_backend.policies import Predictor
from paceline_backend.requests import InvalidRequestError
from paceline_backend.store import choices, coverage, reads, rounds, switches
from paceline_backend.store import runs as runs_store
from paceline_backend.store.details import epochs
from paceline_backend.store.rollups.metrics import METRICS
from paceline_backend.store.rollups.reading import RankChoice

log = logging.getLogger(__name__)
router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])

# Maximum number of choices of synchronisers in a response. A chart could not show more legibly.
_MOST_CHOICES = 200

# A request for columns without roll-ups is refused if it needs more rows than this.
_MOST_PLAIN_ROWS = 2_000_000

Column = list[float | None]
# Columns of rank steps that a response has only on request.
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

    kind: str = Field(description="PyTorch's type of the device", examples=["cuda"])
    name: str = Field(description="model of the device", examples=["NVIDIA A100-SXM4-80GB"])
    cores: int = Field(description="CPU cores that the rank may use", examples=[8])
    memory_bytes: int = Field(
        description="memory of the accelerator, or of the machine", examples=[85_000_000_000]
    )
    threads: int = Field(
        description="CPU threads with which the script computes; 0: one per core", examples=[8]
    )
    flops: float | None = Field(
        description="floating-point operations per second in a trial; null: no trial",
        examples=[None],
    )
    emulated: bool = Field(description="the rank emulates this device")


class WorkerSummary(BaseModel):
    """Means over a rank's newest steps, unless a field states otherwise."""

    rank: int = Field(examples=[0])
    steps: int = Field(description="number of steps that it reported", examples=[50])
    samples: float = Field(examples=[16.0])
    load: float = Field(examples=[5120.5])
    missing: int = Field(
        description="number of steps whose record of this rank was lost", examples=[0]
    )
    share: float = Field(description="share of the load of a step", examples=[0.25])
    compute_s: float = Field(examples=[0.19])
    ett_s: float | None = Field(examples=[0.2])
    data_s: float = Field(examples=[0.001])
    wait_s: float = Field(description="waiting for slower ranks", examples=[0.02])
    sync_s: float = Field(description="waiting and communication", examples=[0.03])
    memory_bytes: int = Field(description="peak", examples=[350000000])
    ett_error: float | None = Field(description="|ETT − T| / T", examples=[0.02])
    slowest_share: float = Field(
        description="share of steps in which it was the slowest", examples=[0.1]
    )
    a: float | None = Field(description="s per size unit, as predicted", examples=[3.6e-05])
    c: float | None = Field(description="s per sample", examples=[0.0])
    b: float | None = Field(description="s per step", examples=[0.005])
    recompiles: int = Field(
        default=0, description="number of recompilations by torch.compile", examples=[2]
    )
    last_step: int = Field(examples=[120])
    device: DeviceInfo | None = Field(description="null: unknown")


class StepAxis(BaseModel):
    """The steps that columns cover, and the number of steps per point."""

    from_: int | None = Field(
        alias="from", description="first step of the run in the range", examples=[0]
    )
    to: int | None = Field(description="last step of the run in the range", examples=[999])
    bucket: int = Field(description="steps per point; above 1: values are means", examples=[1])
    step: list[int] = Field(description="first step of each bucket", examples=[[0, 1]])

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
    __doc__="Complete steps as columns. `…_min` and `…_max` only where `bucket` is above 1.",
    **_metric_fields(),
)


class WorkerStepColumns(StepAxis):
    """Steps of each rank: ``column[rank][step]``, in the order of `ranks`; null: no record."""

    ranks: list[int] = Field(examples=[[0, 1]])
    compute_s: list[Column] = Field(examples=[[[0.19, 0.2], [0.2, 0.19]]])
    ett_s: list[Column]
    wait_s: list[Column]
    samples: list[Column]
    load: list[Column]
    share: list[Column]
    data_s: list[Column] | None = Field(default=None, description="waiting for the data loader")
    sync_s: list[Column] | None = Field(default=None, description="waiting and communication")
    step_s: list[Column] | None = Field(
        default=None, description="from the start of the step to the start of the next"
    )
    loss: list[Column] | None = None
    memory_bytes: list[Column] | None = Field(default=None, description="peak")
    squares: list[Column] | None = Field(default=None, description="Σλ² of the local batch")
    longest: list[Column] | None = Field(default=None, description="max λ of the local batch")
    recompiles: list[Column] | None = Field(
        default=None, description="number of recompilations by torch.compile in the step"
    )
    ended_at: list[Column] | None = Field(default=None, description="Unix time")
    epoch: list[Column] | None = None
    segment: list[Column] | None = Field(default=None, description="`seq` of the plan")
    attempt: list[Column] | None = None
    compute_s_min: list[Column] | None = None
    compute_s_max: list[Column] | None = None


class Coast(RootModel[tuple[int, int]]):
    """First and last step of a span that no controller planned."""


class SegmentInfo(BaseModel):
    """A segment that ran."""

    attempt: int = Field(examples=[0])
    seq: int = Field(examples=[12])
    epoch: int = Field(examples=[1])
    first_step: int = Field(examples=[24])
    steps: int = Field(examples=[2])
    policy: str = Field(examples=["chronica"])
    version: int = Field(examples=[1])
    source: Literal["controller", "coast", "equal"] = Field(
        description="coast: the leader planned the segment because no plan came in time; equal: "
        "it gave ranks equal batches because the script's loss allows no others",
        examples=["controller"],
    )
    moved: int = Field(description="samples that moved to another rank", examples=[0])
    across: int = Field(
        description="of these, samples whose new rank is on another node", examples=[0]
    )
    plan_s: float = Field(examples=[0.004])
    adopted_at: float = Field(examples=[1767225700.8])
    synchroniser: str = Field(description="how gradients were synchronised", examples=["allreduce"])
    why: str = Field(
        description="why the policy chose this synchroniser; empty: it has no other",
        examples=["all-reduce: too few steps are known: 4 of 16"],
    )
    synchroniser_digest: str = Field(
        description="digest of the synchroniser and its parameters",
        examples=["b2a6c1d00f4e7a93"],
    )
    fallback: str = Field(
        description="why ranks all-reduced gradients in spite of the synchroniser; empty: they "
        "did not, or the reason is unknown, as before the optimiser's first step",
        examples=[""],
    )


class RoundInfo(BaseModel):
    """A round: one partial reduction of gradients, or one mean of replicas."""

    attempt: int = Field(examples=[0])
    rank: int = Field(description="rank that reported the round", examples=[0])
    seq: int = Field(
        description="number of the round among those that this rank reported", examples=[118]
    )
    segment: int = Field(examples=[5])
    number: int = Field(description="number of the round in its segment", examples=[22])
    step: int = Field(description="step in which the rank was", examples=[84])
    world: int = Field(description="number of ranks that took part", examples=[4])
    contributors: int = Field(description="number of these ranks that contributed", examples=[3])
    staleness: list[int] = Field(
        description="number of contributed gradients by age in rounds; the last item also counts "
        "older ones",
        examples=[[2, 1, 0, 0]],
    )
    dropped: int = Field(description="samples whose gradients were too old", examples=[0])
    waited_s: float = Field(
        description="response time: from the previous round until the start of this one; for a "
        "mean of two ranks: until the other rank had the request; for a mean of all ranks: 0",
        examples=[0.012],
    )
    reduced_s: float = Field(
        description="from the end of `waited_s` until the result was available", examples=[0.003]
    )
    bytes: int = Field(description="bytes that the rank contributed", examples=[65536])
    ended_at: float = Field(description="Unix time", examples=[1767225604.2])
    copied_s: float = Field(
        description="copying the rank's contribution from its device to the CPU", examples=[0.001]
    )


class NodeEpoch(BaseModel):
    """Data traffic of a node in an epoch, where data lives on nodes; sums over the node's ranks."""

    attempt: int = Field(examples=[0])
    epoch: int = Field(examples=[3])
    node: str = Field(examples=["node-2"])
    planned_bytes: int = Field(
        description="bytes that the plan moves to the node for this epoch, without those that it "
        "still has",
        examples=[48_300_000],
    )
    moved_bytes: int = Field(description="of these, prefetched bytes", examples=[48_300_000])
    moved: int = Field(description="number of samples", examples=[412])
    moved_s: float = Field(
        description="from the plan until the last of them had arrived", examples=[3.9]
    )
    read_bytes: int = Field(
        description="bytes that steps read from the source because the node did not have them",
        examples=[0],
    )
    read: int = Field(description="number of samples", examples=[0])
    waits: int = Field(
        description="how often a rank's step had to wait for these reads", examples=[0]
    )
    waited_s: float = Field(description="total duration of these waits", examples=[0.0])
    held_bytes: int = Field(
        description="bytes in the node's directory at the end of the epoch",
        examples=[9_000_000_000],
    )
    at: float = Field(description="Unix time of the end of the epoch", examples=[1767225604.2])


class InForce(BaseModel):
    """Sums and means over the rounds under one policy version."""

    model_config = ConfigDict(populate_by_name=True)

    version: int = Field(description="policy version", examples=[1])
    policy: str = Field(examples=["rna"])
    synchroniser: str = Field(examples=["partial"])
    from_: int = Field(alias="from", description="step of the first round", examples=[64])
    to: int = Field(description="step of the last round", examples=[311])
    rounds: int = Field(examples=[1204])
    world: int = Field(description="number of ranks that took part", examples=[4])
    contributors: float = Field(description="mean per round", examples=[3.1])
    staleness: list[int] = Field(
        description="number of gradients by age in rounds; the last item also counts older ones",
        examples=[[3000, 700, 32, 0]],
    )
    samples: int = Field(
        description="samples of the complete steps under this version", examples=[15872]
    )
    dropped: int = Field(description="samples whose gradients were not applied", examples=[48])
    dropped_share: float | None = Field(description="share of `samples`", examples=[0.003])
    waited_s: float = Field(description="response time, median", examples=[0.012])
    waited_s_p95: float = Field(description="response time, 95th percentile", examples=[0.041])
    reduced_s: float = Field(description="mean", examples=[0.003])
    copied_s: float = Field(description="mean", examples=[0.001])
    bytes: int = Field(description="total that the reporting rank contributed", examples=[78905344])
    rounds_per_s: float | None = Field(examples=[61.5])
    gradients_per_s: float | None = Field(
        description="applied gradients per second", examples=[190.6]
    )
    words: str = Field(examples=["rna (partial), steps 64–311: 1,204 rounds of 3.1 of 4 ranks"])


class RoundsOverTime(BaseModel):
    """Rounds by the step in which they ended. Steps without rounds are left out."""

    bucket: int = Field(description="steps per point", examples=[1])
    step: list[int] = Field(
        description="first step of each bucket that has a round", examples=[[64, 65]]
    )
    rounds: list[int] = Field(examples=[[4, 5]])
    contributors: list[float] = Field(description="mean", examples=[[3.25, 3.0]])
    contributors_min: list[int] = Field(examples=[[2, 1]])
    contributors_max: list[int] = Field(examples=[[4, 4]])
    dropped: list[int] = Field(description="total number of samples", examples=[[0, 4]])
    waited_s: list[float] = Field(description="mean", examples=[[0.012, 0.014]])
    waited_s_max: list[float] = Field(examples=[[0.03, 0.041]])
    reduced_s: list[float] = Field(description="mean", examples=[[0.003, 0.003]])
    copied_s: list[float] = Field(description="mean", examples=[[0.001, 0.001]])
    bytes: list[int] = Field(description="total number of bytes", examples=[[262144, 327680]])


class Chosen(BaseModel):
    """A policy's choice of a synchroniser and its parameters, or a version's first choice."""

    attempt: int = Field(examples=[0])
    version: int = Field(description="policy version", examples=[1])
    policy: str = Field(examples=["paceline-relaxed"])
    synchroniser: str = Field(examples=["pairwise"])
    from_: int = Field(alias="from", description="first step", examples=[128])
    why: str = Field(
        description="reason, with the figures at that time",
        examples=["all-reduce: fewer than 16 steps have been measured since the last change"],
    )

    before: str | None = Field(
        description="previous synchroniser of this policy version; null: this is its first",
        examples=["allreduce"],
    )

    model_config = ConfigDict(populate_by_name=True)


class Fallbacks(BaseModel):
    """Segments that were all-reduced in spite of their synchroniser, for one reason."""

    version: int = Field(examples=[1])
    policy: str = Field(examples=["rna"])
    synchroniser: str = Field(description="the policy's synchroniser", examples=["partial"])
    from_: int = Field(alias="from", description="first step of the first segment", examples=[64])
    to: int = Field(description="last step of the last segment", examples=[127])
    segments: int = Field(description="number of segments", examples=[4])
    why: str = Field(examples=["the script steps its optimiser with a closure"])

    model_config = ConfigDict(populate_by_name=True)


class Synchronisation(BaseModel):
    """Gradient synchronisation under relaxed synchronisers."""

    model_config = ConfigDict(populate_by_name=True)

    from_: int | None = Field(
        alias="from", description="step of the first round in the range", examples=[64]
    )
    to: int | None = Field(description="step of the last round in the range", examples=[311])
    newest: int | None = Field(
        description="step of the run's last round; null: it has none", examples=[311]
    )
    in_force: list[InForce]
    over_time: RoundsOverTime
    chosen: list[Chosen] = Field(
        description="choices of policies in the range of steps, the newest 200; otherwise empty"
    )
    fallbacks: list[Fallbacks] = Field(description="by policy version and reason; otherwise empty")


class EpochCoverage(BaseModel):
    """Samples that an epoch used, counted from the records of ranks."""

    epoch: int = Field(examples=[0])
    samples: int = Field(description="samples in the data set", examples=[1074])
    used: int = Field(description="total number of uses", examples=[1074])
    distinct: int = Field(description="samples used at least once", examples=[1074])
    missing: int = Field(description="samples not used", examples=[0])
    duplicated: int = Field(description="samples used more than once", examples=[0])
    complete: bool = Field(description="the epoch has ended", examples=[True])
    exact: bool = Field(
        description="each sample was used exactly once; in the last, unfinished epoch: none twice",
        examples=[True],
    )
    dropped: int = Field(
        description="samples that were used, but whose gradients came too late to be applied",
        examples=[0],
    )


class Coverage(BaseModel):
    """Coverage of all epochs that the run has begun."""

    epochs: list[EpochCoverage]
    exact: bool = Field(examples=[True])
    dropped: int = Field(description="dropped samples of all epochs", examples=[0])


class WorkerStepQuery(StepRange):
    """Query parameters that select steps of ranks, and their columns."""

    points: Points = 1000
    ranks: Ranks = None
    since: Since = None
    until: Until = None
    columns: Annotated[
        list[MoreColumn],
        Query(max_length=20, description="further columns", examples=[["data_s", "loss"]]),
    ] = []  # noqa: RUF012


@router.get("/workers", response_model=list[WorkerSummary])
def list_workers(
    request: Request,
    run: str,
    last: Annotated[
        int, Query(ge=1, le=1000, description="number of newest steps to average")
    ] = 50,
) -> Any:
    """List the ranks with means over their newest steps."""
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
    """Return complete steps as columns."""
    with store_of(request).read() as connection:
        key = runs_store.key_of(connection, run)
        span = reads.steps_between(connection, key, since, until, steps.span)
        return reads.step_columns(connection, key, span, points)


@router.get("/worker-steps", response_model=WorkerStepColumns, response_model_exclude_unset=True)
def list_worker_steps(
    request: Request, run: str, steps: Annotated[WorkerStepQuery, Query()]
) -> Any:
    """Return the steps of each rank as columns.

    With more than 1,024 ranks, the response has every k-th rank and fewer points, unless the
    request names ranks.
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
        f"at most {most:,} steps of these columns can be read at once: narrow the range with "
        "`from` and `to`, or use GET export?table=worker-steps"
    )
    raise InvalidRequestError("columns", message)


@router.get("/segments", response_model=list[SegmentInfo])
def list_segments(
    request: Request,
    run: str,
    steps: Steps,
    limit: Annotated[
        int, Query(ge=1, le=100_000, description="maximum number of rows; the newest are returned")
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
        int, Query(ge=1, le=100_000, description="maximum number of rows; the newest are returned")
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

    The response has sums per policy version, values over time, choices of policies, and fallbacks.
    An all-reduce has no rounds.
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
