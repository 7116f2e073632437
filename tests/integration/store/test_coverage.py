"""Which samples each epoch used, from hand-made plans and records; over both databases."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from paceline.wire import Message, RunState, State, StepBatch
from paceline_backend.store import Store, telemetry
from paceline_backend.store.coverage import coverage
from support.records import add_run, adopted, hello, pack_indices, record


def write(store: Store, run: str, *messages: Message) -> None:
    telemetry.write(store, [(run, message) for message in messages])


# Coverage. Data set of 8 samples, two ranks, global batch 4: two steps an epoch, one segment each.


def plan(seq: int, step: int, parts: list[list[int]], end: bool, **fields: Any) -> Message:
    counts, indices = pack_indices([[np.array(part) for part in parts]])
    epoch = fields.pop("epoch", step // 2)
    return adopted(seq, step, counts=counts, indices=indices, epoch=epoch, epoch_end=end, **fields)


def two(step: int, segment: int, attempt: int = 0) -> StepBatch:
    both = [
        record(step, rank, segment=segment, attempt=attempt, epoch=step // 2) for rank in (0, 1)
    ]
    return StepBatch(both)


SIZES = np.ones(8).tobytes()
FIRST, SECOND = [[0, 1, 2], [3]], [[4], [5, 6, 7]]


def covered(store: Store, key: int) -> dict[str, Any]:
    with store.read() as connection:
        return coverage(connection, key)


def start(store: Store, **fields: Any) -> int:
    key = add_run(store, "r")
    write(store, "r", hello(sizes=SIZES, global_batch=4, **fields))
    return key


def test_coverage_exact(store: Store) -> None:
    key = start(store)
    assert covered(store, key) == {"epochs": [], "exact": False, "dropped": 0}
    write(store, "r", plan(0, 0, FIRST, False), plan(1, 1, SECOND, True), two(0, 0))
    write(store, "r", plan(2, 2, SECOND, False), two(1, 1), two(2, 2))
    covering = covered(store, key)
    assert covering["exact"]
    assert covering["epochs"][0] == {
        "epoch": 0,
        "samples": 8,
        "used": 8,
        "distinct": 8,
        "missing": 0,
        "duplicated": 0,
        "complete": True,
        "exact": True,
        "dropped": 0,
    }
    last = covering["epochs"][1]
    assert (last["used"], last["missing"], last["complete"], last["exact"]) == (4, 4, False, True)


def test_coverage_sees_a_record_that_is_missing(store: Store) -> None:
    key = start(store)
    lone = StepBatch([record(1, 0, segment=1, epoch=0)])
    write(store, "r", plan(0, 0, FIRST, False), plan(1, 1, SECOND, True), two(0, 0), lone)
    assert covered(store, key)["exact"], "it may still come"
    write(store, "r", plan(2, 2, FIRST, False), StepBatch([record(2, 0, segment=2, epoch=1)]))
    assert covered(store, key)["exact"], "also after the other rank's next one"
    write(store, "r", StepBatch([record(2, 1, segment=2, epoch=1)]))
    covering = covered(store, key)
    assert not covering["exact"]
    assert (covering["epochs"][0]["distinct"], covering["epochs"][0]["missing"]) == (5, 3)


def test_an_epoch_is_complete_when_its_last_step_is_reported(store: Store) -> None:
    key = start(store)
    write(store, "r", plan(0, 0, FIRST, False), two(0, 0), plan(1, 1, SECOND, True))
    covering = covered(store, key)
    assert (covering["epochs"][0]["complete"], covering["exact"]) == (False, True)
    write(store, "r", plan(2, 2, FIRST, False))
    covering = covered(store, key)
    assert (covering["epochs"][0]["complete"], covering["exact"]) == (False, True)
    write(store, "r", two(1, 1))
    covering = covered(store, key)
    assert (covering["epochs"][0]["complete"], covering["exact"]) == (True, True)


def test_an_epoch_is_not_complete_while_a_rank_has_reported_nothing(store: Store) -> None:
    """Its records may be on their way, though the other rank is an epoch ahead."""
    key = start(store)
    write(store, "r", plan(0, 0, FIRST, False), plan(1, 1, SECOND, True), plan(2, 2, FIRST, False))
    write(store, "r", StepBatch([record(step, 0, segment=step) for step in range(3)]))
    covering = covered(store, key)
    assert (covering["epochs"][0]["complete"], covering["exact"]) == (False, True)
    write(store, "r", StepBatch([record(step, 1, segment=step) for step in range(3)]))
    covering = covered(store, key)
    assert (covering["epochs"][0]["complete"], covering["exact"]) == (True, True)


@pytest.mark.parametrize("state", ["finished", "failed"])
def test_the_end_of_a_run_settles_what_is_missing(store: Store, state: str) -> None:
    """A run that finished trained all that it adopted; one that failed perhaps not its last."""
    key = start(store)
    write(store, "r", plan(0, 0, FIRST, False), two(0, 0), plan(1, 1, SECOND, True))
    write(store, "r", RunState(State(state), 200.0, "n"))
    assert covered(store, key)["exact"] == (state == "failed")
    write(store, "r", plan(2, 2, FIRST, False))
    assert not covered(store, key)["exact"]


def test_coverage_sees_a_whole_epoch_that_is_missing(store: Store) -> None:
    key = start(store)
    write(store, "r", plan(0, 0, FIRST, False), plan(1, 1, SECOND, True), two(0, 0), two(1, 1))
    write(store, "r", plan(4, 4, FIRST, False), two(4, 4))
    covering = covered(store, key)
    assert [epoch["epoch"] for epoch in covering["epochs"]] == [0, 1, 2]
    assert (covering["epochs"][1]["used"], covering["epochs"][1]["missing"]) == (0, 8)
    assert not covering["exact"]


def test_coverage_sees_that_the_first_epoch_is_missing(store: Store) -> None:
    key = start(store)
    write(store, "r", plan(2, 2, FIRST, False), two(2, 2))
    covering = covered(store, key)
    assert [epoch["exact"] for epoch in covering["epochs"]] == [False, True]


def test_coverage_sees_a_sample_used_twice(store: Store) -> None:
    key = start(store)
    write(store, "r", plan(0, 0, FIRST, False), plan(1, 1, [[3], [5, 6, 7]], True))
    write(store, "r", two(0, 0), two(1, 1))
    covering = covered(store, key)["epochs"][0]
    assert (covering["used"], covering["duplicated"], covering["missing"]) == (8, 1, 1)
    assert not covering["exact"]


def test_an_epoch_left_early_is_not_exact(store: Store) -> None:
    key = start(store)
    write(store, "r", plan(0, 0, FIRST, False), plan(1, 1, FIRST, False, epoch=1))
    write(store, "r", two(0, 0), two(1, 1))
    assert [epoch["exact"] for epoch in covered(store, key)["epochs"]] == [False, True]


def test_dropping_the_last_batch_is_exact_when_asked_for(store: Store) -> None:
    key = add_run(store, "r")
    ten = np.ones(10).tobytes()
    write(store, "r", hello(sizes=ten, global_batch=4, drop_last=True))
    write(store, "r", plan(0, 0, FIRST, False), plan(1, 1, SECOND, True), two(0, 0), two(1, 1))
    covering = covered(store, key)
    assert (covering["epochs"][0]["missing"], covering["exact"]) == (2, True)


def test_an_attempt_from_the_start_undoes_the_one_before(store: Store) -> None:
    key = start(store)
    write(store, "r", plan(0, 0, FIRST, False), plan(1, 1, SECOND, True), two(0, 0), two(1, 1))
    write(store, "r", hello(attempt=1, sizes=SIZES, global_batch=4))
    write(store, "r", plan(0, 0, SECOND, False, attempt=1), two(0, 0, attempt=1))
    covering = covered(store, key)
    assert (covering["epochs"][0]["used"], covering["exact"]) == (4, True)
    write(store, "r", plan(1, 1, FIRST, True, attempt=1), two(1, 1, attempt=1))
    covering = covered(store, key)
    assert (covering["epochs"][0]["used"], covering["epochs"][0]["complete"]) == (8, True)
    assert covering["exact"]


def test_an_attempt_from_a_checkpoint_continues_the_one_before(store: Store) -> None:
    """Rank 1's record of step 0 died with it; the checkpoint knows that the step was trained."""
    key = start(store)
    write(store, "r", plan(0, 0, FIRST, False), plan(1, 1, SECOND, True))
    write(store, "r", StepBatch([record(0, 0, segment=0, epoch=0)]), two(1, 1))
    used = np.array([0, 1, 2, 3], "<u4").tobytes()
    again = hello(attempt=1, sizes=SIZES, global_batch=4, epoch=0, step=1, used=used)
    write(store, "r", again, plan(0, 1, SECOND, True, attempt=1, epoch=0))
    write(store, "r", two(1, 0, attempt=1))
    covering = covered(store, key)
    assert (covering["epochs"][0]["used"], covering["exact"]) == (8, True)


def test_a_streams_coverage_takes_memory_by_the_samples_that_were_used(store: Store) -> None:
    key = add_run(store, "r")
    write(store, "r", hello(sizes=b"", stream=True, global_batch=4))
    last = 10**8 - 1  # as somebody may report it who reaches the bus
    write(store, "r", plan(0, 0, FIRST, False), plan(1, 1, [[4], [5, 6, last]], True))
    write(store, "r", two(0, 0), two(1, 1))
    tracemalloc.start()
    try:
        epoch = covered(store, key)["epochs"][0]
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    counts = (epoch["samples"], epoch["used"], epoch["distinct"], epoch["missing"])
    assert counts == (last + 1, 8, 8, last - 7)
    assert most < 50e6


def test_a_resumed_run_starts_in_the_middle_of_an_epoch(store: Store) -> None:
    used = np.array([4, 5, 6, 7], "<u4").tobytes()
    key = start(store, epoch=3, step=7, used=used)
    write(store, "r", plan(0, 7, FIRST, True, epoch=3))
    write(store, "r", StepBatch([record(7, rank, segment=0, epoch=3) for rank in (0, 1)]))
    covering = covered(store, key)
    assert [epoch["epoch"] for epoch in covering["epochs"]] == [3]
    assert (covering["epochs"][0]["used"], covering["exact"]) == (8, True)
