"""What the newest epochs of a run came to, without a look at earlier steps."""

from __future__ import annotations

from itertools import accumulate, count, pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from paceline.wire import StepBatch
from paceline_backend.store import Store, runs, telemetry
from paceline_backend.store.details import epochs as of_run
from support.records import add_run, hello, record

NUMBERS = count()
LENGTHS = st.lists(st.sampled_from((1, 30, 99, 100, 101, 250)), min_size=1, max_size=7)


def train(store: Store, lengths: list[int], lost: set[int]) -> str:
    """A run whose epochs have so many steps, but for those that were lost."""
    run = f"r{next(NUMBERS)}"
    add_run(store, run, nproc=1)
    starts = [0, *accumulate(lengths)]
    rows = [
        record(step, 0, epoch=epoch, samples=step % 7, step_s=0.25 + step % 3)
        for epoch, (first, end) in enumerate(pairwise(starts))
        for step in range(first, end)
        if step not in lost
    ]
    telemetry.write(store, [(run, hello(world=1)), (run, StepBatch(rows))])
    return run


def read(store: Store, run: str, limit: int) -> list[dict[str, Any]]:
    with store.read() as connection:
        return of_run.epochs(connection, runs.key_of(connection, run), limit)


def test_the_newest_epochs_are_the_end_of_all(store: Store) -> None:
    @given(LENGTHS, st.sets(st.integers(0, 700), max_size=3), st.integers(1, 8))
    def check(lengths: list[int], lost: set[int], limit: int) -> None:
        run = train(store, lengths, lost)
        whole = read(store, run, 10_000)
        begins = [0, *accumulate(lengths)][:-1]
        there = [
            epoch
            for epoch, (first, length) in enumerate(zip(begins, lengths, strict=True))
            if not set(range(first, first + length)) <= lost
        ]
        assert [each["epoch"] for each in whole] == there
        assert read(store, run, limit) == whole[-limit:]

    check()


def test_steps_of_earlier_epochs_are_not_read(store: Store) -> None:
    run = train(store, [250] * 6, set())
    with store.read() as connection:
        key = runs.key_of(connection, run)
        assert [of_run._before(connection, key, limit) for limit in (1, 2, 5, 6)] == [
            *(1_200, 900, 200, None),
        ]
    assert [(each["first_step"], each["steps"]) for each in read(store, run, 2)] == [
        *((1_000, 250), (1_250, 250)),
    ]
