"""Steps in which a rank compiled again say nothing about its speed."""

from __future__ import annotations

import numpy as np

from paceline import policies
from paceline.planning.feedback import Window
from support.records import record


def window(recompiles: dict[tuple[int, int], int], slow_s: float = 9.0) -> Window:
    """Of 12 steps of two equal ranks; a step in which one recompiled took it so much longer."""
    made = Window(2, 0)
    for step in range(12):
        for rank in range(2):
            count = recompiles.get((step, rank), 0)
            compute_s = 0.1 + slow_s * bool(count)
            made.add([record(step, rank, load=40.0, compute_s=compute_s, recompiles=count)])
    return made


def test_they_do_not_make_a_rank_look_slow() -> None:
    feedback = window({(10, 1): 2, (11, 1): 1}).feedback()
    models = policies.make("paceline").predictor.fit(feedback, 2)
    np.testing.assert_allclose(models.a[1], models.a[0], rtol=0.05)


def test_a_rank_that_always_recompiles_keeps_its_times() -> None:
    feedback = window({(step, 1): 1 for step in range(12)}, slow_s=0.1).feedback()
    assert (feedback.compute_s > 0).all()
    models = policies.make("paceline").predictor.fit(feedback, 2)
    assert models.a[1] > 1.5 * models.a[0]
