"""Cases for ranks: rounds of gradients whose sums tell whose they are."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from msgspec import convert
from torch.distributed import TCPStore

from paceline.core.errors import PacelineError
from paceline.core.rounds import Call, Drift
from paceline.train.plan_shard import LocalStep
from paceline.train.sync.base import Channel, Ranks, Replica, Round
from paceline.train.sync.gradients import Gradient
from paceline.train.sync.partial import PartialSync
from paceline.train.sync.rounds import Rounds, Sum
from paceline.wire.synchronisation import PartialRules
from support.waiting import DEADLINE_S


@contextmanager
def ranks(timeout_s: float = 60.0) -> Iterator[Ranks]:
    rank, world = dist.get_rank(), dist.get_world_size()
    port: list[Any] = [None]
    if rank == 0:
        server = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        port = [server.port]
    dist.broadcast_object_list(port)
    store, blocking_store = (
        TCPStore("127.0.0.1", port[0], None, is_master=False) for _ in range(2)
    )
    group = dist.new_group(backend="gloo")
    made = Ranks({"": group}, store, blocking_store, rank, world, timedelta(seconds=timeout_s))
    del group
    yield made
    dist.barrier()  # the store goes with rank 0
    made.close()


def make(
    of: Ranks, given: dict[str, Any], length: int, records: list[Round] | None = None
) -> Rounds:
    rules = convert(given, PartialRules)
    take = None if records is None else records.append
    call, drift = Call.of(rules, of.world, seed=3), Drift.of(rules)
    return Rounds(Channel(of, "rounds", take), length, call, drift)


def exchange(given: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    """Each rank offers 1 in its own place, of 3 samples, at random times; some steps have none."""
    with ranks() as of:
        draw = random.Random(f"{seed} {of.rank}")
        records: list[Round] = []
        rounds = make(of, given, of.world, records)
        offered, seen = 0, list[Sum]()
        most_ahead = 0
        for _ in range(steps):
            time.sleep(draw.choice([0.0, 0.0, 0.001, 0.004]))
            vector = torch.zeros(of.world)
            vector[of.rank] = 1
            empty = draw.random() < 0.1
            offered += not empty
            rounds.offer(None if empty else Gradient(vector, 3))
            most_ahead = max(most_ahead, rounds.ahead)
            seen += rounds.take()
        seen += rounds.finish()
    return {
        "offered": offered,
        "numbers": [record.number for record in records],
        "totals": [result.total.tolist() for result in seen],
        "contributors": [result.contributors for result in seen],
        "staleness": [record.staleness for record in records],
        "dropped": sum(record.dropped for record in records),
        "ahead": most_ahead,
    }


def leftover() -> list[float]:
    """Rank 0 offers 1, then 2 while that is reduced, and 4 once it was; the rounds' sums."""
    with ranks() as of:
        call = Call(probes=of.world)  # any rank that is ready calls
        seen = list[Sum]()
        if of.rank == 0:
            rounds = Rounds(Channel(of, "rounds"), 1, call, Drift(mean=False))
            rounds.offer(Gradient(torch.tensor([1.0]), 1))
            while not rounds._progress.reducing:
                time.sleep(0.001)
            rounds.offer(Gradient(torch.tensor([2.0]), 1))
            dist.barrier()  # the round goes on
            while not seen:
                seen += rounds.take()
            rounds.offer(Gradient(torch.tensor([4.0]), 1))
        else:
            dist.barrier()
            rounds = Rounds(Channel(of, "rounds"), 1, call, Drift(mean=False))
        dist.barrier()  # who is through calls, too
        seen += rounds.finish()
    return [float(result.total) for result in seen if result.contributors]


def aged() -> tuple[list[list[float]], list[list[int]]]:
    """Rank 0 has gradients of two ages for the second round: the sums, and the ages."""
    with ranks() as of:
        records: list[Round] = []
        seen = list[Sum]()

        def made() -> Rounds:
            call, drift = Call(probes=of.world), Drift(staleness=4, mean=True)
            return Rounds(Channel(of, "rounds", records.append), 2, call, drift)

        if of.rank == 0:
            rounds = made()
            rounds.offer(Gradient(torch.tensor([1.0, 0.0]), 1))
            while not rounds._progress.reducing:
                time.sleep(0.001)
            rounds.offer(Gradient(torch.tensor([3.0, 0.0]), 1))
            dist.barrier()  # the round goes on
            while not seen:
                seen += rounds.take()
            rounds.offer(Gradient(torch.tensor([0.0, 3.0]), 1))
        else:
            dist.barrier()
            rounds = made()
        dist.barrier()
        seen += rounds.finish()
    ages = [record.staleness for record in records]
    return [result.total.tolist() for result in seen[:2]], ages[:2]


def arriving() -> tuple[list[float], list[float]]:
    """A gradient of rank 0 is on its way while others have rounds: sums, and copying times."""
    with ranks() as of:
        records: list[Round] = []
        seen = list[Sum]()
        here = threading.Event()

        def arrive() -> float:
            assert here.wait(DEADLINE_S)
            return 0.5

        channel = Channel(of, "rounds", records.append)
        rounds = Rounds(channel, 1, Call(quorum=1), Drift(mean=False))
        if of.rank == 0:
            rounds.offer(Gradient(torch.ones(1), 1, arrive=arrive))
        dist.barrier()
        if of.rank == 1:
            rounds.offer(Gradient(torch.full((1,), 2.0), 1, copied_s=0.25))
        while not seen:
            seen += rounds.take()
            time.sleep(0.001)
        dist.barrier()
        here.set()
        seen += rounds.finish()
    totals = [float(result.total) for result in seen if result.contributors]
    return totals, [record.copied_s for record in records if record.copied_s]


def undrawn() -> bool:
    """Whether a rank calls that is ready but not drawn."""
    with ranks() as of:
        call = Call(probes=1, seed=0)
        drawn = call.drawn(0, list(range(of.world)))
        assert drawn is not None and len(drawn) == 1
        rounds = Rounds(Channel(of, "rounds"), 1, call, Drift())
        if of.rank not in drawn:
            rounds.offer(Gradient(torch.ones(1), 1))
        dist.barrier()
        called = bool(of.store.check(["rounds/0"]))
        dist.barrier()
        rounds.finish()
    return called


def stepped(given: dict[str, Any], optimiser: str, steps: int) -> float:
    """How far a parameter that begins at 1 has come, where each rank's gradient is always 1."""
    with ranks() as of:
        parameter = torch.nn.Parameter(torch.ones(1))
        made = {
            "SGD": lambda: torch.optim.SGD([parameter], 0.01),
            "decay": lambda: torch.optim.SGD([parameter], 0.01, weight_decay=1.0),
            "Adam": lambda: torch.optim.Adam([parameter], 0.01),
            "AdamW": lambda: torch.optim.AdamW([parameter], 0.01, weight_decay=1.0),
        }[optimiser]()
        rules = convert(given, PartialRules)
        call, drift = Call.of(rules, of.world, 3), Drift.of(rules)
        partial = PartialSync(Channel(of, "rounds"), Replica([parameter], made), call, drift)
        weight = 1 / of.world
        for step in range(steps):
            plan = LocalStep(0, step, 0, [0], 1.0, 1.0, 1.0, weight, None, 0)
            parameter.grad = torch.full((1,), weight * of.world)
            partial.stepping(plan, made)
            partial.body_done(plan, made)
        partial.synchronise(made)
    return parameter.item()


def leave(given: dict[str, Any], leaver: int, after: int) -> str:
    """One rank leaves in the middle; what the others are told."""
    with ranks() as of:
        rounds = make(of, given, 1)
        try:
            for step in range(50):
                if of.rank == leaver and step == after:
                    rounds.abort("has left")
                    return ""
                rounds.offer(Gradient(torch.ones(1), 1))
                rounds.take()
            rounds.finish()
        except PacelineError as error:
            return str(error)
    return "nothing"


def silent(given: dict[str, Any], late: int) -> str:
    """One rank takes longer than the others wait; what they are told."""
    with ranks(timeout_s=0.5) as of:
        rounds = make(of, given, 1)
        message = "nothing"
        if of.rank != late:
            try:
                rounds.offer(Gradient(torch.ones(1), 1))
                rounds.finish()
            except PacelineError as error:
                message = str(error)
        dist.barrier()
        if of.rank == late:
            rounds.abort("has left")
    return message
