"""Runs that are planned, stored and planned again in one thread; what happens is drawn.

The leader, the controllers, the store and the replay are the product's own. The bus, the clock and
the ranks are made up: so a run takes a fraction of a second, and the same seed gives the same run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from paceline.planning import planner as planners
from paceline.train.plan import leader as leaders
from paceline.wire import Adopted, Hello, Message, Plan, RunChanged, StepBatch, decode, encode
from paceline_backend.control.controller import Controller
from paceline_backend.insight.replay import ReplayReport, replay
from paceline_backend.store import Store, new_runs, runs, switches, telemetry
from paceline_backend.store.new_runs import NewRun
from support.drawn_parts import Bus, Clock, Data, Kind, Start, introduction, leading, measured

_MOST_EVENTS = 4_000  # of an attempt; it ends long before
_MOST_ATTEMPTS = 4


@dataclass(frozen=True)
class Chances:
    """What may happen, each with its probability whenever something happens."""

    switch: float = 0.0  # to one of `policies`
    takeover: float = 0.0  # another controller goes on
    away: float = 0.0  # no controller plans for a while
    hurry: float = 0.05  # the leader goes on without a plan
    late: float = 0.0  # what the leader reported arrives after much that it reports later
    fails: float = 0.0  # of plans: the policy raises an error
    restart: float = 0.0  # the ranks start anew, from some step on,
    lost: float = 0.0  # of restarts: without the last rank
    recompiles: float = 0.02  # of a rank's step
    noise: float = 0.1  # standard deviation of the logarithm of a rank's times
    policies: tuple[tuple[str, Mapping[str, Any]], ...] = ()


class DrawnRun:
    def __init__(self, store: Store, kind: Kind, chances: Chances, seed: int) -> None:
        self.store, self.kind, self.chances, self.seed = store, kind, chances, seed
        self.rng = np.random.default_rng(seed)
        self.clock, self.data = Clock(), Data.drawn(kind, self.rng)
        self.segments: list[list[Plan]] = []  # of each attempt, as adopted
        self.reports: list[ReplayReport] = []  # of each attempt
        new = NewRun("drawn", "train.py", kind.world, kind.policy, kind.parameters, max_restarts=9)
        with store.write() as connection:
            self.id = str(new_runs.create(connection, new, by="test"))
            self.key = runs.key_of(connection, self.id)

    def train(self) -> None:
        """Trains all epochs, in as many attempts as are drawn, and replays each attempt."""
        start: Start | None = Start()
        with mock.patch.object(leaders, "time", self.clock.module()):
            while start is not None:
                start = _Attempt(self, len(self.segments), start).train()
                self.reports.append(replay(self.store, self.id))

    def happens(self, chance: float) -> bool:
        return bool(self.rng.random() < chance)


class _Attempt:
    def __init__(self, run: DrawnRun, attempt: int, start: Start) -> None:
        self._run, self._number, self._start = run, attempt, start
        self._epoch = start.epoch
        self._bus = Bus(attempt)
        self._hello = introduction(run.kind, run.data, attempt, start, run.seed % 1_000)
        # What was reported and is not stored: of each rank in order, as ranks have a thread each.
        self._queues: list[deque[Message]] = [deque() for _ in range(self._hello.world)]
        self._queues[0].append(self._hello)
        self._late: tuple[int, list[Message]] = (0, [])  # events to come, and what is stored then
        self._live: deque[Message] = deque()  # what is stored, and no controller has heard
        self._paused = 0  # events for which no controller plans
        self._segments: list[Plan] = []
        run.segments.append(self._segments)
        self._leader = leading(
            run.kind, self._hello, start, self._bus, run.rng, announce=self._announced
        )
        self._controller = self._taking_over()

    def train(self) -> Start | None:
        """Trains until the end (then None), or until the ranks start anew."""
        run, chances = self._run, self._run.chances
        for _ in range(_MOST_EVENTS):
            if self._epoch >= run.kind.epochs:
                self._flush()
                return None
            if self._number + 1 < _MOST_ATTEMPTS and run.happens(chances.restart):
                self._flush()
                return self._restarted()
            if chances.policies and run.happens(chances.switch):
                self._switch()
            if run.happens(chances.away):
                self._paused = int(run.rng.integers(4, 30))
            if run.happens(chances.takeover):
                self._controller = self._taking_over()
            self._hold_back()
            [self._ingest, self._control, self._lead][int(run.rng.integers(3))]()
        raise AssertionError("it does not end")

    def _taking_over(self) -> Controller:
        lease: Any = SimpleNamespace(held=lambda: True, owner="drawn")
        run = self._run
        controller = Controller(run.store, "redis://nowhere", run.key, run.id, lease)
        self._load(controller)
        return controller

    def _load(self, controller: Controller) -> None:
        """The controller begins with what the database has; it hears some of that once more."""
        controller._load()
        for _ in range(len(self._live) - int(self._run.rng.integers(0, 3))):
            self._live.popleft()

    def _switch(self) -> None:
        run = self._run
        policies = run.chances.policies
        name, parameters = policies[int(run.rng.integers(len(policies)))]
        with run.store.write() as connection:
            switches.add(connection, run.id, name, parameters, "test")
        self._live.append(RunChanged())

    def _ingest(self) -> None:
        """Stores some of what was reported."""
        batch = []
        for queue in self._queues:
            for _ in range(min(len(queue), int(self._run.rng.integers(0, 4)))):
                batch.append(queue.popleft())
        self._write(batch)

    def _write(self, batch: list[Message]) -> None:
        run = self._run
        if batch:
            telemetry.write(run.store, [(run.id, message) for message in batch])
            self._live += [
                RunChanged() if isinstance(message, Hello) else decode(encode(message, run.id))[1]
                for message in batch
            ]

    def _hold_back(self) -> None:
        """What the leader has reported waits, while it reports more."""
        run, (events, held) = self._run, self._late
        if events:
            self._late = (events - 1, held)
        elif held:
            self._late = (0, [])
            self._write(held)
        elif self._segments and run.happens(run.chances.late):
            self._late = (int(run.rng.integers(5, 60)), list(self._queues[0]))
            self._queues[0].clear()

    def _flush(self) -> None:
        waiting = [message for queue in self._queues for message in queue]
        self._write([*self._late[1], *waiting])

    def _control(self) -> None:
        """The controller hears some of what is stored, and plans."""
        if self._paused:
            self._paused -= 1
            return
        run, bus = self._run, self._bus
        for _ in range(min(len(self._live), int(run.rng.integers(0, 8)))):
            try:
                self._controller._hear(self._live.popleft())
            except planners.GapError:
                self._load(self._controller)
                break
        # What real plans take depends on the machine.
        if (planner := self._controller._planner) is not None:
            planner._plan_s, planner._planned_at = (0.0, 0.0), -1e9
        failing = mock.patch.object(planners, "offer", side_effect=RuntimeError("a bad policy"))
        with failing if run.happens(run.chances.fails) else nullcontext():
            self._controller._offer(bus)  # type: ignore[arg-type]

    def _lead(self) -> None:
        run = self._run
        if self._leader.seq in self._bus.proposals or run.happens(run.chances.hurry):
            self._leader.advance(self._epoch)
            self._report(self._segments[-1])
            self._epoch += self._segments[-1].epoch_end

    def _announced(self, adopted: Adopted) -> None:
        self._segments.append(adopted.plan)
        self._queues[0].append(adopted)

    def _report(self, plan: Plan) -> None:
        """What ranks measure of a segment; where they share batches, others may train them."""
        run, rng, shards = self._run, self._run.rng, self._hello.shards
        sizes = self._leader._sizes
        slowness = run.data.slowness[min(plan.epoch, run.kind.epochs - 1)]
        for step, parts in enumerate(plan.assignment.parts, plan.first_step):
            if shards is not None:
                for node, part in zip(shards.nodes, parts, strict=True):
                    run.data.held[part] = node
            if plan.pooled and run.happens(0.3):
                parts = [np.concatenate(parts[:2]), np.empty(0, np.int64), *parts[2:]]
            for rank, part in enumerate(parts):
                noise = float(np.exp(run.chances.noise * rng.normal()))
                compute_s = (float(slowness[rank] * sizes[part].sum()) + 1e-3) * noise
                recompiles = run.happens(run.chances.recompiles)
                made = measured(
                    *(plan, step, rank, sizes[part]),
                    *(self._number, compute_s, rng, recompiles),
                )
                self._queues[rank].append(StepBatch([made]))
            run.clock.step()

    def _restarted(self) -> Start:
        """Where the next attempt begins: at a checkpoint of this one."""
        run, start = self._run, self._start
        epoch, used, step, none = start.epoch, start.used, start.step, np.empty(0, np.int64)
        for plan in self._segments[: int(run.rng.integers(0, len(self._segments) + 1))]:
            step = plan.first_step + plan.steps
            used = np.union1d(used, np.frombuffer(plan.indices, "<u4").astype(np.int64))
            if plan.epoch_end or run.kind.stream:
                used = none
            epoch += plan.epoch_end
        fewer = self._hello.world > 2 and run.happens(run.chances.lost)
        return Start(epoch, step, used, start.lost + fewer)
