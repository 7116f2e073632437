"""Simulated step times of a real training, made from what the training's ranks reported."""

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
        work_s: time of loading and computing, [S, W].
        samples: samples of each local batch, [S, W].
        rest_s: the rest of a step: exchanges, waiting, the optimiser, the script, [S, W].
        last: which steps end a segment, [S].
    """

    work_s: Floats
    samples: Ints
    rest_s: Floats
    last: npt.NDArray[np.bool_]

    @staticmethod
    def of(records: Sequence[StepRecord], warm: int, world: int) -> Profile:
        """The profile of all ranks' records, without the first `warm` steps."""
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
        """Time that each rank's step takes besides its work, [W].

        The figure holds where all ranks meet only at segments' ends: it leaves these steps out.
        """
        return np.asarray(self.rest_s[~self.last].mean(axis=0))

    @property
    def all_reduce_s(self) -> float:
        """Time that a step takes besides its work where all ranks wait for each other.

        The rank that comes last does not wait: its rest of the step is the least.
        """
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
        reduced: profile of the same training under the all-reduce. It gives each rank's work:
            there every rank makes every step.
        alone: profile of a training with a similar exchange, in which ranks wait only where all
            meet. It gives the time of a step besides the work.
        round_s: time of an exchange.
        segment_steps: all ranks meet after so many steps.
        seed: the run's seed.
        sample_s: time that a sample takes each rank, for samples that move between ranks, [W].
    """
    if what == ALLREDUCE:
        costs = Costs(round_s=reduced.all_reduce_s)
    else:
        if what.name == "averaging":  # its reported times include waiting
            round_s = reduced.all_reduce_s
        costs = Costs(round_s=round_s, own_s=alone.own_s)
    return step_time_s(
        what,
        reduced.work_s,
        costs,
        segment_steps,
        samples=reduced.samples,
        sample_s=sample_s,
        seed=seed,
    )
