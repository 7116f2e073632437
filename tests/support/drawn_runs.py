"""Runs that are planned, stored and planned again in one thread; chance decides who hears what when.

The leader, the controllers, the store and the replay are the product's own. The bus, the clock and
the ranks are made up: so a run takes a fraction of a second, and the same seed gives the same run.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
from torch.distributed import HashStore  # type: ignore[attr-defined]

from paceline.core.amounts.shapes import Shapes
from paceline.core.terms import Terms
from paceline.data.stream import Stream
from paceline.train.plan import leader as leaders
from paceline.train.plan.leader import Leader
from paceline.train.streams import news
from paceline.train.streams.gathering import Gathering
from paceline.wire import (
    Adopted,
    Hello,
    Message,
    Proposal,
    Segment,
    Shards,
    StepBatch,
    StepRecord,
    SwitchRequested,
    decode,
    encode,
)
from paceline_backend.control import controller as controllers
from paceline_backend.control.controller import Controller
from paceline_backend.insight.replay import ReplayReport, replay
from paceline_backend.store import Store, new_runs, runs, switches, telemetry
from paceline_backend.store.new_runs import NewRun
from support.records import hello

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MOST_EVENTS = 4_000  # of an attempt; it ends long before


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
    nodes: tuple[int, ...] = ()  # of each rank, where data lives on nodes
    spare: float = 2.0  # a node keeps so many times its equal share of the data
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
class Chances:
    """What may happen, each with its probability whenever something happens."""

    switch: float = 0.02  # to one of `policies`
    takeover: float = 0.02  # another controller goes on
    away: float = 0.02  # no controller plans for a while
    restart: float = 0.0  # the ranks start anew, from some step on
    lost: float = 0.0  # of restarts: without the last rank
    noise: float = 0.1  # relative standard deviation of a rank's times
    recompiles: float = 0.02  # of a rank's step
    hurry: float = 0.5  # the leader goes on without waiting for a plan
    policies: tuple[tuple[str, Mapping[str, Any]], ...] = ()


class _Bus:
    """Takes what controllers publish; hands proposals to the leader at once."""

    def __init__(self) -> None:
        self.proposals: dict[int, Proposal] = {}
        self.attempt, self.heard = 0, 0
        self.newest: Proposal | None = None
        self.stop_reason: str | None = None

    def xadd(self, _stream: str, fields: dict[Any, Any], **_: Any) -> bytes:
        message = decode(fields)[1]
        if isinstance(message, Proposal) and message.attempt == self.attempt:
            self.proposals[message.segment.seq] = self.newest = message
            self.heard += 1
        return b"1-0"

    def take(self, seq: int, _wait_s: float) -> Proposal | None:
        proposal = self.proposals.get(seq)
        self.proposals = {key: each for key, each in self.proposals.items() if key > seq}
        return proposal


class _Clock:
    """Time passes when ranks train."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def module(self) -> Any:
        def sleep(seconds: float) -> None:
            self.now += seconds

        def now() -> float:
            return self.now

        return SimpleNamespace(monotonic=now, perf_counter=now, time=now, sleep=sleep)


class DrawnRun:
    """One run, with all its attempts.

    Args:
        store: where it is recorded.
        kind: of run.
        chances: of what happens.
        seed: of everything that is drawn.
    """

    def __init__(self, store: Store, kind: Kind, chances: Chances, seed: int) -> None:
        self.store, self.kind, self.chances = store, kind, chances
        self.rng = np.random.default_rng(seed)
        self.seed = seed
        self.segments: list[list[Segment]] = []  # of each attempt, as adopted
        self.reports: list[ReplayReport] = []  # of each attempt
        new = NewRun("drawn", "train.py", kind.world, kind.policy, kind.parameters, max_restarts=9)
        with store.write() as connection:
            self.id = str(new_runs.create(connection, new, by="test"))
            self.key = runs.key_of(connection, self.id)
        self._clock = _Clock()
        sizes = 0 if kind.stream else kind.samples
        self._sizes: Floats = self.rng.lognormal(2.0, 0.6, sizes)
        self._lengths: Ints = self.rng.integers(100, 1_000, sizes)
        self._held: Ints = np.full(sizes, -1)
        self._slowness = [self.rng.uniform(1, 3, kind.world) * 1e-3 for _ in range(kind.epochs)]
        self._paused = 0  # events for which no controller plans

    def train(self) -> None:
        """Trains all epochs, in as many attempts as are drawn; replays each attempt."""
        start = _Start()
        with mock.patch.object(leaders, "time", self._clock.module()):
            for attempt in range(6):
                going_on = _Attempt(self, attempt, start).train()
                self.reports.append(replay(self.store, self.id))
                if going_on is None:
                    return
                start = going_on

    def happens(self, chance: float) -> bool:
        """Draws."""
        return bool(self.rng.random() < chance)


@dataclass
class _Start:
    """Where an attempt begins."""

    epoch: int = 0
    step: int = 0
    used: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    lost: int = 0  # ranks that are gone


class _Attempt:
    def __init__(self, run: DrawnRun, attempt: int, start: _Start) -> None:
        self._run, self._number, self._start = run, attempt, start
        kind = run.kind
        self._world = kind.world - start.lost
        self._epoch = start.epoch
        self._bus = _Bus()
        self._bus.attempt = attempt
        self._hello = self._introduction()
        self._queues: list[deque[Message]] = [deque() for _ in range(self._world)]
        self._queues[0].append(self._hello)
        self._live: deque[Message] = deque()  # that are stored, and no controller has heard of
        self._segments: list[Segment] = []
        run.segments.append(self._segments)
        self._leader = self._leading()
        self._controller = self._controlling()

    def _introduction(self) -> Hello:
        run, kind, start, world = self._run, self._run.kind, self._start, self._world
        shards = None
        if kind.nodes:
            nodes = kind.nodes[:world]
            count = max(nodes) + 1
            limit = max(1, int(kind.spare * run._lengths.sum() / count))
            held = np.where(run._held < count, run._held, -1)
            shards = Shards(
                list(nodes),
                [limit] * count,
                run._lengths.astype("<u4").tobytes(),
                np.where(held < 0, 2**16 - 1, held).astype("<u2").tobytes(),
            )
        profiles: list[list[tuple[int, float]]] = []
        if kind.profiled:
            profiles = [[(n, 0.01 * (rank + 1) * n) for n in (2, 4, 8)] for rank in range(world)]
        return hello(
            world,
            self._number,
            global_batch=kind.batch,
            seed=run.seed % 1_000,
            sizes=run._sizes.astype("<f8").tobytes(),
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
            profiles=profiles,
            shards=shards,
            stream=kind.stream,
        )

    def _leading(self) -> Leader:
        run, kind, start = self._run, self._run.kind, self._start
        terms = Terms(
            samples=len(run._sizes),
            global_batch=kind.batch,
            seed=run.seed % 1_000,
            drop_last=kind.drop_last,
            loss_mean="samples",
            coast_steps=2,
            shapes=kind.shapes,
            token_budget=kind.token_budget,
        )
        store, gathering = HashStore(), None
        if kind.stream:
            source: Any = range(kind.samples)
            of = Stream(source, size=float, split="ranks", buffer=8 * kind.batch)
            gathering = Gathering(of, terms, self._world, store, None)
            for epoch in range(kind.epochs):
                for rank in range(self._world):
                    sizes = run.rng.lognormal(2.0, 0.6, kind.samples // self._world).tolist()
                    word = news.News(sizes, ended=True)
                    store.set(news.news_key(epoch, rank, 0), news.encode(word))
        return Leader(
            terms,
            self._world,
            run._sizes,
            store,
            self._bus,  # type: ignore[arg-type]
            attempt=self._number,
            announce=self._announced,
            epoch=start.epoch,
            step=start.step,
            used=start.used,
            limits=kind.limits[: self._world],
            micro=kind.micro[: self._world],
            token_limits=kind.token_limits[: self._world],
            uneven=lambda: kind.uneven_steps,
            shards=self._hello.shards,
            stream=gathering,
        )

    def _controlling(self) -> Controller:
        """A controller that takes over: from what the database has."""
        run = self._run
        lease: Any = SimpleNamespace(held=lambda: True, owner="drawn")
        made = Controller(run.store, "redis://nowhere", run.key, run.id, lease)
        made._load()
        self._live.clear()
        return made

    def train(self) -> _Start | None:
        """Trains until the end (then None), or until the ranks start anew."""
        run, chances = self._run, self._run.chances
        for _ in range(_MOST_EVENTS):
            if self._epoch >= run.kind.epochs:
                self._flush()
                return None
            if self._segments and run.happens(chances.restart):
                self._flush()
                return self._restarted()
            if run.happens(chances.switch) and chances.policies:
                self._switch()
            if run.happens(chances.away):
                run._paused = int(run.rng.integers(4, 30))
            if run.happens(chances.takeover):
                self._controller = self._controlling()
            [self._ingest, self._control, self._lead][int(run.rng.integers(3))]()
        raise AssertionError("it does not end")

    def _switch(self) -> None:
        run = self._run
        policies = run.chances.policies
        name, parameters = policies[int(run.rng.integers(len(policies)))]
        with run.store.write() as connection:
            row = switches.add(connection, run.id, name, parameters, "test")
        self._live.append(SwitchRequested(row["version"], name, time.time()))

    def _ingest(self) -> None:
        """Stores some of what was reported, of each rank in its order; a controller may hear it."""
        batch = []
        for queue in self._queues:
            for _ in range(min(len(queue), int(self._run.rng.integers(0, 4)))):
                batch.append(queue.popleft())
        self._write(batch)

    def _write(self, batch: list[Message]) -> None:
        if batch:
            telemetry.write(self._run.store, [(self._run.id, each) for each in batch])
            # As over the bus.
            self._live += [decode(encode(each, self._run.id))[1] for each in batch]

    def _flush(self) -> None:
        self._write([message for queue in self._queues for message in queue])
        for queue in self._queues:
            queue.clear()

    def _control(self) -> None:
        """The controller hears some of what is stored, and plans."""
        if self._run._paused:
            self._run._paused -= 1
            return
        for _ in range(min(len(self._live), int(self._run.rng.integers(0, 8)))):
            try:
                self._controller._hear(self._live.popleft())
            except controllers._GapError:
                self._controller._load()
                self._live.clear()
        self._controller._plan_s = (0.0, 0.0)
        bus: Any = self._bus
        self._controller._offer(bus)
        self._controller._offered_at = -1e9  # it may plan again as soon as it hears of a step

    def _lead(self) -> None:
        if self._leader.seq not in self._bus.proposals and not self._run.happens(
            self._run.chances.hurry / 10
        ):
            return
        self._leader.advance(self._epoch)
        segment = self._segments[-1]
        self._report(segment)
        if segment.epoch_end:
            self._epoch += 1

    def _announced(self, adopted: Adopted) -> None:
        self._segments.append(adopted.segment)
        self._queues[0].append(adopted)

    def _report(self, segment: Segment) -> None:
        """What ranks measure of a segment; where they share batches, others may train them."""
        run, rng = self._run, self._run.rng
        sizes = run._sizes if not run.kind.stream else self._leader._sizes
        slowness = run._slowness[min(segment.epoch, run.kind.epochs - 1)]
        records: list[list[StepRecord]] = [[] for _ in range(self._world)]
        for k, parts in enumerate(segment.assignments()):
            step = segment.first_step + k
            if run.kind.nodes and self._hello.shards is not None:
                for rank, part in enumerate(parts):
                    run._held[part] = self._hello.shards.nodes[rank]
            if segment.pooled and run.happens(0.3):
                parts = [np.concatenate(parts[:2]), np.empty(0, np.int64), *parts[2:]]
            for rank, part in enumerate(parts):
                of = sizes[part]
                noise = float(np.exp(run.chances.noise * rng.normal()))
                compute_s = (float(slowness[rank] * of.sum()) + 1e-3) * noise
                records[rank].append(
                    StepRecord(
                        attempt=self._number,
                        rank=rank,
                        seq=step,
                        step=step,
                        epoch=segment.epoch,
                        segment=segment.seq,
                        samples=len(part),
                        load=float(of.sum()),
                        data_s=0.0,
                        compute_s=compute_s if len(part) else 0.0,
                        sync_s=float(rng.uniform(0, 0.1)),
                        step_s=float(rng.uniform(0.1, 0.5)),
                        ended_at=self._run._clock.now,
                        squares=float((of**2).sum()),
                        longest=float(of.max(initial=0.0)),
                        recompiles=int(run.happens(run.chances.recompiles)),
                    )
                )
            run._clock.now += 0.3
        for rank, of_rank in enumerate(records):
            for record in of_rank:
                self._queues[rank].append(StepBatch([record]))

    def _restarted(self) -> _Start:
        """Where the next attempt begins: at the newest checkpoint."""
        run = self._run
        segments = [s for s in self._segments if s.first_step >= self._start.step]
        at = int(run.rng.integers(0, len(segments) + 1))  # after so many segments
        done = segments[:at]
        epoch, used, step = self._start.epoch, self._start.used, self._start.step
        for segment in done:
            if segment.epoch != epoch:
                epoch, used = segment.epoch, np.empty(0, np.int64)
            step = segment.first_step + segment.steps
            used = np.union1d(used, np.frombuffer(segment.indices, "<u4").astype(np.int64))
            if segment.epoch_end or run.kind.stream:
                used = np.empty(0, np.int64)
            epoch += segment.epoch_end
        lost = self._start.lost
        if self._world > 2 and run.happens(run.chances.lost):
            lost += 1
        return _Start(epoch, step, used.astype(np.int64), lost)


@contextlib.contextmanager
def in_memory() -> Iterator[Store]:
    """A store that nobody shares."""
    with Store.open("sqlite://") as store:
        yield store
