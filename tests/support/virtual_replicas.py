"""Ranks that step alone, on a virtual clock: their own `Averaging` and `Pairwise`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from paceline.train.plan_shard import LocalStep
from paceline.train.sync import averaging, gradients, make, peers
from paceline.train.sync.base import Channel, Ranks, Replica, Round
from paceline.train.sync.outer import Outer
from paceline.wire.synchronisation import Synchronisation
from support import virtual
from support.virtual import REDUCED, Group, Scheduler


@dataclass
class Ran:
    ended_at: list[list[float]]  # [W][steps], the last with the meeting of all
    rounds: list[list[tuple[Round, float]]]  # [W] that the rank told, with their ends
    asked: list[list[int]] = field(default_factory=list)  # [W] whom each rank asked


class _Mail:
    """Vectors from rank to rank: one is there some time after both its ends are ready."""

    def __init__(self, scheduler: Scheduler, takes_s: float) -> None:
        self._scheduler, self._takes_s = scheduler, takes_s
        self._sent: dict[tuple[int, int, int], deque[Any]] = {}
        self._wanted: dict[tuple[int, int, int], deque[Any]] = {}

    def send(self, vector: torch.Tensor, key: tuple[int, int, int]) -> _Transfer:
        return self._match(self._sent, self._wanted, key, source=vector)

    def receive(self, vector: torch.Tensor, key: tuple[int, int, int]) -> _Transfer:
        return self._match(self._wanted, self._sent, key, target=vector)

    def _match(self, mine: Any, others: Any, key: Any, **ends: torch.Tensor) -> _Transfer:
        waiting = others.get(key)
        transfer: _Transfer
        if waiting:
            transfer = waiting.popleft()
        else:
            transfer = _Transfer(self._scheduler)
            mine.setdefault(key, deque()).append(transfer)
        vars(transfer).update(ends)
        if waiting is not None and transfer.source is not None and transfer.target is not None:
            transfer.target.copy_(transfer.source)
            transfer.there_at = self._scheduler.now + self._takes_s
        return transfer


class _Transfer:
    """A vector on its way, as `dist.Work`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.source: torch.Tensor | None = None
        self.target: torch.Tensor | None = None
        self.there_at = math.inf

    def wait(self, timeout: object = None) -> None:
        self._scheduler.wait(lambda: self.there_at, REDUCED)


@dataclass
class _Endpoint:
    """A process group as one of its ranks has it."""

    group: Group
    rank: int


class _Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._set = scheduler, False

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float) -> bool:
        deadline = self._scheduler.now + timeout
        self._scheduler.wait(lambda: self._scheduler.now if self._set else deadline)
        return self._set


class _Queue:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._items = scheduler, deque[Any]()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self) -> Any:
        self._scheduler.wait(lambda: self._scheduler.now if self._items else math.inf)
        return self._items.popleft()


class _Together:
    """Objects of all ranks, gathered in no time."""

    def __init__(self, scheduler: Scheduler, world: int) -> None:
        self._scheduler, self._world, self._given = scheduler, world, dict[int, Any]()

    def gather(self, gathered: list[Any], mine: Any, group: _Endpoint) -> None:
        given = self._given
        given[group.rank] = mine
        if len(given) == self._world:
            self._given = {}
        self._scheduler.wait(
            lambda: self._scheduler.now if len(given) == self._world else math.inf, REDUCED
        )
        gathered[:] = [given[rank] for rank in range(self._world)]


@contextmanager
def _ranks(
    world: int, round_s: float, call_s: float, exchange_s: float
) -> Iterator[tuple[Scheduler, list[Ranks]]]:
    with virtual.ranks(world, round_s, call_s) as (scheduler, made), ExitStack() as held:
        mail, together = _Mail(scheduler, exchange_s / 2), _Together(scheduler, world)

        def endpoint(of: Ranks) -> Ranks:
            group: Any = _Endpoint(of.group, of.rank)  # type: ignore[arg-type]
            return replace(of, groups={"": group})

        def all_reduce(vector: torch.Tensor, group: _Endpoint, async_op: bool = False) -> Any:
            reduction = group.group.begin(vector)
            return reduction if async_op else reduction.wait()

        def isend(vector: torch.Tensor, group: _Endpoint, tag: int, group_dst: int) -> _Transfer:
            return mail.send(vector, (group.rank, group_dst, tag))

        def irecv(vector: torch.Tensor, group: _Endpoint, tag: int, group_src: int) -> _Transfer:
            return mail.receive(vector, (group_src, group.rank, tag))

        collectives = SimpleNamespace(
            all_reduce=all_reduce,
            all_gather_object=lambda gathered, mine, group: together.gather(gathered, mine, group),
            isend=isend,
            irecv=irecv,
            DistStoreError=dist.DistStoreError,
        )
        threads = SimpleNamespace(
            Thread=lambda target, name, daemon: virtual.Started(scheduler, target, name),
            Event=lambda: _Event(scheduler),
        )
        clock = SimpleNamespace(perf_counter=lambda: scheduler.now)
        for module, name, value in [
            (averaging, "dist", collectives),
            (averaging, "time", clock),
            (gradients, "dist", collectives),
            (peers, "dist", collectives),
            (peers, "time", clock),
            (peers, "threading", threads),
            (peers, "SimpleQueue", lambda: _Queue(scheduler)),
        ]:
            held.enter_context(mock.patch.object(module, name, value))
        yield scheduler, [endpoint(of) for of in made]


def train(
    what: Synchronisation,
    work_s: list[list[float]],
    samples: list[list[int]],
    round_s: float,
    call_s: float,
    exchange_s: float,
    seed: int,
) -> Ran:
    """Trains until all meet at an epoch's end.

    Args:
        what: `averaging` or `pairwise`.
        work_s: what each step takes each rank, [W][steps].
        call_s: from when a key is set until those that wait for it know.
        exchange_s: what a vector to another rank and one back take.
    """
    world = len(work_s)
    ran = Ran([[] for _ in work_s], [[] for _ in work_s], [[] for _ in work_s])
    ask = peers.Peers.ask

    def asked(of: peers.Peers, rank: int, vector: torch.Tensor) -> peers.PeerAnswer:
        ran.asked[of._ranks.rank].append(rank)
        return ask(of, rank, vector)

    with (
        _ranks(world, round_s, call_s, exchange_s) as (scheduler, made),
        mock.patch.object(peers.Peers, "ask", asked),
    ):

        def trains(rank: int) -> Callable[[], None]:
            def tell(each: Round) -> None:
                ran.rounds[rank].append((each, scheduler.now))

            def run() -> None:
                parameters = [nn.Parameter(torch.zeros(2))]
                optimiser = torch.optim.SGD(parameters, 1.0, momentum=0.5)
                optimiser.state[parameters[0]]["momentum_buffer"] = torch.zeros(2)
                synchroniser = make(
                    what,
                    Channel(made[rank], "s", tell),
                    Replica(parameters, optimiser),
                    seed,
                    Outer(),
                )
                for number, lasts_s in enumerate(work_s[rank]):
                    ends = scheduler.now + lasts_s
                    scheduler.wait(lambda ends=ends: ends)  # type: ignore[misc]
                    count = samples[rank][number]
                    indices, weight = list(range(count)), float(count)
                    step = LocalStep(0, number, 0, indices, 1.0, 1.0, 1.0, weight, None, 0)
                    synchroniser.stepping(step, optimiser)
                    synchroniser.body_done(step, optimiser)
                    synchroniser.end_step(step)
                    ran.ended_at[rank].append(scheduler.now)
                synchroniser.synchronise(optimiser)
                ran.ended_at[rank][-1] = scheduler.now

            return run

        for rank in range(world):
            scheduler.start(f"rank {rank}", trains(rank))
        scheduler.run()
    return ran
