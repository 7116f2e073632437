"""How many samples a run has trained on: what every rank counts is what the ledger used."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.ledger import BatchRules, Ledger
from paceline.core.terms import Terms
from paceline.train.progress import Trained


def terms(samples: int, batch: int, drop_last: bool) -> Terms:
    return Terms(samples, min(batch, samples), 0, drop_last, "samples", 2)


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.booleans(),
    st.lists(st.integers(0, 20), min_size=1, max_size=4),
    st.integers(0, 60),
)
def test_it_is_what_the_epochs_ledgers_used(
    samples: int, batch: int, drop_last: bool, left_after: list[int], resumed_at: int
) -> None:
    """Epochs may be left early, and training may go on from a checkpoint after any step."""
    t = terms(samples, batch, drop_last)
    counted, step, used, whole = (
        Trained(t.samples, t.global_batch, drop_last=t.drop_last),
        -1,
        0,
        True,
    )
    for epoch, most in enumerate(left_after):
        counted.begin_epoch(step + 1)
        ledger = Ledger(epoch, np.arange(samples), BatchRules(t.global_batch, drop_last))
        for of_epoch in range(min(most, t.steps_per_epoch)):
            (size,) = ledger.batch_sizes(1)
            ledger.use(np.arange(of_epoch * t.global_batch, of_epoch * t.global_batch + size))
            step, used = step + 1, used + size
            assert counted.upto(step) == used
            if step == resumed_at and whole and not ledger.over:
                counted = Trained(t.samples, t.global_batch, drop_last=t.drop_last)
                counted.resume(epoch, step + 1, len(ledger.used()))
                assert counted.upto(step) == used
        whole = whole and ledger.over


def test_before_the_first_step_there_are_none() -> None:
    counted = Trained(10, 4, drop_last=False)
    assert counted.upto(-1) == 0
    counted.begin_epoch(0)
    assert [counted.upto(step) for step in (-1, 0, 1, 2)] == [0, 4, 8, 10]
