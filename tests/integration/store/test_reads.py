"""Telemetry as the API shows it: figures by hand, thinning; over both databases."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import policies
from paceline.policies.predict.estimators import EstimatorPredictor
from paceline.policies.predict.linear import LinearPredictor
from paceline.wire import Message, RunState, State, StepBatch
from paceline_backend.insight import workers
from paceline_backend.store import Store, reads, runs, segments, telemetry
from paceline_backend.store.rollups.reading import RankChoice
from support.records import add_run, adopted, hello, record


def write(store: Store, run: str, *messages: Message) -> None:
    telemetry.write(store, [(run, message) for message in messages])


def columns(store: Store, key: int, **wanted: Any) -> dict[str, Any]:
    span, points = wanted.get("span", (None, None)), wanted.get("points", 1000)
    with store.read() as connection:
        return reads.step_columns(connection, key, span, points)


def test_metrics_by_hand(store: Store) -> None:
    key = add_run(store, "r", nproc=4)
    rows = [
        record(0, rank, load=load, compute_s=t, sync_s=s, ett_s=e, loss=loss, samples=n, step_s=0.5)
        for rank, (load, t, s, e, loss, n) in enumerate(
            [
                (10.0, 0.1, 0.31, 0.1, 1.0, 1),
                (20.0, 0.2, 0.21, 0.1, 2.0, 1),
                (30.0, 0.3, 0.11, 0.3, 3.0, 2),
                (40.0, 0.4, 0.01, 0.2, 4.0, 4),
            ]
        )
    ]
    write(store, "r", hello(world=4), StepBatch(rows))
    table = columns(store, key)
    assert (table["from"], table["to"], table["bucket"]) == (0, 0, 1)
    expected = {
        "compute_max": 0.4,
        "compute_min": 0.1,
        "compute_mean": 0.25,
        "se": 0.3 / 0.25,
        "sp": 0.3,
        "dif": float(np.std([10, 20, 30, 40], ddof=1)),
        "waste": 1 - 0.25 / 0.4,
        "ett_error": (0 + 0.5 + 0 + 0.5) / 4,
        "comm_s": 0.01,
        "loss": (1 + 2 + 6 + 16) / 8,
        "step_s": 0.5,
    }
    for name, value in expected.items():
        assert table[name] == [pytest.approx(value)], name
    with store.read() as connection:
        cells = reads.worker_step_columns(connection, key, (None, None), 1000)
    assert cells["wait_s"] == [[pytest.approx(w)] for w in (0.3, 0.2, 0.1, 0.0)]
    assert cells["share"] == [[pytest.approx(w)] for w in (0.1, 0.2, 0.3, 0.4)]


def test_one_rank_has_no_dif_and_equal_loads_have_none(store: Store) -> None:
    lone, equal = add_run(store, "lone", nproc=1), add_run(store, "equal")
    write(store, "lone", hello(world=1), StepBatch([record(0, 0)]))
    records = [record(0, rank, load=0.1 + 0.2, compute_s=0.0) for rank in (0, 1)]
    write(store, "equal", hello(), StepBatch(records))
    assert columns(store, lone)["dif"] == [None]
    assert columns(store, lone)["se"] == [0.0]
    table = columns(store, equal)
    assert table["dif"] == [pytest.approx(0.0, abs=1e-7)]
    assert table["se"] == [None], "no compute time: no ratio"


def many_steps(store: Store, count: int) -> int:
    key = add_run(store, "r")
    slow = {37: 9.0}  # one spike
    rows = [
        record(step, rank, compute_s=slow.get(step, 0.1) if rank else 0.1)
        for step in range(count)
        for rank in (0, 1)
    ]
    write(store, "r", hello(), StepBatch(rows))
    return key


def test_thinning_keeps_means_and_extremes(store: Store) -> None:
    key = many_steps(store, 100)
    raw = columns(store, key)
    thin = columns(store, key, points=11)
    assert raw["bucket"] == 1
    assert "se_min" not in raw
    assert thin["bucket"] == 10
    assert thin["step"] == list(range(0, 100, 10))
    for name in reads.METRICS:
        parts = np.array(raw[name]).reshape(10, 10)
        assert thin[name] == pytest.approx(parts.mean(1)), name
        assert thin[f"{name}_min"] == pytest.approx(parts.min(1)), name
        assert thin[f"{name}_max"] == pytest.approx(parts.max(1)), name
    assert thin["compute_max_max"][3] == 9.0
    with store.read() as connection:
        cells = reads.worker_step_columns(connection, key, (None, None), 11)
        only = reads.worker_step_columns(connection, key, (None, None), 11, RankChoice([1]))
    assert cells["compute_s_max"][1][3] == 9.0
    assert cells["compute_s"][1][3] == pytest.approx((9.0 + 9 * 0.1) / 10)
    assert cells["step"] == thin["step"]
    assert only["ranks"] == [1]
    assert only["compute_s"] == [cells["compute_s"][1]]


def test_ranges_include_both_ends(store: Store) -> None:
    key = many_steps(store, 20)
    table = columns(store, key, span=(5, 8))
    assert table["step"] == [5, 6, 7, 8]
    beyond = columns(store, key, span=(15, 99))
    assert (beyond["from"], beyond["to"]) == (15, 19)
    nothing = columns(store, key, span=(50, 99))
    assert (nothing["from"], nothing["step"]) == (None, [])


@given(first=st.integers(0, 10**9), length=st.integers(1, 10**7), points=st.integers(2, 5000))
def test_never_more_points_than_asked_for(first: int, length: int, points: int) -> None:
    last = first + length - 1
    bucket = reads.bucket_of(first, last, points)
    assert last // bucket - first // bucket + 1 <= points
    assert bucket == 1 or length > points, "thinned without need"


def test_records_of_incomplete_steps_show_as_cells_alone(store: Store) -> None:
    key = add_run(store, "r")
    write(store, "r", hello(), StepBatch([record(0, 0), record(0, 1), record(1, 1)]))
    assert columns(store, key)["step"] == [0]
    with store.read() as connection:
        cells = reads.worker_step_columns(connection, key, (None, None), 1000)
    assert cells["step"] == [0, 1]
    assert cells["compute_s"] == [[0.1, None], [0.2, 0.2]]
    assert cells["wait_s"][1] == [0.0, None]


def test_workers(store: Store) -> None:
    key = add_run(store, "r")
    speeds = [(1e-3, 0.01), (3e-3, 0.02)]
    rows = []
    for step in range(20):
        for rank, (a, b) in enumerate(speeds):
            load = 10.0 + 7 * step % 20 + rank
            if (step, rank) != (7, 0):  # lost on the way
                rows.append(record(step, rank, load=load, compute_s=a * load + b, ett_s=None))
    write(store, "r", hello(), StepBatch(rows))
    with store.read() as connection:
        first, second = workers.summary(connection, key, 10, policies.make("bsp").predictor)
        all_steps = workers.summary(connection, key, 20, None)
    assert (first["missing"], second["missing"]) == (0, 0)
    assert [rank["missing"] for rank in all_steps] == [1, 0]
    assert (first["steps"], first["last_step"]) == (10, 19)
    for worker, (a, b) in zip((first, second), speeds, strict=True):
        # The predictor shares b out between b and c, as every step has four samples.
        forecast = worker["a"] * 21.5 + worker["c"] * 4 + worker["b"]
        assert forecast == pytest.approx(a * 21.5 + b, rel=2e-3)
        assert worker["a"] == pytest.approx(a, rel=0.3)
        assert worker["load"] == pytest.approx(21.5 + worker["rank"])
        assert worker["ett_s"] is None
        assert worker["ett_error"] is None
    assert (first["slowest_share"], second["slowest_share"]) == (0.0, 1.0)
    assert first["share"] + second["share"] == pytest.approx(1.0)


def test_models_of_workers_leave_out_steps_in_which_a_rank_recompiled(store: Store) -> None:
    key = add_run(store, "r")
    rows = [
        record(step, rank, load=10.0 + step % 5, compute_s=0.1 * (10 + step % 5), recompiles=0)
        if (step, rank) not in {(18, 1), (19, 1)}
        else record(step, rank, load=10.0 + step % 5, compute_s=30.0, recompiles=1)
        for step in range(20)
        for rank in range(2)
    ]
    write(store, "r", hello(), StepBatch(rows))
    predictor = policies.make("chronica").predictor
    with store.read() as connection:
        first, second = workers.summary(connection, key, 20, predictor)
    assert second["a"] == pytest.approx(first["a"], rel=0.01)


def test_models_of_workers_are_fitted_quickly(store: Store) -> None:
    """A request must not wait for scikit-learn's fits of each rank."""

    def refuses() -> Any:
        raise AssertionError

    key = add_run(store, "r")
    rows = [
        record(step, rank, load=10.0 + 7 * step % 20, compute_s=0.1 * (1 + rank + step % 3))
        for step in range(20)
        for rank in range(2)
    ]
    write(store, "r", hello(), StepBatch(rows))
    with store.read() as connection:
        made = workers.summary(connection, key, 20, EstimatorPredictor({"slow": refuses}))
        assert made == workers.summary(connection, key, 20, LinearPredictor(64, "sum"))
    assert made[0]["a"] is not None


def test_a_rank_far_behind_is_left_out_of_the_last_steps(store: Store) -> None:
    key = add_run(store, "r", nproc=3)
    here = [record(step, rank) for step in range(30) for rank in (0, 2)]
    write(store, "r", hello(world=3), StepBatch([*here, record(0, 1)]))
    with store.read() as connection:
        summary = workers.summary(connection, key, 10, policies.make("bsp").predictor)
        every = workers.summary(connection, key, 30, None)
    assert [rank["rank"] for rank in summary] == [0, 2]
    assert [rank["missing"] for rank in every] == [0, 0, 0], "late, not lost"


def test_a_run_that_has_grown_is_nothing_to_warn_about(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    key = add_run(store, "r", nproc=3)
    write(store, "r", hello(world=2), adopted(77, 0))
    alike, grown = hello(world=2, attempt=1, step=2), hello(world=3, attempt=1, step=2)
    with store.read() as connection:
        last = segments.before(connection, key, alike)
        assert last is not None
        assert last.seq == 77
        assert segments.before(connection, key, grown) is None
    assert "left out" not in caplog.text


def test_workers_of_an_attempt_with_fewer_ranks_than_the_one_before(store: Store) -> None:
    key = add_run(store, "r", nproc=3)
    before = [record(step, rank) for step in range(40) for rank in range(3)]
    write(store, "r", hello(world=3), StepBatch(before))
    after = [record(step, rank, attempt=1) for step in range(20, 30) for rank in range(2)]
    write(store, "r", hello(world=2, attempt=1, step=20), StepBatch(after))
    predictor = policies.make("bsp").predictor
    with store.read() as connection:
        newest = workers.summary(connection, key, 5, predictor)
        both = workers.summary(connection, key, 25, predictor)
    assert [rank["rank"] for rank in newest] == [0, 1]
    assert [(rank["rank"], rank["last_step"]) for rank in both] == [(0, 29), (1, 29), (2, 19)]


def test_pages_are_stable_under_inserts(store: Store) -> None:
    made = [add_run(store, f"run-{i}", policy="bsp" if i % 2 else "chronica") for i in range(5)]
    assert len(made) == 5
    items, cursor = runs.page(store, limit=2)
    assert [item["id"] for item in items] == ["run-4", "run-3"]
    add_run(store, "run-5")
    items, cursor = runs.page(store, limit=2, cursor=cursor)
    assert [item["id"] for item in items] == ["run-2", "run-1"]
    items, cursor = runs.page(store, limit=2, cursor=cursor)
    assert ([item["id"] for item in items], cursor) == (["run-0"], None)


def test_run_details_come_from_hello_and_steps(store: Store) -> None:
    add_run(store, "r")
    before = runs.get(store, "r")
    assert (before["dif"], before["epoch"], before["controller"]) == (None, None, None)
    emulated = {"a_s": [1.0, 2.0], "b_s": [0.0, 0.0]}
    rows = [record(step, rank) for step in range(6) for rank in (0, 1)]
    write(store, "r", hello(emulated=emulated), StepBatch(rows))
    row = runs.get(store, "r")
    assert row["dif"] == pytest.approx(np.std(np.arange(1, 33), ddof=1))
    assert (row["epoch"], row["step"]) == (1, 5)
    assert (row["emulated"], row["epochs"], row["device"]) == (emulated, 3, "cpu")
    write(store, "r", hello(attempt=1, epochs=9))
    assert runs.get(store, "r")["epochs"] == 9, "a new attempt's Hello counts"


def test_only_an_assumed_end_gives_way_to_a_later_word(store: Store) -> None:
    now = time.time()
    for name in ("lost", "stopped"):
        add_run(store, name, node="n", state="running")
        with store.write() as connection:
            assert runs.end(connection, name, "failed", "silent", lost=name == "lost")
            assert not runs.end(connection, name, "stopped", "again")
        assert math.isclose(runs.get(store, name)["ended_at"], now, abs_tol=60)
        write(store, name, RunState(State.RUNNING, now, "n"))
        row = runs.get(store, name)
        assert row["state"] == ("running" if name == "lost" else "failed")
        assert (row["ended_at"], row["message"]) == (
            (None, None) if name == "lost" else (row["ended_at"], "silent")
        )
        write(store, name, RunState(State.FINISHED, now + 100, "n", exit_code=0))
        write(store, name, RunState(State.FAILED, now + 200, "n", exit_code=1, message="late"))
        write(store, name, RunState(State.RUNNING, now + 300, "n"))
    row = runs.get(store, "lost")
    assert (row["state"], row["message"], row["exit_code"]) == ("finished", None, 0)
    assert row["ended_at"] == now + 100
    row = runs.get(store, "stopped")
    assert (row["state"], row["message"]) == ("failed", "silent")


# An attempt that starts again at an earlier step.


def rerun(store: Store, now: float, *, adopts: bool = True) -> int:
    """Attempt 0 came to step 100; attempt 1 began at 50 and is at 60."""
    key = add_run(store, "r", node="old", state="running", created_at=now - 1_000)
    write(store, "r", hello(started_at=now - 900), adopted(0, 0))
    segments = [adopted(seq, 2 * seq) for seq in range(1, 51)]
    old = [record(step, rank, ended_at=now - 600) for step in range(101) for rank in (0, 1)]
    write(store, "r", *segments, StepBatch(old))
    write(store, "r", hello(attempt=1, step=50, epoch=12, started_at=now - 500))
    if adopts:
        write(store, "r", *(adopted(i, 50 + 2 * i, attempt=1) for i in range(6)))
        again = [
            record(step, rank, attempt=1, seq=step - 50, ended_at=now)
            for step in range(50, 61)
            for rank in (0, 1)
        ]
        write(store, "r", StepBatch(again))
    return key


def test_a_restarted_run_is_where_its_latest_attempt_is(store: Store) -> None:
    key = rerun(store, time.time())
    row = runs.get(store, "r")
    assert (row["epoch"], row["step"]) == (15, 60)
    with store.read() as connection:
        ranks = workers.summary(connection, key, 20, None)
    assert [(rank["last_step"], rank["steps"], rank["missing"]) for rank in ranks] == [
        (60, 20, 0),
        (60, 20, 0),
    ]


def test_a_restarted_run_that_has_not_trained_yet_is_where_it_starts(store: Store) -> None:
    rerun(store, time.time(), adopts=False)
    row = runs.get(store, "r")
    assert (row["epoch"], row["step"]) == (12, 49)


def test_a_run_restarted_from_nothing_is_at_its_beginning(store: Store) -> None:
    rerun(store, time.time())
    write(store, "r", hello(attempt=2))
    assert runs.get(store, "r")["step"] is None
    write(store, "r", adopted(0, 0, attempt=2))
    write(store, "r", StepBatch([record(0, rank, attempt=2) for rank in (0, 1)]))
    assert runs.get(store, "r")["step"] == 0


def test_coasts_are_merged(store: Store) -> None:
    key = add_run(store, "r")
    sources = dict.fromkeys((1, 2, 3, 10, 40, 41, 90), "coast")
    plans = [adopted(seq, 2 * seq, source=sources.get(seq, "controller")) for seq in range(100)]
    rows = [record(step, rank) for step in range(200) for rank in (0, 1)]
    write(store, "r", hello(), *plans, StepBatch(rows))
    with store.read() as connection:
        exact = [[2, 7], [20, 21], [80, 83], [180, 181]]
        assert reads.coasts(connection, key, (None, None), 1000) == exact
        assert reads.coasts(connection, key, (7, 80), 1000) == [[6, 7], [20, 21], [80, 81]]
        assert reads.coasts(connection, key, (8, 79), 1000) == exact[1:2]
        coarse = reads.coasts(connection, key, (None, None), 5)
        assert coarse == [[2, 21], [80, 83], [180, 181]]
    unreported = add_run(store, "unreported")
    write(store, "unreported", hello(), *plans)
    with store.read() as connection:
        assert reads.coasts(connection, unreported, (None, None), 5) == coarse
