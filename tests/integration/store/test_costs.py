"""What runs cost: the time of their ranks, and what they waited of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.wire import StepBatch
from paceline.wire.synchronisation import Averaging, AveragingRules
from paceline_backend.server.prices import Price, PriceError
from paceline_backend.store import Store, telemetry
from paceline_backend.store.history import days
from support.records import add_run, adopted, hello, record

DAY_S = 86_400.0
NUMBERS = count()

Times = tuple[float, list[float], list[float]]  # a step's end; each rank's time, and of computing


def trained(
    store: Store, run: str, world: int, times: Mapping[int, Times], attempt: int = 0
) -> None:
    """Steps of an attempt of a run."""
    first = min(times)
    telemetry.write(store, [(run, hello(world=world, attempt=attempt, step=first))])
    records = [
        record(
            *(step, rank, attempt),
            seq=step - first,
            compute_s=compute_s[rank],
            step_s=step_s[rank],
            ended_at=ended_at,
        )
        for step, (ended_at, step_s, compute_s) in times.items()
        for rank in range(world)
    ]
    telemetry.write(store, [(run, StepBatch(records))])


def spent(store: Store, run: int) -> tuple[float, float]:
    """Time of a run's ranks, and what they waited of it, as lists of runs have it."""
    days.sum_up(store, run)
    with store.read() as connection:
        figures = days.figures(connection, [run])[run]
    return figures["worker_s"], figures["waited_s"]


@dataclass(frozen=True)
class _Course:
    """A run whose attempts may have different numbers of ranks."""

    worlds: list[int]  # of each attempt
    starts: list[int]  # first step of each attempt, and one past the last
    times: list[Times]  # of each step, with as many ranks
    cuts: list[int]


@st.composite
def _courses(draw: st.DrawFn) -> _Course:
    length = draw(st.integers(1, 12))
    starts = sorted({0, *draw(st.lists(st.integers(0, length - 1), max_size=2))})
    worlds = [draw(st.integers(1, 4)) for _ in starts]
    times, at = [], 3 * DAY_S
    for step in range(length):
        world = worlds[max(k for k, first in enumerate(starts) if first <= step)]
        of_rank = st.lists(st.floats(0.01, 5.0), min_size=world, max_size=world)
        at += draw(st.floats(1.0, 40_000.0))
        times.append((at, draw(of_rank), draw(of_rank)))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, length - 1)), max_size=3)))
    return _Course(worlds, [*starts, length], times, cuts)


@given(_courses())
def test_a_run_costs_the_time_of_its_ranks(
    tmp_path_factory: pytest.TempPathFactory, course: _Course
) -> None:
    run = f"r{next(NUMBERS)}"
    with Store.open(f"sqlite:///{_database(tmp_path_factory)}") as store:
        key = add_run(store, run, state="running", nproc=max(course.worlds))
        for attempt, (first, end) in enumerate(pairwise(course.starts)):
            times = {step: course.times[step] for step in range(first, end)}
            trained(store, run, course.worlds[attempt], times, attempt)
        worker_s = sum(sum(step_s) for _, step_s, _ in course.times)
        waited_s = sum(
            max(compute_s) - each for _, _, compute_s in course.times for each in compute_s
        )
        whole = pytest.approx((worker_s, waited_s), rel=1e-9, abs=1e-9)
        assert spent(store, key) == whole
        with store.read() as connection:
            parts = [
                days.spent(connection, key, (first, end - 1))
                for first, end in pairwise([0, *course.cuts, course.starts[-1]])
            ]
            assert days.spent(connection, key, (None, None)) == whole
        assert (sum(worker for worker, _ in parts), sum(waited for _, waited in parts)) == whole


_MADE: list[Path] = []


def _database(factory: pytest.TempPathFactory) -> Path:
    """One for all examples: tables take long to make."""
    if not _MADE:
        _MADE.append(factory.mktemp("costs") / "paceline.db")
    return _MADE[0]


@pytest.mark.parametrize("steps", [4, 400])
def test_a_run_that_shrinks_costs_its_fewer_ranks_from_then_on(store: Store, steps: int) -> None:
    key = add_run(store, "r", state="running", nproc=1, nodes_max=3)
    half = steps // 2
    trained(store, "r", 3, {k: (DAY_S + k, [2.0] * 3, [1.0, 1.0, 2.0]) for k in range(half)})
    smaller = {k: (DAY_S + k, [2.0] * 2, [1.0, 2.0]) for k in range(half, steps)}
    trained(store, "r", 2, smaller, attempt=1)
    later = steps - half
    assert spent(store, key) == (
        pytest.approx(3 * 2.0 * half + 2 * 2.0 * later),
        pytest.approx(2 * 1.0 * half + 1.0 * later),
    )


@pytest.mark.parametrize("steps", [4, 400])
def test_where_ranks_do_not_wait_for_each_other_no_waiting_counts(store: Store, steps: int) -> None:
    key = add_run(store, "r", state="running", nproc=2)
    half = steps // 2
    trained(store, "r", 2, {k: (DAY_S + k, [1.0, 1.0], [0.5, 1.0]) for k in range(steps)})
    counts = [[1, 1]] * half
    relaxed = Averaging(parameters=AveragingRules(every=4))
    together = adopted(0, 0, counts=counts)
    apart = adopted(1, half, counts=counts, synchroniser=relaxed)
    telemetry.write(store, [("r", together), ("r", apart)])
    assert spent(store, key) == (pytest.approx(2.0 * steps), pytest.approx(0.5 * half))


def test_steps_that_are_trained_again_count_once(store: Store) -> None:
    key = add_run(store, "r", state="running", nproc=2)
    trained(store, "r", 2, {k: (DAY_S + k, [1.0, 1.0], [0.5, 1.0]) for k in range(10)})
    again = {k: (DAY_S + 20 + k, [2.0, 2.0], [1.0, 1.0]) for k in range(5, 10)}
    trained(store, "r", 2, again, attempt=1)
    assert spent(store, key) == (pytest.approx(5 * 2.0 + 5 * 4.0), pytest.approx(5 * 0.5))


@pytest.mark.parametrize(
    ("amount", "currency", "words"),
    [
        (-1.0, "EUR", "amount is -1.0: give 0 or more"),
        (float("nan"), "EUR", "amount is nan"),
        (float("inf"), "EUR", "amount is inf"),
        (1e6, "EUR", "less than 1,000,000"),
        (1.0, "", "currency is ''"),
        (1.0, "€", "currency is '€': give 1 to 10 letters, such as EUR"),
    ],
)
def test_what_is_no_price_is_refused(amount: float, currency: str, words: str) -> None:
    with pytest.raises(PriceError, match=words):
        Price(amount, currency)


def test_an_hour_of_a_worker_costs_the_price() -> None:
    assert Price(2.5, "EUR").of_time(1.5 * 3600.0) == 3.75
