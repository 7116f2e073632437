"""Many runs whose ranks compute nothing: who reports to the server that `steady.py` measures.

A process of its own holds several runs. As in training are: how a run registers and tells that it
lives, the users of the bus, a connection for each rank, the leader that asks for plans and adopts
them, what ranks get of these plans, and one message for each step of each rank. Emulated are the
steps: each lasts one second, in which a rank waits for as long as its load would take. A run's
ranks share a thread, which reads their parts of the plan and sends their messages in turn.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from paceline.core.terms import Terms
from paceline.core.version import __version__
from paceline.node.client import Client
from paceline.node.delivery import Delivery
from paceline.node.link import Link
from paceline.node.rundir import Record
from paceline.node.session import Session, of_run
from paceline.train.outlet import Outlet
from paceline.train.parts import Step, get_part, part_key
from paceline.train.plan.follower import Follower
from paceline.train.plan.leader import Leader
from paceline.train.plan.proposals import Proposals
from paceline.train.report import FLUSH_S
from paceline.wire import Adopted, Hello, State, StepBatch, StepRecord, encode
from paceline.wire.bus import connect

STEP_S = 1.0
EPOCH_STEPS = 128  # so an epoch takes two minutes
PER_RANK = 8  # samples of a rank's batch under `bsp`
NODE = "fleet"
_PIPED = 50  # messages in one call of a `_Pipe`
_AHEAD = 2  # steps that the loader fetches before training reaches them
_UNIT_S = 3e-5  # what a sample of size 1 takes on a fast rank
_OVERHEAD_S = 0.02  # of a step, on each rank
_SETTLE_S = 60.0  # for the last state of a run


@dataclass
class Shape:
    """Of each run."""

    ranks: int
    steps: int
    piped: bool  # see `_Pipe`


class _Pipe:
    """A run's records, each in its message as always, but several messages in one call of the bus.

    Each rank has its connection, too; nothing goes over it. Every command is the one that the
    rank's `Outlet` would send, so that the bus and the server have the same to do, and thousands of
    ranks leave them their share of a small machine.
    """

    def __init__(self, run: str, session: Session, ranks: int) -> None:
        self._run = run
        self._stream = session.reports
        self._clients = [connect(session.bus) for _ in range(ranks)]
        for client in self._clients:
            client.ping()

    def send(self, records: Sequence[StepRecord]) -> None:
        """Sends records, one message each."""
        pipeline = self._clients[0].pipeline(transaction=False)
        for record in records:
            pipeline.xadd(self._stream, dict(encode(StepBatch([record]), self._run).items()))
        pipeline.execute()

    def close(self) -> None:
        """Closes all connections."""
        for client in self._clients:
            client.close()


class EmulatedRun:
    """One run: its leader, its ranks and who looks after them; a context manager.

    Args:
        client: of the server.
        shape: ranks and steps.
        policy: of the run.
        seed: of its data and its ranks' speeds.
        data: a data directory.
    """

    def __init__(self, client: Client, shape: Shape, policy: str, seed: int, data: Path) -> None:
        self.shape = shape
        self.sources: Counter[str] = Counter()  # of segments: who planned them
        self.late_s = 0.0  # the most that a record was sent after it was due
        self._rng = np.random.default_rng(seed)
        batch = PER_RANK * shape.ranks
        samples = EPOCH_STEPS * batch
        self._sizes = np.round(self._rng.gamma(4.0, 100.0, samples) + 1)
        self._speeds = _UNIT_S * self._rng.uniform(1.0, 3.0, shape.ranks)  # s per unit
        self._terms = Terms(samples, batch, seed, False, "samples", coast_steps=2)
        self.id, session = _registered(client, shape.ranks, policy)
        self._exit_stack = ExitStack()
        link = self._exit_stack.enter_context(Link(session))
        record = Record(self.id, NODE, "paceline run", session.control)
        self._delivery = Delivery(data / "runs" / self.id, record, link)
        self._exit_stack.callback(self._delivery.close)
        # In a pipe only rank 0, the leader, has more to send than its steps.
        self._outlets = [
            Outlet(self.id, session.bus, None, session.reports)
            for _ in range(1 if shape.piped else shape.ranks)
        ]
        self._pipe = _Pipe(self.id, session, shape.ranks) if shape.piped else None
        if self._pipe is not None:
            self._exit_stack.callback(self._pipe.close)
        proposals = Proposals(session.bus, self.id, 0, session.key)
        self._exit_stack.callback(proposals.close)
        store = HashStore()
        self._leader = Leader(
            self._terms, shape.ranks, self._sizes, store, proposals, announce=self._announce
        )
        self._follower = Follower(store, 0, self._leader)
        self._exit_stack.callback(self._follower.close)
        self._others = [_parts(store, rank) for rank in range(1, shape.ranks)]

    @property
    def lost(self) -> int:
        """Records that the bus did not take."""
        return sum(outlet.lost for outlet in self._outlets)

    def introduce(self) -> None:
        """Says that the run runs, and what planning needs to know."""
        self._delivery.report(State.RUNNING)
        terms = self._terms
        hello = Hello(
            attempt=0,
            world=self.shape.ranks,
            global_batch=terms.global_batch,
            seed=terms.seed,
            sizes=self._sizes.astype("<f8").tobytes(),
            loss_mean=terms.loss_mean,
            drop_last=terms.drop_last,
            epochs=None,
            lookahead=_AHEAD,
            started_at=time.time(),
            paceline=__version__,
            torch="none",
            device="cpu",
        )
        self._outlets[0].deliver(hello)

    def train(self, begins: float) -> None:
        """Ends a step of each rank every second.

        Args:
            begins: Unix time of the first step's start; runs are spread over a second from then.
        """
        begins += self._rng.uniform(0, STEP_S)
        planned = self._planned()
        ahead: deque[list[Step]] = deque(itertools.islice(planned, _AHEAD))
        for number in range(self.shape.steps):
            ahead.append(next(planned))
            ended_at = begins + (number + 1) * STEP_S
            self._delivery.pump()
            _sleep_until(ended_at)
            self._report(number, ahead.popleft(), ended_at)
            self._leader.reached(number)

    def finish(self) -> None:
        """Ends the run, once the bus has everything about it."""
        for outlet in self._outlets:
            outlet.end()
            outlet.close(0)
        deadline = time.monotonic() + _SETTLE_S
        self._delivery.report(State.FINISHED, exit_code=0)
        while not self._delivery.settled and time.monotonic() < deadline:
            self._delivery.pump()
            time.sleep(0.1)
        self._exit_stack.close()

    def _announce(self, adopted: Adopted) -> None:
        self.sources[adopted.segment.source] += 1
        self._outlets[0].deliver(adopted)

    def _planned(self) -> Iterator[list[Step]]:
        """What all ranks do, step by step, through as many epochs as it takes."""
        for epoch in itertools.count():
            # Rank 0 comes first: then the leader has stored what the others read.
            of_ranks = [self._follower.steps(epoch), *self._others]
            yield from map(list, zip(*of_ranks, strict=False))

    def _report(self, number: int, steps: list[Step], ended_at: float) -> None:
        """Sends each rank's record when the rank's thread would, up to one flush after its end."""
        noise = self._rng.normal(1.0, 0.02, len(steps))
        compute_s = self._speeds * [step.load for step in steps] * noise
        slowest_s = float(compute_s.max())
        flushes = self._rng.uniform(0, FLUSH_S, len(steps))
        order = np.argsort(flushes).tolist()
        at_once = _PIPED if self._pipe is not None else 1
        for start in range(0, len(order), at_once):
            ranks = order[start : start + at_once]
            records = [
                _record(number, rank, steps[rank], float(compute_s[rank]), slowest_s, ended_at)
                for rank in ranks
            ]
            due = ended_at + float(flushes[ranks[-1]])
            _sleep_until(due)
            if self._pipe is not None:
                self._pipe.send(records)
            else:
                self._outlets[ranks[0]].retry()
                self._outlets[ranks[0]].deliver(StepBatch(records))
            self.late_s = max(self.late_s, time.time() - due)


def _record(
    number: int, rank: int, step: Step, compute_s: float, slowest_s: float, ended_at: float
) -> StepRecord:
    return StepRecord(
        attempt=0,
        rank=rank,
        seq=number,
        step=step.step,
        epoch=step.epoch,
        segment=step.segment,
        samples=step.samples,
        load=step.load,
        data_s=0.001,
        compute_s=compute_s,
        sync_s=slowest_s - compute_s + _OVERHEAD_S,
        step_s=STEP_S,
        ended_at=ended_at,
        ett_s=step.ett_s,
        loss=2.0,
        memory_bytes=3_000_000_000,
        squares=step.squares,
        longest=step.longest,
    )


def _parts(store: Store, rank: int) -> Iterator[Step]:
    """A rank's steps through all epochs, as its `Fetcher` reads them, without its thread."""
    for segment in itertools.count():
        part = get_part(store, segment, rank)
        store.delete_key(part_key(segment, rank))
        yield from part.steps()


def _registered(client: Client, ranks: int, policy: str) -> tuple[str, Session]:
    """Registers a run as `paceline run` does; its id and session."""
    script = {"script": __file__, "name": f"fleet-{policy}", "nproc": ranks, "node": NODE}
    body = {**script, "policy": policy, "launch": False}
    run = str(client.call("POST", "/runs", body)["id"])
    return run, of_run(client, run, NODE)


def _sleep_until(at: float) -> None:
    time.sleep(max(0.0, at - time.time()))


def _together(runs: list[EmulatedRun], begins: float) -> list[str]:
    """Trains all runs, each in a thread; what went wrong."""
    failures: list[str] = []

    def work(run: EmulatedRun) -> None:
        try:
            run.train(begins)
        except Exception as error:
            failures.append(f"run {run.id}: {type(error).__name__}: {error}")
        run.finish()

    threads = [threading.Thread(target=work, args=[run]) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def main() -> None:
    """Says which runs there are, reads when they begin, trains them, and tells what was sent."""
    given: dict[str, Any] = json.loads(sys.argv[1])
    shape = Shape(given["ranks"], given["steps"], given["piped"])
    with Client(given["server"]) as client:
        runs = [
            EmulatedRun(client, shape, policy, seed, Path(given["data"]))
            for seed, policy in given["runs"]
        ]
    for run in runs:
        run.introduce()
    print(json.dumps([run.id for run in runs]), flush=True)
    failures = _together(runs, float(sys.stdin.readline()))
    report = {
        "unsent": sum(run.lost for run in runs),
        "late_s": max(run.late_s for run in runs),
        "segments": dict(sum((run.sources for run in runs), Counter())),
        "failures": failures,
    }
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
