"""Bodies about a run's metrics and its target. `docs/rest.md` describes the fields."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from paceline.wire import metrics


def _metric(name: str) -> str:
    if reason := metrics.of_names([name]):
        raise ValueError(reason)
    return name


MetricName = Annotated[str, AfterValidator(_metric)]
Direction = Literal[">=", "<="]
Source = Literal["evaluations", "training"]


class EvaluationInfo(BaseModel):
    """An evaluation: measurements on held-out data after a step."""

    step: int = Field(description="last step before it; -1: none", examples=[279])
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


class MetricColumns(BaseModel):
    """A training metric over steps."""

    step: list[int] = Field(examples=[[0, 1]])
    value: list[float | None] = Field(
        description="value of the global batch; for a bucket, the mean", examples=[[0.5, 0.6]]
    )
    min: list[float | None] | None = Field(
        default=None, description="minimum of a bucket", examples=[None]
    )
    max: list[float | None] | None = Field(
        default=None, description="maximum of a bucket", examples=[None]
    )


class Metrics(BaseModel):
    """A run's training metrics, without the loss."""

    model_config = ConfigDict(populate_by_name=True)

    from_: int | None = Field(alias="from", examples=[0])
    to: int | None = Field(examples=[279])
    bucket: int = Field(description="steps per point", examples=[1])
    metrics: dict[str, MetricColumns] = Field(description="metrics by name; empty: none")


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


class BestValue(BaseModel):
    """Best, least or greatest value of a metric over the evaluations, and its first occurrence."""

    metric: str = Field(examples=["accuracy"])
    figure: Literal["best", "least", "greatest"] = Field(
        description="`best` if the run's target defines which values are better, and for `loss`; "
        "otherwise `least` and `greatest`"
    )
    value: float = Field(examples=[0.91])
    step: int = Field(description="last step before it; -1: none", examples=[279])
    epoch: int = Field(description="epoch of that step", examples=[19])
    trained: int = Field(description="samples trained on by then", examples=[17_180])
    at: float = Field(description="Unix time", examples=[1767225704.0])
    after_s: float | None = Field(
        description="seconds since the start of the run; null: unknown", examples=[100.5]
    )


class Quality(BaseModel):
    """Metrics that a run's model has reached, and when."""

    queued_s: float | None = Field(description="as in `GET /runs/{id}`", examples=[3.5])
    jct_s: float | None = Field(description="as in `GET /runs/{id}`", examples=[100.5])
    eta_at: float | None = Field(description="as in `GET /runs/{id}`", examples=[None])
    target: Target | None = Field(description="null: no target is set")
    best: list[BestValue] = Field(description="best values of each metric of the evaluations")
    evaluations: list[EvaluationInfo] = Field(description="oldest first; the newest 1,000")
