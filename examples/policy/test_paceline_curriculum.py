"""Tests of the example policy. Run them with pytest where Paceline is installed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from paceline_curriculum import Curriculum, preset

from paceline.policies import Models, Problem
from paceline_backend.testing import check_policy


def test_contract() -> None:
    check_policy(preset)


def test_short_samples_come_first_and_the_fast_rank_gets_more() -> None:
    everything = np.arange(8)
    problem = Problem(
        sizes=np.array([8.0, 1, 7, 2, 6, 3, 5, 4]),
        remaining=everything,
        order=everything,
        placement=everything % 2,
        epoch=0,
        first_step=0,
        steps=1,
        global_batch=4,
        world=2,
        seed=0,
    )
    scheduler = Curriculum(disorder=0.0)
    models = Models(a=np.array([1.0, 4.0]), c=np.zeros(2), b=np.zeros(2))
    order = scheduler.compose(problem, models)
    assert problem.sizes[order].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    fast, slow = scheduler.schedule(replace(problem, order=order), models).parts[0]
    assert problem.sizes[fast].tolist() == [4, 3, 1]
    assert problem.sizes[slow].tolist() == [2]
