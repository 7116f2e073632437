"""Bodies about a run's results, coverage, data and synchronisation."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from paceline_backend.api.models import RunCost
from paceline_backend.api.quality_models import Quality
from paceline_backend.insight.report import FluidLimit


class RoundInfo(BaseModel):
    """A round: one partial reduction of gradients, or one mean of replicas."""

    attempt: int = Field(examples=[0])
    rank: int = Field(description="that told of it", examples=[0])
    seq: int = Field(description="counts what this rank told", examples=[118])
    segment: int = Field(examples=[5])
    number: int = Field(description="of the round in its segment", examples=[22])
    step: int = Field(description="that the rank was in", examples=[84])
    world: int = Field(description="ranks that took part", examples=[4])
    contributors: int = Field(description="of them, that gave something", examples=[3])
    staleness: list[int] = Field(
        description="gradients that went in, by how many rounds old; the last: or older",
        examples=[[2, 1, 0, 0]],
    )
    dropped: int = Field(description="samples whose gradients were too old", examples=[0])
    waited_s: float = Field(
        description="response time: from the previous round until this one was called; "
        "of a mean of two: until the other rank had the question; of a mean of all: 0",
        examples=[0.012],
    )
    reduced_s: float = Field(description="from then until the result was there", examples=[0.003])
    bytes: int = Field(description="that the rank gave", examples=[65536])
    ended_at: float = Field(description="Unix time", examples=[1767225604.2])
    copied_s: float = Field(
        description="copying what the rank gave from its device to the CPU", examples=[0.001]
    )


class NodeEpoch(BaseModel):
    """Data traffic of a node in an epoch, where data lives on nodes; sums over the node's ranks."""

    attempt: int = Field(examples=[0])
    epoch: int = Field(examples=[3])
    node: str = Field(examples=["node-2"])
    planned_bytes: int = Field(
        description="that the plan moves to the node for this epoch, less what it still has",
        examples=[48_300_000],
    )
    moved_bytes: int = Field(description="of these, what was fetched ahead", examples=[48_300_000])
    moved: int = Field(description="samples that this was", examples=[412])
    moved_s: float = Field(
        description="from the plan until the last of them was there", examples=[3.9]
    )
    read_bytes: int = Field(
        description="that steps read from the source, as the node did not have them", examples=[0]
    )
    read: int = Field(description="samples that this was", examples=[0])
    waits: int = Field(
        description="times that a rank's step had to wait for such reads", examples=[0]
    )
    waited_s: float = Field(description="for how long, in all", examples=[0.0])
    held_bytes: int = Field(
        description="in the node's directory at the epoch's end", examples=[9_000_000_000]
    )
    at: float = Field(description="Unix time of the epoch's end", examples=[1767225604.2])


class InForce(BaseModel):
    """Sums and means over the rounds under one policy version."""

    model_config = ConfigDict(populate_by_name=True)

    version: int = Field(description="of the policy", examples=[1])
    policy: str = Field(examples=["rna"])
    synchroniser: str = Field(examples=["partial"])
    from_: int = Field(alias="from", description="step of the first round", examples=[64])
    to: int = Field(description="step of the last round", examples=[311])
    rounds: int = Field(examples=[1204])
    world: int = Field(description="ranks that took part", examples=[4])
    contributors: float = Field(description="mean of a round", examples=[3.1])
    staleness: list[int] = Field(
        description="gradients, by how many rounds old; the last: or older",
        examples=[[3000, 700, 32, 0]],
    )
    samples: int = Field(description="of the complete steps under it", examples=[15872])
    dropped: int = Field(description="samples whose gradients were not applied", examples=[48])
    dropped_share: float | None = Field(description="of `samples`", examples=[0.003])
    waited_s: float = Field(description="response time, median", examples=[0.012])
    waited_s_p95: float = Field(description="19 of 20 are at most this", examples=[0.041])
    reduced_s: float = Field(description="mean", examples=[0.003])
    copied_s: float = Field(description="mean", examples=[0.001])
    bytes: int = Field(description="given by the rank that told, in all", examples=[78905344])
    rounds_per_s: float | None = Field(examples=[61.5])
    gradients_per_s: float | None = Field(description="that were applied", examples=[190.6])
    words: str = Field(examples=["rna (partial), steps 64–311: 1,204 rounds of 3.1 of 4 ranks"])


class RoundsOverTime(BaseModel):
    """Rounds by the step in which they ended. Steps without rounds are left out."""

    bucket: int = Field(description="steps per point", examples=[1])
    step: list[int] = Field(description="of a bucket the first with a round", examples=[[64, 65]])
    rounds: list[int] = Field(examples=[[4, 5]])
    contributors: list[float] = Field(description="mean", examples=[[3.25, 3.0]])
    contributors_min: list[int] = Field(examples=[[2, 1]])
    contributors_max: list[int] = Field(examples=[[4, 4]])
    dropped: list[int] = Field(description="samples, in all", examples=[[0, 4]])
    waited_s: list[float] = Field(description="mean", examples=[[0.012, 0.014]])
    waited_s_max: list[float] = Field(examples=[[0.03, 0.041]])
    reduced_s: list[float] = Field(description="mean", examples=[[0.003, 0.003]])
    copied_s: list[float] = Field(description="mean", examples=[[0.001, 0.001]])
    bytes: list[int] = Field(description="in all", examples=[[262144, 327680]])


class Chosen(BaseModel):
    """A policy's choice of a synchroniser and its parameters, or a version's first choice."""

    attempt: int = Field(examples=[0])
    version: int = Field(description="of the policy", examples=[1])
    policy: str = Field(examples=["paceline-relaxed"])
    synchroniser: str = Field(examples=["pairwise"])
    from_: int = Field(alias="from", description="first step", examples=[128])
    why: str = Field(
        description="with the figures of then",
        examples=["all-reduce: fewer than 16 of its steps have been measured"],
    )

    before: str | None = Field(
        description="the version's synchroniser until then; null: this is its first",
        examples=["allreduce"],
    )

    model_config = ConfigDict(populate_by_name=True)


class Fallbacks(BaseModel):
    """Segments that were all-reduced in spite of their synchroniser, for one reason."""

    version: int = Field(examples=[1])
    policy: str = Field(examples=["rna"])
    synchroniser: str = Field(description="the policy's", examples=["partial"])
    from_: int = Field(alias="from", description="first step of the first", examples=[64])
    to: int = Field(description="last step of the last", examples=[127])
    segments: int = Field(description="how many", examples=[4])
    why: str = Field(examples=["the script steps its optimiser with a closure"])

    model_config = ConfigDict(populate_by_name=True)


class Synchronisation(BaseModel):
    """Gradient synchronisation under relaxed synchronisers."""

    model_config = ConfigDict(populate_by_name=True)

    from_: int | None = Field(
        alias="from", description="step of the first round in the range", examples=[64]
    )
    to: int | None = Field(description="step of the last one", examples=[311])
    newest: int | None = Field(
        description="step of the run's last round; null: it has none", examples=[311]
    )
    in_force: list[InForce]
    over_time: RoundsOverTime
    chosen: list[Chosen] = Field(
        description="by policies, in the range of steps: the newest 200; else empty"
    )
    fallbacks: list[Fallbacks] = Field(description="by policy version and reason; else empty")


class EpochCoverage(BaseModel):
    """Samples that an epoch used, counted from the records of ranks."""

    epoch: int = Field(examples=[0])
    samples: int = Field(description="in the data set", examples=[1074])
    used: int = Field(description="uses in all", examples=[1074])
    distinct: int = Field(description="samples used at least once", examples=[1074])
    missing: int = Field(description="samples not used", examples=[0])
    duplicated: int = Field(description="samples used more than once", examples=[0])
    complete: bool = Field(description="the epoch has ended", examples=[True])
    exact: bool = Field(
        description="each sample exactly once; of the last, unfinished epoch: none twice",
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
    dropped: int = Field(description="of all epochs", examples=[0])


class PresetReport(BaseModel):
    """Results under a preset, without its first steps; null: no step remains."""

    steps: int = Field(examples=[100])
    step_time_s: float | None = Field(description="mean", examples=[0.26])
    se: float | None = Field(examples=[0.05])
    step_dif: float | None = Field(examples=[900.0])
    waste: float | None = Field(examples=[0.02])
    ett_mape: float | None = Field(examples=[0.02])
    time_over_fluid: float | None = Field(description="1 is perfect", examples=[1.04])
    speedup: float | None = Field(
        description="over bsp, per unit of load; null without bsp steps", examples=[2.1]
    )
    speedup_limit: float | None = Field(description="what the fluid limit would be", examples=[2.2])
    moved: int = Field(description="samples that changed their holder, in all", examples=[512])
    across: int = Field(
        description="of these, samples whose new holder is on another node", examples=[128]
    )


class Report(BaseModel):
    """The run's presets side by side."""

    presets: dict[str, PresetReport]
    warmup: int = Field(description="steps left out after each policy's start", examples=[20])
    coasted: int = Field(description="steps left out: planned without a controller", examples=[0])
    overhead_s: float | None = Field(
        description="per step: Σ(b_j/a_j) / Σ(1/a_j) + communication", examples=[0.008]
    )
    fluid: FluidLimit | None
    coverage: Coverage
    synchronisation: list[InForce] = Field(description="relaxed ones; else empty")
    chosen: list[Chosen] = Field(description="of policies that choose synchronisers; else empty")
    fallbacks: list[Fallbacks] = Field(
        description="segments whose figures are those of an all-reduce; else empty"
    )
    quality: Quality
    cost: RunCost | None = Field(description="null: as of the run")
