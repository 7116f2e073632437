"""Bodies about a run's results, coverage, data and synchronisation."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from paceline_backend.api.models import RunCost
from paceline_backend.api.quality_models import Quality
from paceline_backend.insight.report import FluidLimit


class RoundInfo(BaseModel):
    """A round: one partial reduction of gradients, or one mean of replicas."""

    attempt: int = Field(examples=[0])
    rank: int = Field(description="rank that reported it", examples=[0])
    seq: int = Field(
        description="number of the round among those that this rank reported", examples=[118]
    )
    segment: int = Field(examples=[5])
    number: int = Field(description="number of the round in its segment", examples=[22])
    step: int = Field(description="step in which the rank was", examples=[84])
    world: int = Field(description="number of ranks that took part", examples=[4])
    contributors: int = Field(description="number of these ranks that contributed", examples=[3])
    staleness: list[int] = Field(
        description="number of contributed gradients by age in rounds; the last: or older",
        examples=[[2, 1, 0, 0]],
    )
    dropped: int = Field(description="samples whose gradients were too old", examples=[0])
    waited_s: float = Field(
        description="response time: from the previous round until this one was called; for a mean "
        "of two ranks: until the other rank had the request; for a mean of all: 0",
        examples=[0.012],
    )
    reduced_s: float = Field(
        description="from then until the result was available", examples=[0.003]
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
        description="number of gradients by age in rounds; the last: or older",
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
        examples=["all-reduce: fewer than 16 of its steps have been measured"],
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


class PresetReport(BaseModel):
    """Results under a preset, without its first steps; null: no step remains."""

    steps: int = Field(examples=[100])
    step_time_s: float | None = Field(description="mean", examples=[0.26])
    se: float | None = Field(examples=[0.05])
    step_dif: float | None = Field(examples=[900.0])
    waste: float | None = Field(examples=[0.02])
    ett_mape: float | None = Field(examples=[0.02])
    time_over_fluid: float | None = Field(
        description="measured time ÷ fluid limit; 1 is perfect", examples=[1.04]
    )
    speedup: float | None = Field(
        description="speed-up over bsp, per unit of load; null: no steps under bsp", examples=[2.1]
    )
    speedup_limit: float | None = Field(description="speed-up at the fluid limit", examples=[2.2])
    moved: int = Field(
        description="total number of samples that moved to another rank", examples=[512]
    )
    across: int = Field(
        description="of these, samples whose new rank is on another node", examples=[128]
    )


class Report(BaseModel):
    """The run's presets side by side."""

    presets: dict[str, PresetReport]
    warmup: int = Field(description="steps left out after each policy's start", examples=[20])
    coasted: int = Field(
        description="steps left out because no controller planned them", examples=[0]
    )
    overhead_s: float | None = Field(
        description="per step: Σ(b_j/a_j) / Σ(1/a_j) + communication", examples=[0.008]
    )
    fluid: FluidLimit | None
    coverage: Coverage
    synchronisation: list[InForce] = Field(description="for relaxed synchronisers; otherwise empty")
    chosen: list[Chosen] = Field(
        description="for policies that choose synchronisers; otherwise empty"
    )
    fallbacks: list[Fallbacks] = Field(
        description="segments whose figures are those of an all-reduce; otherwise empty"
    )
    quality: Quality
    cost: RunCost | None = Field(description="null: as in `GET /runs/{id}`")
