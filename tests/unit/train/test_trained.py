"""How many samples a run has trained on: what every rank counts is what the ledger used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batch_limits.budget import Budget
from paceline.core.ledger import BatchRules, Ledger
from paceline.train.epochs import epoch_order
from paceline.train.progress import Trained

Ints = npt.NDArray[np.int64]


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.sampled_from(["all", "drop_last", "tokens"]),
    st.lists(st.integers(0, 20), min_size=1, max_size=4),
    st.integers(0, 60),
)
def test_it_is_what_the_epochs_ledgers_used(
    samples: int, batch: int, steps_of: str, left_after: list[int], resumed_at: int
) -> None:
    """Epochs may be left early, and training may go on from a checkpoint after any step."""
    batch, drop_last = min(batch, samples), steps_of == "drop_last"
    budget = Budget(7.0, np.resize([1.0, 2.5, 6.0], samples)) if steps_of == "tokens" else None

    def ends(order: Ints) -> Ints | None:
        return None if budget is None else np.cumsum(budget.counts(order))

    counted, step, used, whole = Trained(samples, batch, drop_last=drop_last), -1, 0, True
    for epoch, most in enumerate(left_after):
        order = epoch_order(samples, 0, epoch)
        counted.begin_epoch(step + 1, ends(order))
        ledger = Ledger(epoch, order, BatchRules(batch, drop_last, budget=budget))
        at = 0
        while not ledger.finished and most:
            (size,) = ledger.batch_sizes(1)
            ledger.use(order[at : at + size])
            at, step, used, most = at + size, step + 1, used + size, most - 1
            assert counted.upto(step) == used
            if step == resumed_at and whole and not ledger.finished:
                counted = Trained(samples, batch, drop_last=drop_last)
                counted.resume(epoch, step + 1, len(ledger.used()), ends(order[at:]))
                assert counted.upto(step) == used
        whole = whole and ledger.finished


def test_before_the_first_step_there_are_none() -> None:
    counted = Trained(10, 4, drop_last=False)
    assert counted.upto(-1) == 0
    counted.begin_epoch(0)
    assert [counted.upto(step) for step in (-1, 0, 1, 2)] == [0, 4, 8, 10]
