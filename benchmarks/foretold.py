"""What the simulator says that steps of a real training take, from what its ranks reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline.wire import ALLREDUCE, StepRecord
from paceline.wire.synchronisation import Synchronisation
from paceline_backend.policies.base import Floats, Ints
from paceline_backend.simulator.sync import Costs, step_time_s


@dataclass(frozen=True)
class Profile:
    """Steps of a training, S of them on W ranks.

    Args:
        work_s: loading and computing, [S, W].
        samples: [S, W].
        rest_s: the rest of a step: exchanges, waiting, the optimiser, the script, [S, W].
        last: which steps end a segment, [S].
    """

    work_s: Floats
    samples: Ints
    rest_s: Floats
    last: npt.NDArray[np.bool_]

    @staticmethod
    def of(records: Sequence[StepRecord], warm: int, world: int) -> Profile:
        """Of what all ranks reported, without so many steps at the beginning."""
        rows = sorted(
            (record for record in records if record.step >= warm), key=lambda r: (r.step, r.rank)
        )
        work_s, step_s, samples, segment = (
            np.array(values).reshape(-1, world)
            for values in zip(
                *((r.data_s + r.compute_s, r.step_s, r.samples, r.segment) for r in rows),
                strict=True,
            )
        )
        last = np.append(segment[1:, 0] != segment[:-1, 0], True)
        return Profile(work_s, samples, step_s - work_s, last)

    @property
    def own_s(self) -> Floats:
        """What a step takes each rank besides, where all meet at segments' ends only, [W]."""
        return np.asarray(self.rest_s[~self.last].mean(axis=0))

    @property
    def all_reduce_s(self) -> float:
        """The same where all wait for each other: of the last one to come."""
        return float(self.rest_s.min(axis=1).mean())


def step_s(
    what: Synchronisation,
    reduced: Profile,
    alone: Profile,
    round_s: float,
    segment_steps: int,
    seed: int,
    sample_s: Floats,
) -> float:
    """The mean time of a step.

    Args:
        what: the synchroniser.
        reduced: of the same training under the all-reduce.
        alone: of one in which ranks exchange in a like way, and wait only where all meet: what
            there is to do, and what a step takes them besides.
        round_s: what an exchange takes.
        segment_steps: after which all meet.
        seed: of the run.
        sample_s: what a sample takes each rank, [W]: where samples move between ranks.
    """
    if what == ALLREDUCE:
        seen, costs = reduced, Costs(round_s=reduced.all_reduce_s)
    else:
        if what.name == "averaging":  # what is told of it holds the waiting, too
            round_s = reduced.all_reduce_s
        seen, costs = alone, Costs(round_s=round_s, own_s=alone.own_s)
    return step_time_s(
        what,
        seen.work_s,
        costs,
        segment_steps,
        samples=seen.samples,
        sample_s=sample_s,
        seed=seed,
    )
