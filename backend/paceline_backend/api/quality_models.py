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

    step: int = Field(description="the last one before it; -1: none", examples=[279])
    epoch: int = Field(description="of that step", examples=[19])
    attempt: int = Field(examples=[0])
    trained: int = Field(
        description="samples that the run had trained on by then", examples=[17_180]
    )
    at: float = Field(description="Unix time", examples=[1767225704.0])
    after_s: float | None = Field(
        description="since the run began; null: that is not known", examples=[100.5]
    )
    ranks: int = Field(description="whose values it combines", examples=[1])
    metrics: dict[str, float | None] = Field(
        description="by name; null: not a finite number", examples=[{"accuracy": 0.91}]
    )


class MetricColumns(BaseModel):
    """A training metric over steps."""

    step: list[int] = Field(examples=[[0, 1]])
    value: list[float | None] = Field(
        description="of the global batch; of a bucket: the mean", examples=[[0.5, 0.6]]
    )
    min: list[float | None] | None = Field(
        default=None, description="of a bucket: the least", examples=[None]
    )
    max: list[float | None] | None = Field(
        default=None, description="of a bucket: the greatest", examples=[None]
    )


class Metrics(BaseModel):
    """A run's training metrics, without the loss."""

    model_config = ConfigDict(populate_by_name=True)

    from_: int | None = Field(alias="from", examples=[0])
    to: int | None = Field(examples=[279])
    bucket: int = Field(description="steps that a point stands for", examples=[1])
    metrics: dict[str, MetricColumns] = Field(description="by name; empty: it has none")


class Met(BaseModel):
    """First evaluation that met a target."""

    step: int = Field(description="the last one before", examples=[279])
    epoch: int = Field(description="of that step", examples=[19])
    trained: int = Field(description="samples by then", examples=[17_180])
    at: float = Field(description="Unix time", examples=[1767225704.0])
    after_s: float | None = Field(
        description="time to target: since the run began; null: that is not known",
        examples=[100.5],
    )
    value: float = Field(examples=[0.91])


class Target(BaseModel):
    """Target that an operator has set for a run."""

    metric: str = Field(examples=["accuracy"])
    value: float = Field(examples=[0.9])
    direction: Direction = Field(examples=[">="])
    source: Source = Field(
        description="what decides: evaluations, or means of the training loss over 100 steps"
    )
    met: Met | None = Field(description="null: not yet")
    best: float | None = Field(description="so far; null: there is no value", examples=[0.91])
    best_step: int | None = Field(description="the last one before it", examples=[279])


class BestValue(BaseModel):
    """Best, least or greatest value of a metric over the evaluations, and its first occurrence."""

    metric: str = Field(examples=["accuracy"])
    figure: Literal["best", "least", "greatest"] = Field(
        description="the best where the run's target says which values are better, and of `loss`"
    )
    value: float = Field(examples=[0.91])
    step: int = Field(description="the last one before it; -1: none", examples=[279])
    epoch: int = Field(description="of that step", examples=[19])
    trained: int = Field(description="samples by then", examples=[17_180])
    at: float = Field(description="Unix time", examples=[1767225704.0])
    after_s: float | None = Field(
        description="since the run began; null: that is not known", examples=[100.5]
    )


class Quality(BaseModel):
    """Metrics that a run's model has reached, and when."""

    queued_s: float | None = Field(description="as of the run", examples=[3.5])
    jct_s: float | None = Field(description="as of the run", examples=[100.5])
    eta_at: float | None = Field(description="as of the run", examples=[None])
    target: Target | None = Field(description="null: nobody has set one")
    best: list[BestValue] = Field(description="of each metric of the evaluations")
    evaluations: list[EvaluationInfo] = Field(description="oldest first; the newest 1,000")
