"""What runs of `drawn_runs` are made of: their kinds, a bus and a clock, and what ranks report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.distributed import HashStore  # type: ignore[attr-defined]

from paceline.core.batch_limits.shapes import Shapes
from paceline.core.terms import Terms
from paceline.data.stream import Stream
from paceline.train.checkpoint.position import Position
from paceline.train.environment import Environment
from paceline.train.plan.leader import Leader
from paceline.train.streams import news
from paceline.wire import Hello, Plan, Proposal, StepRecord, decode
from support.contexts import met, run_context
from support.records import hello, record
from support.sharded import shards

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_LARGEST = 25.0  # size of a sample: a token budget holds at least one
_STEP_S = 0.3


@dataclass(frozen=True)
class Kind:
    """What kind of run it is; see the fields of `Hello`."""

    policy: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    samples: int = 60
    batch: int = 8
    world: int = 3
    epochs: int = 3
    drop_last: bool = False
    nodes: tuple[int, ...] = ()  # of each rank, where data lives on nodes,
    spare: float = 2.0  # which keep so many times their equal share of it
    placement: tuple[str, ...] = ()
    limits: tuple[int, ...] = ()
    micro: tuple[float, ...] = ()
    token_budget: float | None = None
    token_limits: tuple[float, ...] = ()
    shapes: Shapes = field(default_factory=Shapes)
    uneven_steps: bool = False
    profiled: bool = False
    stream: bool = False


@dataclass(frozen=True)
class Start:
    epoch: int = 0
    step: int = 0
    used: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    lost: int = 0  # ranks that are gone: the last ones


@dataclass
class Data:
    """The samples of a run, how slow its ranks are, and which node has which sample."""

    sizes: Floats  # [N] λ; empty: a stream
    lengths: Ints  # [N] bytes
    held: Ints  # [N] node; -1: none
    slowness: Floats  # [epochs, W] s per size unit

    @staticmethod
    def drawn(kind: Kind, rng: np.random.Generator) -> Data:
        count = 0 if kind.stream else kind.samples
        return Data(
            _sizes(rng, count),
            rng.integers(100, 1_000, count),
            np.full(count, -1),
            rng.uniform(1, 3, (kind.epochs, kind.world)) * 1e-3,
        )


def _sizes(rng: np.random.Generator, count: int) -> Floats:
    return np.minimum(rng.lognormal(2.0, 0.6, count), _LARGEST)


class Bus:
    """Takes what controllers publish, and is the leader's `Proposals`."""

    def __init__(self, attempt: int) -> None:
        self.proposals: dict[int, Proposal] = {}
        self.attempt, self.received = attempt, 0
        self.newest: Proposal | None = None
        self.stop_reason: str | None = None

    def xadd(self, _stream: str, fields: dict[Any, Any], **_: Any) -> bytes:
        message = decode(fields)[1]
        if isinstance(message, Proposal) and message.attempt == self.attempt:
            self.proposals[message.plan.seq] = self.newest = message
            self.received += 1
        return b"1-0"

    def take(self, seq: int, _wait_s: float) -> Proposal | None:
        proposal = self.proposals.get(seq)
        self.proposals = {key: each for key, each in self.proposals.items() if key > seq}
        return proposal


class Clock:
    """Time passes when ranks train. It stands in for the module `time`."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def module(self) -> Any:
        def now() -> float:
            return self.now

        def sleep(seconds: float) -> None:
            self.now += seconds

        return SimpleNamespace(monotonic=now, perf_counter=now, time=now, sleep=sleep)

    def step(self) -> None:
        self.now += _STEP_S


def introduction(kind: Kind, data: Data, attempt: int, start: Start, seed: int) -> Hello:
    """What the leader says of an attempt."""
    world, of_nodes = kind.world - start.lost, None
    if kind.nodes:
        nodes = kind.nodes[:world]
        count = max(nodes) + 1
        limit = max(1, int(kind.spare * data.lengths.sum() / count))
        held = np.where(data.held < count, data.held, -1)
        of_nodes = shards(nodes, [limit] * count, data.lengths, held)
    profiles = [[(n, 0.01 * (rank + 1) * n) for n in (2, 4, 8)] for rank in range(world)]
    return hello(
        world,
        attempt,
        global_batch=kind.batch,
        seed=seed,
        sizes=data.sizes.astype("<f8").tobytes(),
        drop_last=kind.drop_last,
        epochs=kind.epochs,
        epoch=start.epoch,
        step=start.step,
        used=start.used.astype("<u4").tobytes(),
        placement=list(kind.placement[:world]),
        limits=list(kind.limits[:world]),
        token_budget=kind.token_budget,
        token_limits=list(kind.token_limits[:world]),
        grid=kind.shapes.samples,
        length_grid=kind.shapes.length,
        uneven_steps=kind.uneven_steps,
        profiles=profiles if kind.profiled else [],
        shards=of_nodes,
        stream=kind.stream,
    )


def leading(
    kind: Kind, said: Hello, start: Start, bus: Bus, rng: np.random.Generator, announce: Any
) -> Leader:
    """The leader of an attempt. Of a stream, all ranks have read everything from the start."""
    terms = Terms(
        samples=said.samples or 0,
        global_batch=kind.batch,
        seed=said.seed,
        drop_last=kind.drop_last,
        loss_mean="samples",
        coast_steps=2,
        shapes=kind.shapes,
        token_budget=kind.token_budget,
    )
    store, reader = HashStore(), None
    if kind.stream:
        source: Any = range(kind.samples)
        stream = Stream(source, size=float, split="ranks", buffer=8 * kind.batch)
        reader = SimpleNamespace(stream=stream)
        for epoch in range(kind.epochs):
            for rank in range(said.world):
                read = news.News(_sizes(rng, kind.samples // said.world).tolist(), ended=True)
                word: Any = news.encode(read)
                store.set(news.news_key(epoch, rank, 0), word)
    # A `Limits` has either limits or cuts, and some kinds have both.
    limits = SimpleNamespace(
        of_parts=said.limits,
        of_micro_batches=kind.micro[: said.world],
        tokens_of_parts=said.token_limits,
        tokens_of_micro_batches=[],
    )
    context = run_context(
        terms,
        Environment(attempt=said.attempt),
        limits=limits,
        data=None if said.shards is None else SimpleNamespace(shards=said.shards),
        reader=reader,
    )
    proposals: Any = bus
    return Leader(
        context,
        met(said.world, said.sizes_array(), store),
        Position(start.epoch, start.step, start.used),
        proposals=proposals,
        announce=announce,
        uneven=lambda: kind.uneven_steps,
    )


def measured(
    plan: Plan,
    step: int,
    rank: int,
    sizes: Floats,
    attempt: int,
    compute_s: float,
    rng: np.random.Generator,
    recompiles: bool,
) -> StepRecord:
    """A rank's record of a step in which it had samples of these sizes."""
    return record(
        step,
        rank,
        attempt,
        epoch=plan.epoch,
        segment=plan.seq,
        samples=len(sizes),
        load=float(sizes.sum()),
        compute_s=compute_s if len(sizes) else 0.0,
        sync_s=float(rng.uniform(0, 0.1)),
        step_s=_STEP_S * float(rng.uniform(0.5, 1.5)),
        squares=float((sizes**2).sum()),
        longest=float(sizes.max(initial=0.0)),
        recompiles=int(recompiles),
    )
