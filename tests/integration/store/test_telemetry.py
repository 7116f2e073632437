"""Telemetry ends in the same tables, in whatever order and however often it comes."""

from __future__ import annotations

import math
import time
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.wire import (
    ALLREDUCE,
    Hello,
    Message,
    NodeState,
    Plan,
    RunState,
    State,
    StepBatch,
    StepRecord,
)
from paceline_backend.store import (
    Store,
    StoreRefusedError,
    attempts,
    audit,
    blobs,
    records,
    runs,
    schema,
    telemetry,
)
from paceline_backend.store.telemetry import steps
from support.records import add_run, adopted, hello, put_switch, record

_names = (f"run-{number}" for number in count())


def rows(store: Store, table: sa.Table, key: int | None = None) -> list[dict[str, Any]]:
    query = sa.select(table).order_by(*table.primary_key.columns)
    if key is not None:
        query = query.where(table.c.run == key)
    with store.read() as connection:
        return [dict(row) for row in connection.execute(query).mappings()]


def the_run(store: Store) -> dict[str, Any]:
    return rows(store, schema.runs)[0]


def send(store: Store, *messages: Message, run: str = "r") -> telemetry.Written:
    return telemetry.write(store, [(run, message) for message in messages])


# Steps


def test_records_become_rows_of_the_same_names(store: Store) -> None:
    key = add_run(store, "r")
    sent = record(3, 1, loss=None, ett_s=None)
    assert send(store, StepBatch([sent])).rows == 1
    assert rows(store, schema.worker_steps) == [msgspec.structs.asdict(sent) | {"run": key}]


def test_step_is_summed_up_when_its_last_rank_came(store: Store) -> None:
    key = add_run(store, "r")
    send(store, hello(world=2), StepBatch([record(0, 0), record(1, 0), record(1, 1)]))
    assert [row["step"] for row in rows(store, schema.steps)] == [1]
    send(store, StepBatch([record(0, 1, loss=5.0, samples=12)]))
    assert rows(store, schema.steps)[0] == {
        "run": key,
        "step": 0,
        "epoch": 0,
        "segment": 0,
        "workers": 2,
        "samples": 16,
        "load_sum": 81.0,
        "load_sq": 40.0**2 + 41.0**2,
        "compute_min": 0.1,
        "compute_max": 0.2,
        "compute_sum": pytest.approx(0.3),
        "sync_min": 0.02,
        "step_s": 0.3,
        "ett_error_sum": 0.5,
        "ett_count": 2,
        "loss": pytest.approx((2.0 * 4 + 5.0 * 12) / 16),
        "ended_at": 1_000.0,
    }


def test_steps_that_came_before_hello_are_summed_up_with_it(store: Store) -> None:
    add_run(store, "r")
    send(store, StepBatch([record(step, rank) for step in range(3) for rank in range(2)]))
    assert rows(store, schema.steps) == []
    send(store, hello(world=2))
    assert [row["step"] for row in rows(store, schema.steps)] == [0, 1, 2]


@pytest.mark.parametrize(("loss_mean", "loss"), [("samples", 4.6), ("size", 1.4), ("ranks", 3.0)])
def test_loss_is_the_mean_that_the_script_takes(store: Store, loss_mean: str, loss: float) -> None:
    add_run(store, "r")
    large = record(0, 0, samples=1, load=900.0, loss=1.0)
    small = record(0, 1, samples=9, load=100.0, loss=5.0)
    send(store, hello(world=2, loss_mean=loss_mean), StepBatch([large, small]))
    (step,) = rows(store, schema.steps)
    assert step["loss"] == pytest.approx(loss)


def test_a_mean_over_ranks_counts_ranks_without_samples_as_zero(store: Store) -> None:
    add_run(store, "r")
    filler = record(0, 1, samples=0, load=0.0, loss=7.0)
    send(store, hello(world=2, loss_mean="ranks"), StepBatch([record(0, 0, loss=1.0), filler]))
    (step,) = rows(store, schema.steps)
    assert step["loss"] == 0.5


def test_loss_that_is_not_a_number_is_unknown(store: Store) -> None:
    add_run(store, "r")
    diverged = record(0, 0, loss=math.nan, ett_s=math.inf)
    send(store, hello(world=1), StepBatch([diverged]))
    (row,) = rows(store, schema.worker_steps)
    assert (row["loss"], row["ett_s"]) == (None, None)


def test_extreme_numbers_do_not_keep_a_step_from_its_sums(store: Store) -> None:
    """Postgres raises where a double under- or overflows."""
    add_run(store, "r")
    huge = record(0, 0, load=9e99, compute_s=1e-300, ett_s=9e99, loss=1e-320, samples=7)
    tiny = record(0, 1, load=1e-300, compute_s=9e99, ett_s=1e-300, loss=-9e99, samples=0)
    send(store, hello(world=2), StepBatch([huge, tiny]))
    (step,) = rows(store, schema.steps)
    assert (step["load_sq"], step["ett_count"], step["loss"]) == (pytest.approx(8.1e199), 0, 0.0)


IMPOSSIBLE: list[dict[str, Any]] = [
    {"compute_s": math.nan},
    {"load": 1e101},
    {"load": math.inf},
    {"ended_at": -math.inf},
    {"step": 2**63},
    {"step": -(2**63) - 1},
    {"samples": 2**40 + 5},
    {"rank": 2**31},
    {"epoch": -(2**31) - 1},
    {"attempt": 2**15},
    {"memory_bytes": 2**64 - 1},
]


def test_impossible_record_is_refused_and_nothing_written(store: Store) -> None:
    add_run(store, "r")
    for bad in IMPOSSIBLE:
        records = [record(0, 0), msgspec.structs.replace(record(1, 0), **bad)]
        with pytest.raises(StoreRefusedError):
            send(store, hello(world=1), StepBatch(records))
        assert rows(store, schema.worker_steps) == [], bad
        assert the_run(store)["hello"] is None


def test_runs_in_one_batch_do_not_mix(store: Store) -> None:
    first, second = add_run(store, "one"), add_run(store, "two")
    messages: list[tuple[str, Message]] = [("one", hello(world=1)), ("two", hello(world=2))]
    messages += [(run, StepBatch([record(0, 0)])) for run in ("one", "two")]
    telemetry.write(store, messages)
    assert [row["run"] for row in rows(store, schema.worker_steps)] == [first, second]
    assert [row["run"] for row in rows(store, schema.steps)] == [first]


times = st.floats(0.001, 10.0)


@st.composite
def reports(draw: st.DrawFn) -> tuple[int, list[StepRecord], list[list[StepRecord]]]:
    """Ranks; what they did; and how it arrives: shuffled, repeated, cut into batches."""
    world = draw(st.integers(1, 4))
    done = [
        StepRecord(
            attempt=attempt,
            rank=rank,
            seq=step,
            step=step,
            epoch=step // 3,
            segment=step // 2,
            samples=draw(st.integers(0, 9)),
            load=draw(st.floats(0.0, 1e4)),
            data_s=draw(times),
            compute_s=draw(st.just(0.0) | times),
            sync_s=draw(times),
            step_s=draw(times),
            ended_at=draw(times),
            ett_s=draw(st.none() | times),
            loss=draw(st.none() | st.floats(-5.0, 5.0)),
        )
        for attempt in range(draw(st.integers(1, 3)))
        for step in range(draw(st.integers(1, 4)))
        for rank in range(world)
        if draw(st.integers(0, 9))
    ]
    sent = draw(st.permutations(done + [report for report in done if draw(st.booleans())]))
    cuts = sorted(draw(st.lists(st.integers(0, len(sent)), max_size=4)))
    parts = zip([0, *cuts], [*cuts, len(sent)], strict=True)
    return world, done, [sent[first:end] for first, end in parts]


def reference(world: int, done: list[StepRecord]) -> dict[int, dict[str, Any]]:
    """The sums of each step's latest records, in NumPy; steps of which ranks are missing: none."""
    latest: dict[tuple[int, int], StepRecord] = {}
    for report in sorted(done, key=attrgetter("attempt")):
        latest[report.step, report.rank] = report
    sums: dict[int, dict[str, Any]] = {}
    for step in {step for step, _ in latest}:
        of = [report for (at, _), report in latest.items() if at == step]
        if len(of) < world or len({report.attempt for report in of}) > 1:
            continue
        load, compute, samples = (
            np.array([getattr(report, name) for report in of])
            for name in ("load", "compute_s", "samples")
        )
        ett = np.array([np.nan if report.ett_s is None else report.ett_s for report in of])
        loss = np.array([np.nan if report.loss is None else report.loss for report in of])
        predicted = ~np.isnan(ett) & (samples > 0) & (compute > 1e-9)
        errors = np.abs(ett - compute)[predicted] / compute[predicted]
        weight = np.where(np.isnan(loss), 0, samples)
        sums[step] = {
            "workers": world,
            "samples": samples.sum(),
            "load_sum": load.sum(),
            "load_sq": (load**2).sum(),
            "compute_min": compute.min(),
            "compute_max": compute.max(),
            "compute_sum": compute.sum(),
            "sync_min": min(report.sync_s for report in of),
            "step_s": np.mean([report.step_s for report in of]),
            "ett_error_sum": errors.sum() if predicted.any() else None,
            "ett_count": predicted.sum(),
            "loss": np.nansum(loss * weight) / weight.sum() if weight.any() else None,
            "ended_at": max(report.ended_at for report in of),
        }
    return sums


@pytest.mark.parametrize("many", [1, steps._MANY])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(report=reports())
def test_any_order_and_repetition_gives_the_reference(
    store: Store, monkeypatch: pytest.MonkeyPatch, many: int, report: Any
) -> None:
    """Also where a step's rows are counted before they are summed up."""
    monkeypatch.setattr(steps, "_MANY", many)
    world, done, batches = report
    name = next(_names)
    key = add_run(store, name)
    send(store, hello(world=world), run=name)
    for batch in batches:
        send(store, StepBatch(batch), run=name)
    expected = reference(world, done)
    got = {row["step"]: row for row in rows(store, schema.steps, key)}
    assert got.keys() == expected.keys()
    for step, sums in expected.items():
        for column, value in sums.items():
            close = value if value is None else pytest.approx(float(value), rel=1e-9, abs=1e-12)
            assert got[step][column] == close, (step, column)


# Runs


def the_hello(store: Store) -> Hello | None:
    with store.read() as connection:
        return runs.hello(connection, runs.key_of(connection, "r"))


def test_hello_fills_the_run(store: Store) -> None:
    add_run(store, "r")
    first = hello(world=4, seed=9)
    send(store, first)
    run = the_run(store)
    expected = {"state": "running", "attempt": 0, "world": 4, "samples": 32, "started_at": 100.0}
    assert run | expected == run
    shown = runs.get(store, "r")
    assert (shown["global_batch"], shown["seed"]) == (8, 9)
    assert the_hello(store) == first


def test_latest_attempts_hello_stays(store: Store) -> None:
    add_run(store, "r")
    second = hello(attempt=1, started_at=200.0, epoch=1, step=4)
    send(store, second)
    send(store, hello())
    run = the_run(store)
    assert (run["attempt"], run["started_at"]) == (1, 100.0)
    assert the_hello(store) == second


def test_sizes_that_are_no_floats_are_refused(store: Store) -> None:
    add_run(store, "r")
    with pytest.raises(StoreRefusedError, match=r"run r: Hello\.sizes"):
        send(store, hello(sizes=b"123"))


LIFE = [
    RunState(State.STARTING, 10.0, "node-1"),
    RunState(State.RUNNING, 11.0, "node-1"),
    RunState(State.FAILED, 20.0, "node-1", exit_code=3, message="rank 2: ValueError", dropped=5),
]


def test_life_of_a_run_in_any_order(store: Store) -> None:
    for number, order in enumerate([(0, 1, 2), (2, 1, 0), (1, 0, 2), (2, 0, 1), (0, 2, 1, 0, 2)]):
        for at_once in (True, False):
            run = f"r{number}-{at_once}"
            key = add_run(store, run)
            lives = [LIFE[i] for i in order]
            for part in [lives] if at_once else [[each] for each in lives]:
                written = send(store, *part, run=run)
            [row] = [row for row in rows(store, schema.runs) if row["key"] == key]
            names = ("state", "node", "started_at", "ended_at", "exit_code", "message", "dropped")
            assert [row[name] for name in names] == [
                *("failed", "node-1", 11.0, 20.0, 3, "rank 2: ValueError", 5)
            ]
            assert written.ended == {run}


def test_an_end_is_final(store: Store) -> None:
    add_run(store, "r")
    send(store, RunState(State.FINISHED, 30.0, "n", exit_code=0))
    send(store, RunState(State.FAILED, 31.0, "n", exit_code=1, message="late", dropped=9), hello())
    run = the_run(store)
    assert (run["state"], run["ended_at"], run["exit_code"], run["message"], run["dropped"]) == (
        "finished",
        30.0,
        0,
        None,
        9,
    )


@pytest.mark.parametrize(
    ("asked", "epochs", "through", "state"),
    [
        (False, 1, False, "finished"),
        (True, 1, False, "stopped"),
        (True, 1, True, "finished"),  # it was through before anybody heard of the stop
        (True, None, True, "stopped"),
    ],
)
def test_a_script_that_ends_well_because_of_a_stop_has_not_finished(
    store: Store, asked: bool, epochs: int | None, through: bool, state: str
) -> None:
    add_run(store, "r")
    send(store, hello(epochs=epochs))
    if asked:
        with store.write() as connection:
            by = audit.Requester("ada", why="too hot")
            audit.record_change(connection, audit.RequestedChange("r", by), "run.stop")
    # The end comes with the last segment at the latest.
    end = RunState(State.FINISHED, 30.0, "n", exit_code=0)
    written = send(store, adopted(0, 0, epoch_end=through), end)
    run = the_run(store)
    assert (run["state"], run["exit_code"]) == (state, 0)
    assert run["message"] == ("stopped by ada: too hot" if state == "stopped" else None)
    assert written.ended == {"r"}
    send(store, end)
    assert the_run(store)["state"] == state


def test_text_with_nul_bytes_is_kept_without_them(store: Store) -> None:
    """No text of Postgres may hold one; what a script printed may."""
    add_run(store, "r")
    ended = RunState(State.FAILED, 9.0, "n\0", exit_code=1, message="rank 0: \0bad\0")
    odd = adopted(0, 0, policy="b\0sp", why="co\0ast")
    node = NodeState("n\0", "ho\0st", 1, 1, ["gp\0u"], 5.0, "0\0", ["r\0"])
    send(store, ended, odd, node)
    run = the_run(store)
    assert (run["state"], run["node"]) == ("failed", "n\N{REPLACEMENT CHARACTER}")
    assert run["message"] == "rank 0: \N{REPLACEMENT CHARACTER}bad\N{REPLACEMENT CHARACTER}"
    assert rows(store, schema.segments)[0]["policy"] == "b\N{REPLACEMENT CHARACTER}sp"
    assert rows(store, schema.nodes)[0]["id"] == "n\N{REPLACEMENT CHARACTER}"


def test_unknown_run_leaves_nothing(store: Store) -> None:
    add_run(store, "known")
    messages: list[tuple[str, Message]] = [
        ("ghost", hello()),
        ("ghost", StepBatch([record(0, 0)])),
        ("", adopted(0, 0)),
        ("known", StepBatch([record(0, 0)])),
    ]
    written = telemetry.write(store, messages)
    ghosts = frozenset({"ghost", ""})
    assert written == telemetry.Written(1, ghosts, frozenset(), {"known": "local"})
    assert len(rows(store, schema.runs)) == len(rows(store, schema.worker_steps)) == 1
    assert rows(store, schema.segments) == []


# Segments and nodes


def test_segments_are_kept_whole_and_once(store: Store) -> None:
    key = add_run(store, "r")
    first = adopted(0, 0, moved=3, across=2, plan_s=0.01, ett_s=[[0.1, 0.2], [0.1, 0.0]])
    send(store, first, first, adopted(1, 2, source="coast"))
    send(store, first)
    planned, coasted = rows(store, schema.segments)
    assert blobs.unpack(planned.pop("body"), Plan) == first.plan
    assert planned == {
        "run": key,
        "attempt": 0,
        "seq": 0,
        "epoch": 0,
        "first_step": 0,
        "steps": 2,
        "policy": "bsp",
        "version": 0,
        "source": "controller",
        "moved": 3,
        "plan_s": 0.01,
        "adopted_at": 50.0,
        "synchroniser": "allreduce",
        "why": "",
        "synchroniser_digest": ALLREDUCE.digest,
        "fallback": "",
        "across": 2,
    }
    assert (coasted["seq"], coasted["source"]) == (1, "coast")


def test_switch_takes_effect_with_its_earliest_segment(store: Store) -> None:
    key = add_run(store, "r")
    row = {"run": key, "policy": "bsp", "parameters": {}, "requested_at": 1.0, "requested_by": "me"}
    with store.write() as connection:
        for version in range(3):
            put_switch(connection, row | {"version": version})
    send(store, adopted(5, 10, version=1, at=60.0), adopted(4, 8, version=1, at=59.0))
    send(store, adopted(0, 0, version=0, at=50.0), adopted(6, 12, version=1, at=61.0))
    # Restarted from the first step, under the version in force.
    send(store, adopted(0, 0, version=1, at=90.0, attempt=1))
    effects = [(r["effective_step"], r["effective_at"]) for r in rows(store, schema.switches)]
    assert effects == [(0, 50.0), (8, 59.0), (None, None)]


def test_thousands_of_unused_attempts_are_no_burden(store: Store) -> None:
    """A launch after a lost host leaves their numbers out."""
    run = add_run(store, "r")
    for attempt, step in ((0, 0), (2000, 2), (5000, 4)):
        rows_of = [record(step + k, rank, attempt) for k in range(2) for rank in range(2)]
        plan = adopted(0, step, attempt=attempt)
        send(store, hello(attempt=attempt, step=step), plan, StepBatch(rows_of))
    with store.read() as connection:
        seen = records.newest_complete(
            connection, run, ("load",), (0, None), count=10, most_rows=100
        )
        spans = attempts.spans(connection, run, 5000)
    assert sorted({int(row[0]) for row in seen.table}) == [0, 1, 2, 3, 4, 5]
    assert len(spans) < 6
    assert runs.get(store, "r")["step"] == 5


def test_node_keeps_its_latest_state(store: Store) -> None:
    def state(at: float, **fields: Any) -> NodeState:
        return NodeState("n", "host", 8, 2**40, ["H200"], at, "0.1.0", **fields)

    telemetry.write(store, [("", state(10.0)), ("", state(11.0, runs=["a"]))])
    (node,) = rows(store, schema.nodes)
    assert node == {
        "id": "n",
        "registered_at": node["registered_at"],
        "heartbeat_at": node["registered_at"],
        "left": False,
        "report": {
            "hostname": "host",
            "cores": 8,
            "memory_bytes": 2**40,
            "gpus": ["H200"],
            "paceline": "0.1.0",
            "runs": ["a"],
            "gpu_states": [],
        },
        "signed": False,
        **dict.fromkeys(("only_run", "backend", "host", "check", "token", "seed")),
    }
    assert abs(node["heartbeat_at"] - time.time()) < 60
    telemetry.write(store, [("", state(5.0, left=True))])
    assert rows(store, schema.nodes)[0]["left"] is True


def test_sqlite_takes_many_rows_in_a_statement(tmp_path: Path) -> None:
    """Each statement lets other threads run: with one for each row, ingest waits for planning."""
    statements: list[str] = []
    with Store.open(f"sqlite:///{tmp_path / 'p.db'}") as store:
        add_run(store, "r")
        with store.write() as connection:
            driver: Any = connection.connection.driver_connection
            driver.set_trace_callback(statements.append)
        messages = [("r", hello()), *(("r", StepBatch([record(s, s % 2)])) for s in range(150))]
        assert telemetry.write(store, messages).rows == 150
        with store.read() as connection:
            rows = connection.execute(sa.select(schema.worker_steps.c.step)).scalars().all()
    assert sorted(rows) == list(range(150))
    inserts = [text for text in statements if "INTO worker_steps" in text]
    assert len(inserts) == 2 + 2 + 6  # of 64, 8 and 1 rows


def test_a_step_of_many_ranks_is_summed_up_once_all_are_there(store: Store) -> None:
    """Its rows come in many batches."""
    add_run(store, "r", nproc=100)
    telemetry.write(store, [("r", hello(world=100))])
    for first in range(0, 100, 30):
        assert rows(store, schema.steps) == []
        ranks = range(first, min(100, first + 30))
        batch = StepBatch([record(step, rank) for step in (3, 4, 6) for rank in ranks])
        telemetry.write(store, [("r", batch)])
    whole = rows(store, schema.steps)
    assert [(row["step"], row["workers"], row["load_sum"]) for row in whole] == [
        (step, 100, 40.0 * 100 + sum(range(100))) for step in (3, 4, 6)
    ]
    # Of a later attempt some ranks ran a step again: it never ran as a whole.
    telemetry.write(store, [("r", StepBatch([record(4, 0, attempt=1)]))])
    assert [row["step"] for row in rows(store, schema.steps)] == [3, 6]
