"""A training without a model: real leader, bus, ingest and store; compute times are made up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa
from torch.distributed import HashStore  # type: ignore[attr-defined]

from paceline.core.terms import Terms
from paceline.train.checkpoint.position import Position
from paceline.train.environment import Environment
from paceline.train.plan.leader import Leader
from paceline.train.plan.proposals import ControlStream, Proposals
from paceline.wire import (
    TELEMETRY,
    Adopted,
    Hello,
    Plan,
    Proposal,
    RunChanged,
    StepBatch,
    StepRecord,
    control,
    decode,
    live,
    run_telemetry,
)
from paceline.wire.bus import connect, publish
from paceline_backend.control import ControllerManager
from paceline_backend.control.ingest import Ingest
from paceline_backend.control.periodic import Periodic
from paceline_backend.store import Store, new_runs, runs, schema, switches
from paceline_backend.store.new_runs import NewRun
from support.contexts import met, run_context
from support.waiting import DEADLINE_S, until

Floats = npt.NDArray[np.float64]


@contextmanager
def working(*parts: Callable[[threading.Event], None]) -> Iterator[None]:
    """Runs services in threads until the block ends."""
    stop = threading.Event()
    threads = [threading.Thread(target=part, args=(stop,)) for part in parts]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "it did not stop"


def planning(manager: ControllerManager) -> Callable[[threading.Event], None]:
    """Return what plans runs until its event is set."""
    return Periodic("controllers", 0.25, manager.look, manager.end).run


def ingest(store: Store, bus_url: str) -> Callable[[threading.Event], None]:
    return Ingest(store, bus_url, "ingest-test").run


def new_run(store: Store, policy: str = "bsp", **parameters: Any) -> str:
    with store.write() as connection:
        new = NewRun("test", "train.py", 4, policy, parameters, max_restarts=3)
        return new_runs.create(connection, new, by="test")


def switch(store: Store, bus_url: str, run: str, policy: str, **parameters: Any) -> int:
    with store.write() as connection:
        row = switches.add(connection, run, policy, parameters, "test")
    with connect(bus_url) as bus:
        publish(bus, live(run), RunChanged(), run)
    return int(row["version"])


class Leading:
    """One attempt of a run: adopts segments as the leader's loader would, and reports their steps.

    Args:
        a: true seconds per size unit, [W].
        used: samples that an earlier attempt used in the epoch where this one begins.
        key: of the run, if it has a session.
    """

    def __init__(
        self,
        bus_url: str,
        run: str,
        sizes: Floats,
        a: Floats,
        *,
        global_batch: int = 64,
        seed: int = 5,
        epochs: int | None = None,
        lookahead: int = 0,
        attempt: int = 0,
        epoch: int = 0,
        step: int = 0,
        used: npt.NDArray[np.int64] | None = None,
        step_s: float = 0.5,
        key: bytes | None = None,
    ) -> None:
        self.run, self.sizes, self.a, self.attempt = run, sizes, a, attempt
        self.world, self.epoch, self.step_s = len(a), epoch, step_s
        self.bus = connect(bus_url)
        self.heard = Proposals(attempt)
        self.control = ControlStream(bus_url, run, self.heard, key)
        self.stream = TELEMETRY if key is None else run_telemetry(run)
        terms = Terms(
            samples=len(sizes),
            global_batch=global_batch,
            seed=seed,
            drop_last=False,
            loss_mean="samples",
            coast_steps=2,
        )
        self.leader = Leader(
            run_context(terms, Environment(attempt=attempt)),
            met(self.world, sizes, HashStore()),
            Position(epoch, step, used),
            proposals=self.heard,
            announce=self._announced,
        )
        self.segments: list[Plan] = []
        self.reported = -1  # last step
        self.unsent: list[Adopted | StepBatch] = []
        self.hello = Hello(
            attempt=attempt,
            world=self.world,
            global_batch=global_batch,
            seed=seed,
            sizes=sizes.astype("<f8").tobytes(),
            loss_mean="samples",
            drop_last=False,
            epochs=epochs,
            lookahead=lookahead,
            started_at=time.time(),
            paceline="0",
            torch="2",
            device="cpu",
            epoch=epoch,
            step=step,
            used=b"" if used is None else used.astype("<u4").tobytes(),
        )

    def __enter__(self) -> Leading:
        publish(self.bus, self.stream, self.hello, self.run)
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()
        self.bus.close()

    def _announced(self, adopted: Adopted) -> None:
        self.segments.append(adopted.plan)
        self.unsent.append(adopted)

    def proposals(self) -> list[Proposal]:
        """Those for this attempt, oldest first; of many, the latest."""
        entries: Any = self.bus.xrange(control(self.run))
        messages = [decode(fields)[1] for _, fields in entries]
        return [m for m in messages if isinstance(m, Proposal) and m.attempt == self.attempt]

    def proposed(
        self, condition: Callable[[Plan], bool] = lambda _: True, timeout_s: float = DEADLINE_S
    ) -> Plan:
        """The newest proposal for the next segment, once it is as wanted and was heard."""

        def newest() -> Plan | None:
            offers = self.proposals()
            mine = [p.plan for p in offers if p.plan.seq == self.leader.seq]
            # Not by their number: the stream keeps the latest only.
            heard = bool(offers) and self.heard.newest == offers[-1]
            return mine[-1] if mine and heard and condition(mine[-1]) else None

        segment = until(newest, f"a proposal for segment {self.leader.seq}", timeout_s)
        assert segment is not None
        return segment

    def knows(self, plan: Plan) -> bool:
        """Whether it was planned with all steps reported so far."""
        return bool(plan.feedback) and plan.feedback[-1][1] == self.reported + 1

    def adopt(self, *, send: bool = True) -> Plan:
        """What the leader takes next, a proposal if there is one."""
        self.leader.advance(self.epoch)
        plan = self.segments[-1]
        if plan.epoch_end:
            self.epoch += 1
        if send:
            self.send()
        return plan

    def report(self, plan: Plan, *, send: bool = True) -> None:
        """All ranks' records of a segment's steps."""
        for rank in range(self.world):
            records = []
            for k, ranks in enumerate(plan.assignment.parts):
                step, load = plan.first_step + k, float(self.sizes[ranks[rank]].sum())
                records.append(
                    StepRecord(
                        attempt=self.attempt,
                        rank=rank,
                        seq=step,
                        step=step,
                        epoch=plan.epoch,
                        segment=plan.seq,
                        samples=len(ranks[rank]),
                        load=load,
                        data_s=0.0,
                        compute_s=float(self.a[rank]) * load,
                        sync_s=0.0,
                        step_s=self.step_s,
                        ended_at=time.time(),
                    )
                )
            self.unsent.append(StepBatch(records))
        self.reported = plan.first_step + plan.steps - 1
        if send:
            self.send()

    def send(self) -> None:
        """Everything that the bus did not get yet."""
        while self.unsent:
            publish(self.bus, self.stream, self.unsent[0], self.run)
            self.unsent.pop(0)

    def follow(self, segments: int) -> list[Plan]:
        """Adopts and reports so many segments of the controller, each planned with all feedback."""
        done = []
        for _ in range(segments):
            self.proposed(lambda s: self.reported < 0 or self.knows(s))
            done.append(self.adopt())
            assert done[-1].source == "controller"
            self.report(done[-1])
        return done

    def coast(self, segments: int) -> list[Plan]:
        """Adopts and reports so many segments without a controller."""
        # All are told at the end: a controller that hears of the first may offer the second.
        done = [self.adopt(send=False) for _ in range(segments)]
        assert all(plan.source == "coast" for plan in done)
        for plan in done:
            self.report(plan, send=False)
        self.send()
        return done

    def stored(self, store: Store) -> None:
        """Waits until the database has all that was adopted and reported."""
        c = schema.segments.c
        query = (
            sa.select(sa.func.count())
            .select_from(schema.segments)
            .where(c.run == self.key(store), c.attempt == self.attempt)
        )
        steps = sa.select(sa.func.max(schema.steps.c.step)).where(
            schema.steps.c.run == self.key(store)
        )

        def all_there() -> bool:
            with store.read() as connection:
                there = connection.scalar(query) == len(self.segments)
                return there and (connection.scalar(steps) or -1) >= self.reported

        until(all_there, "the database to have everything")

    def key(self, store: Store) -> int:
        with store.read() as connection:
            return runs.key_of(connection, self.run)

    def assert_exact(self) -> None:
        """Each epoch so far used every sample once; the last may be incomplete."""
        epochs: dict[int, list[int]] = {}
        for plan in self.segments:
            used = np.frombuffer(plan.indices, "<u4").tolist()
            epochs.setdefault(plan.epoch, []).extend(used)
        for number, used in epochs.items():
            assert len(set(used)) == len(used), f"epoch {number}: a sample twice"
            if number < self.epoch and number > self.hello.epoch:
                assert len(used) == len(self.sizes), f"epoch {number}: a sample is missing"
