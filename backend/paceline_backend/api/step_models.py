"""Bodies about steps, workers and segments. `docs/rest.md` describes the fields."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, RootModel, create_model

from paceline_backend.api.models import RunInfo, SwitchInfo
from paceline_backend.api.quality_models import EvaluationInfo
from paceline_backend.store.rollups.metrics import METRICS

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


class _Span(BaseModel):
    from_: int | None = Field(
        alias="from", description="first step of the run in the range", examples=[0]
    )
    to: int | None = Field(description="last step of the run in the range", examples=[999])
    bucket: int = Field(description="steps per point; above 1: values are means", examples=[1])
    step: list[int] = Field(description="first step of each bucket", examples=[[0, 1]])

    model_config = ConfigDict(populate_by_name=True)


class _StepColumns(_Span):
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


class WorkerStepColumns(_Span):
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


class Lines(_Span):
    """Steps of at most 16 ranks: ``column[rank][step]``. If there are more, `ranks` is empty."""

    ranks: list[int] = Field(examples=[[0, 1]])
    compute_s: list[Column] = Field(examples=[[[0.19, 0.2], [0.2, 0.19]]])
    ett_s: list[Column]
    share: list[Column]
    compute_s_min: list[Column]
    compute_s_max: list[Column]


class Heat(_Span):
    """Heat map of compute times: rows of ranks, columns of steps, the maximum in each cell.

    The columns ``compute_…`` and ``share_…`` are quantiles over the rows of means.
    """

    world: int = Field(description="ranks of the run", examples=[1024])
    together: int = Field(description="ranks per row; 1 for up to 256 ranks", examples=[4])
    rows: int = Field(
        description="number of rows; row k begins with rank k · together", examples=[256]
    )
    low: float = Field(description="minimum of all cells, seconds", examples=[0.1])
    high: float = Field(description="maximum of all cells, seconds", examples=[0.9])
    cells: str = Field(
        description="base64 of one byte for each cell, row by row; 0: unknown, else code k means "
        "low · (high / low) ** ((k - 1) / 254)",
        examples=["Af8AAQ=="],
    )
    compute_p10: Column
    compute_p50: Column
    compute_p90: Column
    share_min: Column
    share_p50: Column
    share_p90: Column
    share_max: Column


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


class RangeView(BaseModel):
    """Data of the charts for a range of steps."""

    run: RunInfo
    begins: int | None = Field(description="first complete step of the run", examples=[0])
    steps: StepColumns
    worker_steps: Lines
    heat: Heat
    coasts: list[Coast] = Field(description="spans that no controller planned")
    switches: list[SwitchInfo]
    segments: list[SegmentInfo] = Field(
        description="the newest 200, with `since` the newest 50, in order"
    )
    evaluations: list[EvaluationInfo] | None = Field(
        default=None, description="only with `since`: the newest 20, in order"
    )
