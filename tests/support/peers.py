"""Cases for ranks: questions to others, and synchronisers driven step by step."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.errors import PacelineError
from paceline.train.plan_shard import LocalStep
from paceline.train.sync import make
from paceline.train.sync.base import Channel, GradientSync, Replica, Round
from paceline.train.sync.outer import Outer
from paceline.train.sync.peers import Peers
from paceline.train.sync.rounds import Rounds
from paceline.wire.synchronisation import Synchronisation, convert
from support.rounds import ranks
from support.waiting import DEADLINE_S

FIRST = 1000  # step of the run, as if others came before


def ask(answering: list[int], questions: int, seed: int) -> dict[str, Any]:
    """Ranks ask at random, also those that answer; what they are told, and what stays behind."""
    with ranks() as of:
        draw = random.Random(f"{seed} {of.rank}")
        asked_by: list[int] = []

        def answer(rank: int, vector: torch.Tensor) -> torch.Tensor:
            asked_by.append(rank)
            return vector + of.rank

        keys = of.store.num_keys()
        dist.barrier()
        peers = Peers(of, "peers", answering, 3, answer)
        right = True
        for number in range(questions):
            other = draw.choice([rank for rank in answering if rank != of.rank])
            answered = peers.ask(other, torch.tensor([0.0, of.rank, number])).vector
            right &= answered.tolist() == [other, of.rank + other, number + other]
        peers.finish()
        dist.barrier()
        return {"right": right, "asked_by": asked_by, "left": of.store.num_keys() - keys}


def leave(answering: list[int], leaver: int) -> str:
    """One rank leaves in the middle; what the others are told."""
    with ranks() as of:
        peers = Peers(of, "peers", answering, 1, lambda _, vector: vector)
        message = "nothing"
        try:
            for step in range(50):
                if of.rank == leaver and step == 5:
                    peers.abort("has left")
                    message = ""
                    break
                if of.rank not in answering:
                    peers.ask(answering[step % len(answering)], torch.ones(1))
            else:
                peers.finish()
        except PacelineError as error:
            message = str(error)
    return message


def silent(answering: list[int], late: int) -> str:
    """One rank takes longer than the others wait; what they are told."""
    with ranks(timeout_s=0.5) as of:
        peers = Peers(of, "peers", answering, 1, lambda _, vector: vector)
        message = "nothing"
        if of.rank != late:
            try:
                peers.finish()
            except PacelineError as error:
                message = str(error)
        dist.barrier()
        peers.abort("has left")
    return message


class _Counted:
    """A store that tells when it is asked for a key, and waits no longer than its own limit."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.asked = threading.Semaphore(0)

    def get(self, key: str) -> bytes:
        self.asked.release()
        value: bytes = self._store.get(key)
        return value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def seldom() -> list[float]:
    """Rank 1 is asked after the store's time limit is over twice; what the others are answered."""
    with ranks() as of:
        blocking: Any = of.blocking_store
        blocking.set_timeout(timedelta(seconds=0.05))
        counted = _Counted(blocking)
        made: Any = replace(of, blocking_store=counted)
        peers = Peers(made, "peers", [1], 1, lambda rank, vector: vector + rank)
        if of.rank == 1:
            for _ in range(3):
                assert counted.asked.acquire(timeout=DEADLINE_S), "it waits no more"
        dist.barrier()
        answer = [] if of.rank == 1 else peers.ask(1, torch.ones(1)).vector.tolist()
        peers.finish()
        return answer


def by_late_givers(what: Synchronisation, steps: int) -> dict[str, Any]:
    """`by_noise` where what a push pulled is in use before its thread is through with giving it."""
    give = Rounds.give

    def late(rounds: Rounds, extra: torch.Tensor) -> None:
        give(rounds, extra)
        taken = rounds._member.taken
        while rounds._member.taken < taken + 3 and rounds._progress.working:
            time.sleep(0.001)

    with mock.patch.object(Rounds, "give", late):
        return by_noise(what, steps, 1)


def train(
    what: Synchronisation,
    steps: int,
    gradient: Callable[[int, int, torch.Tensor], torch.Tensor],
    slow_s: float = 0.0,
    *,
    weights: Sequence[float] = (),
    together: bool = False,
    late: bool = False,
) -> dict[str, Any]:
    """Plain SGD of two parameters with a learning rate of 1.

    Args:
        steps: of each rank, from the run's step `FIRST` on.
        gradient: the mean of a rank's batch in a step, where its parameters are these, [5].
        slow_s: a step's duration on a rank is drawn from 0 to twice this.
        weights: of the ranks' batches, of which those that weigh nothing are empty; (): all the
            same.
        together: the script itself lets ranks wait for each other in each step.
        late: ranks of odd number begin as the others are through with two steps.

    Returns:
        the replica's parameters, before and after all have met, and the rounds told.
    """
    with ranks() as of:
        draw = random.Random(f"slow {of.rank}")
        parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
        optimiser = torch.optim.SGD(parameters, 1.0)
        records: list[Round] = []
        synchroniser: GradientSync = make(
            what,
            Channel(of, "train", records.append),
            Replica(parameters, optimiser),
            1,
            Outer(),
        )
        weight = weights[of.rank] if weights else 1 / of.world
        factor = weight * of.world if synchroniser.weighs else 1.0  # as wrapped models weigh
        for step in range(steps):
            if together or (late and step == (0 if of.rank % 2 else 2)):
                dist.barrier()
            time.sleep(slow_s * draw.choice([0.0, 0.0, 1.0, 2.0]))
            at = torch.cat([parameter.detach() for parameter in parameters])
            parts = gradient(of.rank, step, at).split([2, 3])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.grad = factor * part
            indices = [0] if weight else []
            plan = LocalStep(0, FIRST + step, 0, indices, 1.0, 1.0, 1.0, weight, None, 0)
            synchroniser.stepping(plan, optimiser)
            optimiser.step()
            synchroniser.body_done(plan, optimiser)
            synchroniser.end_step(plan)
        before = torch.cat([parameter.detach() for parameter in parameters])
        synchroniser.synchronise(optimiser)
        after = torch.cat([parameter.detach() for parameter in parameters])
        return {
            "before": before.tolist(),
            "after": after.tolist(),
            "staleness": [record.staleness for record in records],
            "worlds": [record.world for record in records],
        }


def noise(seed: int, rank: int, step: int) -> torch.Tensor:
    """A gradient that depends on nothing else."""
    generator = torch.Generator().manual_seed(hash((seed, rank, step)) % 2**31)
    return torch.randn(5, generator=generator)


def by_noise(
    what: Synchronisation,
    steps: int,
    seed: int,
    slow_s: float = 0.0,
    weights: Sequence[float] = (),
) -> dict[str, Any]:
    """`train` with gradients whose sum is known."""
    return train(
        what, steps, lambda rank, step, _: noise(seed, rank, step), slow_s, weights=weights
    )


def by_starts(what: Synchronisation, steps: int) -> dict[str, Any]:
    """`train` where ranks move in the third and fourth of each four steps of the run."""

    def gradient(rank: int, step: int, _: torch.Tensor) -> torch.Tensor:
        return noise(9, rank, step) * float((FIRST + step) % 4 in (2, 3))

    return train(what, steps, gradient)


def leave_on_the_way(leaver: int) -> str:
    """A rank leaves while a mean is on its way that rank 1 lacks; what the others are told."""
    what = convert("averaging", {"every": 2, "overlap": 2, "outer": {"rate": 0.7, "momentum": 0.9}})
    with ranks() as of:
        parameters = [nn.Parameter(torch.zeros(2))]
        optimiser = torch.optim.SGD(parameters, 1.0)
        synchroniser = make(what, Channel(of, "leave"), Replica(parameters, optimiser), 1, Outer())
        message = ""

        def end(number: int) -> None:
            plan = LocalStep(0, FIRST + number, 0, [0], 1.0, 1.0, 1.0, 0.25, None, 0)
            synchroniser.end_step(plan)

        end(0)
        if of.rank != 1:
            end(1)
        dist.barrier()
        if of.rank == leaver:
            synchroniser.abort("has left")
            of.close()
        dist.barrier()
        if of.rank != leaver:
            try:
                for number in range(1 if of.rank == 1 else 2, 4):
                    end(number)
            except PacelineError as error:
                message = str(error)
            synchroniser.abort("has failed")
            of.close()
        return message


def by_ranks(what: Synchronisation, steps: int, weights: Sequence[float]) -> dict[str, Any]:
    """`train` where each step moves each parameter of rank r by 1 + r."""
    return train(what, steps, lambda rank, *_: torch.full((5,), -1.0 - rank), weights=weights)


def _downhill(rank: int, step: int, at: torch.Tensor) -> torch.Tensor:
    return 0.02 * (at - float(rank**2))


def by_quadratics(what: Synchronisation, steps: int) -> dict[str, Any]:
    """`train` where rank r's loss is 0.01 · |x − r²|²: the least is where x is the mean of r²."""
    return train(what, steps, _downhill, together=True)


def by_latecomers(what: Synchronisation, steps: int) -> dict[str, Any]:
    """`train` where ranks that have not begun are asked."""
    return train(what, steps, _downhill, late=True)


def regroup(groupings: list[list[list[int]]]) -> dict[str, Any]:
    """Each time the sum of ranks in this rank's group, its number there, and which group it was."""
    with ranks() as of:
        results: dict[str, Any] = {"sums": [], "ranks": [], "groups": []}
        kept: list[dist.ProcessGroup] = []
        for groups in groupings:
            mine = of.among(groups)
            total = torch.tensor([of.rank])
            dist.all_reduce(total, group=mine.group)
            if mine.group not in kept:
                kept.append(mine.group)
            results["sums"].append(int(total))
            results["ranks"].append((mine.rank, mine.world))
            results["groups"].append(kept.index(mine.group))
    return results
