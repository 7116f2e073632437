"""Segments of ranks on a virtual clock: their own `Rounds`, driven as a session drives them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from unittest import mock

import torch

from paceline.core.errors import PacelineError
from paceline.core.rounds import Call, Drift
from paceline.train.sync import rounds as rank_rounds
from paceline.train.sync.base import Channel, Round
from paceline.train.sync.gradients import Gradient
from paceline.train.sync.rounds import Rounds
from support import virtual


@dataclass
class Ran:
    ended_at: list[list[float]]  # [W][steps of the rank]
    rounds: list[tuple[Round, float]] = field(default_factory=list)  # with their ends
    totals: list[list[list[float]]] = field(default_factory=list)  # [W] the sums of all rounds
    errors: list[str | None] = field(default_factory=list)  # [W]
    gave_up_at: list[float] = field(default_factory=list)  # [W]


def train(
    call: Call,
    drift: Drift,
    work_s: list[list[float]],
    samples: list[list[int]],
    round_s: float,
    call_s: float,
    *,
    leaves: Callable[[int, int], str | None] = lambda rank, step: None,
    timeout_s: float = 1e7,
    pulse_s: float = math.inf,
    members: Sequence[int] = (),
    gradient: Callable[[int, int], list[float]] | None = None,
) -> Ran:
    """A segment.

    Args:
        drift: how far ranks may drift apart.
        work_s: what each step takes each rank, [W][its steps].
        samples: of these steps; where there are none, there is no gradient.
        call_s: from a call until all know.
        leaves: whether a rank leaves after it computed a step: "aborts", or "dies", or
            is "stuck".
        timeout_s: after which a rank that waits gives up.
        pulse_s: after which a rank that waits calls a round.
        members: the run's numbers of these ranks, if they are a group; (): all ranks of the run.
        gradient: the gradient of a rank's step; None: 1 in the rank's own place, [W].
    """
    world = len(work_s)
    made_by = gradient or (lambda rank, step: [float(place == rank) for place in range(world)])
    ran = Ran([[] for _ in work_s], errors=[None] * world, gave_up_at=[math.inf] * world)
    ran.totals = [[] for _ in work_s]
    with (
        virtual.ranks(world, round_s, call_s, timeout_s) as (scheduler, made),
        mock.patch.object(rank_rounds, "_PULSE_S", pulse_s),
    ):
        made = [replace(of, members=members) for of in made]

        def tell(each: Round) -> None:
            ran.rounds.append((each, scheduler.now))

        def steps(rank: int, rounds: Rounds) -> None:
            for step in range(len(work_s[rank])):
                lasts_s, given = work_s[rank][step], samples[rank][step]
                ends = scheduler.now + lasts_s
                scheduler.wait(lambda ends=ends: ends)  # type: ignore[misc]
                if (how := leaves(rank, step)) is not None:
                    if how == "aborts":
                        rounds.abort("has left")
                    elif how == "dies":
                        scheduler.end_children()
                    return
                vector = torch.tensor(made_by(rank, step))
                rounds.offer(Gradient(vector, given) if given else None)
                ran.ended_at[rank].append(scheduler.now)
                ran.totals[rank] += [each.total.tolist() for each in rounds.take()]
            ran.totals[rank] += [each.total.tolist() for each in rounds.finish()]

        def trains(rank: int) -> None:
            channel = Channel(made[rank], "r", None if rank else tell)
            rounds = Rounds(channel, len(made_by(rank, 0)), call, drift)
            try:
                steps(rank, rounds)
            except PacelineError as error:
                ran.errors[rank] = str(error)
                ran.gave_up_at[rank] = scheduler.now
                rounds.abort(f"gave up: {error}")

        for rank in range(world):
            scheduler.start(f"rank {rank}", lambda rank=rank: trains(rank))  # type: ignore[misc]
        scheduler.run()
    return ran
