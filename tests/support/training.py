"""A training with made-up numbers that takes the real way: store, then the stream of changes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.wire import (
    ALLREDUCE,
    CHANGES,
    Message,
    MetricBatch,
    RankDevice,
    RoundBatch,
    RunState,
    State,
    StepBatch,
)
from paceline.wire.bus import connect
from paceline.wire.synchronisation import Synchronisation, convert
from paceline_backend.store import Store, switches, telemetry
from support.records import a_round, add_run, adopted, hello, record

SEGMENT = 2  # steps
ROUNDS = 2  # to a step, under a relaxed synchroniser
PARTIAL = convert("partial", {"probes": 2, "staleness": 4, "mean": True})


class Training:
    """One run: reports steps as its ranks would, committed and then announced as ingest does.

    Args:
        bus_url: where open pages hear of it.
        slowness: time per size unit of each rank's device, relative.
        emulated: the run says that device speeds are emulated.
        devices: of the ranks; empty: they do not tell.
    """

    def __init__(
        self,
        store: Store,
        bus_url: str,
        run: str,
        slowness: Sequence[float] = (1.0, 1.0, 1.5, 3.0),
        *,
        name: str | None = None,
        emulated: bool = True,
        backend: str = "local",
        devices: Sequence[RankDevice] = (),
    ) -> None:
        self.store, self.bus_url, self.run = store, bus_url, run
        self.slowness = np.array(slowness, float)
        self.rng = np.random.default_rng(len(run))
        self.step = 0
        self.version = 0
        self.policy = "bsp"
        self.synchroniser = ALLREDUCE
        self.why = ""  # this synchroniser
        self.rounds = 0
        world = len(self.slowness)
        began = time.time() - 600
        columns = {"created_at": began, "node": "node-1", "backend": backend}
        add_run(store, run, nproc=world, name=name or run, **columns)
        emulation = {"a_s": (self.slowness * 1e-5).tolist(), "b_s": [0.003] * world}
        self.report(
            RunState(State.RUNNING, began, "node-1"),
            hello(
                world,
                global_batch=16 * world,
                sizes=self.rng.lognormal(5, 0.6, 1000).tobytes(),
                epochs=40,
                started_at=began,
                emulated=emulation if emulated else None,
                devices=list(devices),
            ),
        )

    def report(self, *messages: Message) -> None:
        written = telemetry.write(self.store, [(self.run, message) for message in messages])
        if not all(isinstance(message, MetricBatch | RoundBatch) for message in messages):
            self.announce(written.steps.get(self.run))

    def announce(self, step: int | None = None) -> None:
        """Tells open pages alone; `step`: the earliest new one."""
        with connect(self.bus_url) as client:
            client.xadd(CHANGES, {self.run: "" if step is None else step})

    def train(self, steps: int, *, source: str = "controller", lost: Sequence[int] = ()) -> None:
        """Reports further steps.

        Args:
            steps: how many, from the run's next one on.
        """
        end = self.step + steps
        messages: list[Message] = []
        while self.step < end:
            size = min(SEGMENT, end - self.step)
            messages.append(
                adopted(
                    self.step // SEGMENT,
                    self.step,
                    self.version,
                    policy=self.policy,
                    source=source,
                    epoch=self.step // 40,
                    counts=[[16] * len(self.slowness)] * size,
                    synchroniser=self.synchroniser,
                    why=self.why,
                    at=time.time(),
                )
            )
            for step in range(self.step, self.step + size):
                if step not in lost:
                    messages.append(self._batch(step))
                if self.synchroniser != ALLREDUCE:
                    messages.append(self._rounds(step))
            self.step += size
        self.report(*messages)

    def switch(self, policy: str, synchroniser: Synchronisation = ALLREDUCE) -> None:
        """Requests a policy as the API does; the steps from now on follow it."""
        self.synchroniser = synchroniser
        with self.store.write() as connection:
            made = switches.add(connection, self.run, policy, {}, "test")
        self.announce()
        self.adopt(made["version"], policy)

    def adopt(self, version: int, policy: str) -> None:
        """The steps from now on follow a policy that was requested."""
        self.version, self.policy = version, policy

    def end(self, state: str = "finished", **fields: Any) -> None:
        self.report(RunState(State(state), time.time(), "node-1", **fields))

    def _rounds(self, step: int) -> RoundBatch:
        """Rounds of a step: of two ranks, then of all; every tenth step loses 8 samples."""
        world = len(self.slowness)
        made = []
        for number in range(ROUNDS):
            contributors = (2, world)[number % 2]
            made.append(
                a_round(
                    self.rounds,
                    segment=step // SEGMENT,
                    number=step % SEGMENT * ROUNDS + number,
                    step=step,
                    world=world,
                    contributors=contributors,
                    staleness=[contributors - 1, 1, 0],
                    dropped=0 if step % 10 or number else 8,
                    waited_s=0.01 * (1 + number),
                    reduced_s=0.002,
                    copied_s=0.001 * (1 + number),
                    bytes=50_000,
                    ended_at=time.time() + 0.05 * self.rounds,
                )
            )
            self.rounds += 1
        return RoundBatch(made)

    def _batch(self, step: int) -> StepBatch:
        world = len(self.slowness)
        share = np.full(world, 1 / world)
        if self.policy != "bsp":
            share = (1 / self.slowness) / (1 / self.slowness).sum()
        share = share * self.rng.normal(1, 0.04, world)
        share /= share.sum()
        load = share * 16 * world * 170
        compute = load * 1e-5 * self.slowness + 0.003
        compute = compute * self.rng.normal(1, 0.02, world)
        ended = time.time()
        return StepBatch(
            [
                record(
                    step,
                    rank,
                    epoch=step // 40,
                    segment=step // SEGMENT,
                    samples=round(16 * world * share[rank]),
                    load=float(load[rank]),
                    compute_s=float(compute[rank]),
                    sync_s=float(compute.max() - compute[rank]) + 0.002,
                    step_s=float(compute.max()) + 0.004,
                    ended_at=ended,
                    ett_s=float(load[rank] * 1e-5 * self.slowness[rank]) if step > 8 else None,
                    loss=2.4 * float(np.exp(-step / 150)) + 0.2 + self.rng.normal(0, 0.02),
                )
                for rank in range(world)
            ]
        )
