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
from torch.distributed import TCPStore

from paceline.errors import PacelineError
from paceline.synchronisers import call_of, limits_of
from paceline.synchronisers._base import Ranks, Round
from paceline.synchronisers.rounds import Gradient, Limits, Rounds, Sum


@contextmanager
def ranks(timeout_s: float = 60.0) -> Iterator[Ranks]:
    rank, world = dist.get_rank(), dist.get_world_size()
    port: list[Any] = [None]
    if rank == 0:
        server = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        port = [server.port]
    dist.broadcast_object_list(port)
    asking, waiting = (TCPStore("127.0.0.1", port[0], None, is_master=False) for _ in range(2))
    group = dist.new_group(backend="gloo")
    yield Ranks(group, asking, waiting, rank, world, timedelta(seconds=timeout_s))
    dist.barrier()  # the store goes with rank 0


def make(of: Ranks, given: dict[str, Any], length: int, told: list[Round] | None = None) -> Rounds:
    call = call_of(given, of, "rounds", seed=3)
    take = None if told is None else told.append
    return Rounds(of, "rounds", length, call, limits_of(given), take)


def exchange(given: dict[str, Any], steps: int, seed: int) -> dict[str, Any]:
    """Each rank offers 1 in its own place, of 3 samples, at random times; some steps have none."""
    with ranks() as of:
        draw = random.Random(f"{seed} {of.rank}")
        told: list[Round] = []
        rounds = make(of, given, of.world, told)
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
        "numbers": [one.number for one in told],
        "totals": [one.total.tolist() for one in seen],
        "contributors": [one.contributors for one in seen],
        "staleness": [one.staleness for one in told],
        "dropped": sum(one.dropped for one in told),
        "ahead": most_ahead,
    }


class _Seen:
    """Any rank that is ready calls; it tells when a rank has looked for what is left of a round."""

    def __init__(self) -> None:
        self.looked = threading.Semaphore(0)

    @property
    def leftovers(self) -> bool:
        self.looked.release()
        return False

    def ready(self, number: int, working: list[int]) -> bool:
        return True


def leftover() -> list[float]:
    """Rank 0 offers 1, then 2 while that is reduced, and 4 once it was; the rounds' sums."""
    with ranks() as of:
        call = _Seen()
        seen = list[Sum]()
        if of.rank == 0:
            rounds = Rounds(of, "rounds", 1, call, Limits(mean=False))
            assert call.looked.acquire(timeout=30)
            rounds.offer(Gradient(torch.tensor([1.0]), 1))
            while not rounds._busy:
                time.sleep(0.001)
            rounds.offer(Gradient(torch.tensor([2.0]), 1))
            dist.barrier()  # the round goes on
            assert call.looked.acquire(timeout=30)
            rounds.offer(Gradient(torch.tensor([4.0]), 1))
        else:
            dist.barrier()
            rounds = Rounds(of, "rounds", 1, call, Limits(mean=False))
        dist.barrier()  # who is through calls, too
        seen += rounds.finish()
    return [float(one.total) for one in seen if one.contributors]


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
        told = "nothing"
        if of.rank != late:
            try:
                rounds.offer(Gradient(torch.ones(1), 1))
                rounds.finish()
            except PacelineError as error:
                told = str(error)
        dist.barrier()
        if of.rank == late:
            rounds.abort("has left")
    return told
