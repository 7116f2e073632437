"""Metrics of steps and evaluations: combined over ranks, whatever the order in which they come."""

from __future__ import annotations

import math
import random
import time
from typing import Any

import httpx
import numpy as np
import pytest
import sqlalchemy as sa

from paceline.node.starting import progress
from paceline.wire import Evaluation, Hello, Message, MetricBatch, MetricRecord, StepBatch
from paceline_backend.store import Store, StoreRefusedError, attempts, runs, schema, telemetry
from paceline_backend.store.quality import evaluations, metrics, target
from paceline_backend.store.telemetry.handlers import SUM_UP_METRICS
from support.records import add_run, adopted, hello, record
from support.web import ANY, serving

V1 = "/api/v1"


def write(store: Store, *messages: Message) -> None:
    telemetry.write(store, [("r", message) for message in messages])


def logged(rank: int, step: int, weight: float, attempt: int = 0, **values: float) -> MetricBatch:
    return MetricBatch([MetricRecord(attempt, rank, step, weight, values)])


def evaluated(
    step: int, rank: int = 0, samples: int | None = None, attempt: int = 0, **values: float
) -> Evaluation:
    at = 1_000.0 + step + rank / 10
    trained = 8 * (step + 1)
    return Evaluation(attempt, rank, step, max(0, step) // 4, trained, at, samples, values)


def steps(*numbers: int, **fields: Any) -> StepBatch:
    return StepBatch([record(step, rank, **fields) for step in numbers for rank in range(2)])


def _hello_of(samples: int, **fields: Any) -> Hello:
    """Of so many samples; an incomplete last step is left out."""
    return hello(sizes=np.ones(samples).tobytes(), drop_last=True, **fields)


def columns(store: Store, points: int = 1000) -> dict[str, Any]:
    with store.read() as connection:
        key = runs.key_of(connection, "r")
        return metrics.columns(connection, key, (None, None), points)


def read(store: Store, **given: Any) -> list[evaluations.Evaluated]:
    row = runs.get(store, "r")
    with store.read() as connection:
        key = runs.key_of(connection, "r")
        spans = attempts.spans(connection, key, row["attempt"])
        return evaluations.read(connection, key, spans, **given)


def test_a_metric_is_weighted_over_ranks_as_the_loss_is(store: Store) -> None:
    """In any order, and told twice: ranks' messages come as they come."""
    messages: list[Message] = [hello(), adopted(0, 0)]
    for step in range(2):
        for rank, samples in enumerate((6, 2)):
            value = 10.0 * step + rank
            messages.append(StepBatch([record(step, rank, samples=samples, loss=value)]))
            messages.append(logged(rank, step, samples, accuracy=value))
    for seed in range(4):
        with store.write() as connection:
            connection.exec_driver_sql("DELETE FROM runs")
        add_run(store, "r")
        shuffled = [*messages, *messages[2:]]
        random.Random(seed).shuffle(shuffled)
        for message in shuffled:
            write(store, message)
        accuracy = columns(store)["metrics"]["accuracy"]
        assert accuracy["step"] == [0, 1]
        assert accuracy["value"] == pytest.approx([0.25, 10.25])
        with store.read() as connection:
            losses = connection.exec_driver_sql("SELECT loss FROM steps ORDER BY step").scalars()
            assert list(losses) == pytest.approx(accuracy["value"])


def test_metrics_end_with_the_newest_complete_step_and_ranks_may_log_none(store: Store) -> None:
    add_run(store, "r")
    write(store, hello(), adopted(0, 0), steps(0), StepBatch([record(1, 0)]))
    for step in range(2):
        write(store, logged(0, step, 4.0, rate=0.5, loud=math.nan))
    shown = columns(store)["metrics"]
    assert shown == {
        "loud": {"step": [0], "value": [None]},
        "rate": {"step": [0], "value": [0.5]},
    }


def test_no_metric_is_shown_before_a_step_is_complete(store: Store) -> None:
    add_run(store, "r")
    write(store, hello(), adopted(0, 0), StepBatch([record(0, 0)]), logged(0, 0, 4.0, rate=0.5))
    assert columns(store)["metrics"] == {"rate": {"step": [], "value": []}}


def test_a_later_attempt_takes_the_place_of_an_earlier_one(store: Store) -> None:
    add_run(store, "r", max_restarts=1)
    write(store, hello(), adopted(0, 0), steps(0))
    write(store, logged(0, 0, 4.0, accuracy=1.0), logged(1, 0, 4.0, accuracy=1.0))
    write(store, hello(attempt=1), adopted(0, 0, attempt=1), steps(0, attempt=1))
    write(store, logged(1, 0, 4.0, attempt=1, accuracy=0.5))
    write(store, logged(0, 0, 4.0, accuracy=1.0))  # told late
    assert columns(store)["metrics"]["accuracy"]["value"] == [0.5]


def test_metrics_of_a_step_are_summed_up_without_a_query_for_each_rank(store: Store) -> None:
    with store.read() as connection:
        sqlite = connection.dialect.name == "sqlite"
        explain = "EXPLAIN QUERY PLAN" if sqlite else "EXPLAIN"
        query = sa.text(f"{explain} {SUM_UP_METRICS.text}")
        rows = connection.execute(query, {"run": 1, "first": 0, "end": 1}).all()
    plan = "\n".join(str(row[-1]) for row in rows)
    assert "worker_metrics" in plan
    assert "CORRELATED" not in plan  # SQLite's word for it
    assert "SubPlan" not in plan  # that of Postgres


def test_names_of_a_run_are_bounded(store: Store) -> None:
    add_run(store, "r")
    write(store, hello(), adopted(0, 0), steps(0))
    for part in range(3):
        write(store, logged(0, 0, 1.0, **{f"m{part}_{k:02}": 1.0 for k in range(20)}))
    assert len(columns(store)["metrics"]) == 32
    too_many = logged(0, 0, 1.0, **{f"m{k}": 1.0 for k in range(33)})
    with pytest.raises(StoreRefusedError, match="values has 33 metrics: give at most 32"):
        write(store, too_many)
    with pytest.raises(StoreRefusedError, match="cannot name a metric"):
        write(store, logged(0, 0, 1.0, **{"a b": 1.0}))
    with pytest.raises(StoreRefusedError, match="rank 2 is out of range"):
        write(store, evaluated(0, rank=2, samples=1, accuracy=1.0))


def test_long_ranges_are_thinned_out(store: Store) -> None:
    add_run(store, "r")
    numbers = range(40)
    write(store, hello(), adopted(0, 0, counts=[[1, 1]] * 40), steps(*numbers))
    write(store, *(logged(0, step, 1.0, rate=float(step)) for step in numbers))
    answer = columns(store, points=9)
    assert answer["bucket"] == 5
    rate = answer["metrics"]["rate"]
    assert rate["step"] == [*range(0, 40, 5)]
    assert (rate["value"][0], rate["min"][0], rate["max"][0]) == (2.0, 0.0, 4.0)


def test_rank_0_counts_alone_or_ranks_by_their_samples(store: Store) -> None:
    add_run(store, "r")
    write(store, hello(), adopted(0, 0, counts=[[1, 1]] * 8))
    write(store, evaluated(1, accuracy=0.5), evaluated(1, rank=1, accuracy=0.9))
    write(store, evaluated(3, 1, samples=30, accuracy=1.0, loss=1.0))
    write(store, evaluated(3, 0, samples=10, accuracy=0.0, loss=math.inf))
    write(store, evaluated(3, 0, samples=10, accuracy=0.0, loss=math.inf))  # told twice
    first, second = read(store)
    assert (first.metrics, first.ranks, first.step, first.trained) == ({"accuracy": 0.5}, 1, 1, 16)
    assert (second.metrics, second.ranks) == ({"accuracy": 0.75, "loss": None}, 2)
    assert second.at == 1_003.1
    assert [each.step for each in read(store, limit=1)] == [3]
    assert [each.metrics for each in read(store, metric="loss")] == [{"loss": None}]


def test_what_a_later_attempt_undid_does_not_count(store: Store) -> None:
    add_run(store, "r", max_restarts=1)
    eight = [[1, 1]] * 8
    write(store, hello(), adopted(0, 0, counts=eight), evaluated(-1, accuracy=0.1))
    write(store, *(evaluated(step, accuracy=step / 10) for step in (1, 3, 5, 7)))
    write(store, hello(attempt=1, step=4), adopted(0, 4, counts=eight, attempt=1))
    write(store, evaluated(3, attempt=1, accuracy=0.31), evaluated(7, attempt=1, accuracy=0.71))
    assert [(each.step, each.metrics["accuracy"]) for each in read(store)] == [
        *((-1, 0.1), (1, 0.1), (3, 0.31), (7, 0.71))
    ]


def test_time_to_target_is_that_of_the_first_evaluation_that_meets_it(store: Store) -> None:
    key = add_run(store, "r", started_at=900.0)
    write(store, hello(), adopted(0, 0, counts=[[1, 1]] * 16))
    assert runs.get(store, "r")["target"] is None
    with store.write() as connection:
        wanted = {"metric": "accuracy", "value": 0.5, "direction": ">="}
        target.set_target(connection, key, wanted)
    write(store, evaluated(3, accuracy=0.4))
    row = runs.get(store, "r")
    assert row["target"] == {
        **wanted,
        **{"source": "evaluations", "met": None, "best": 0.4, "best_step": 3},
    }
    write(
        store,
        *(evaluated(3 + 4 * k, accuracy=value) for k, value in enumerate((0.4, 0.5, 0.3, 0.6))),
    )
    row = runs.get(store, "r")
    assert row["target"]["met"] == {
        **{"step": 7, "epoch": 1, "trained": 64, "at": 1_007.0, "value": 0.5},
        "after_s": pytest.approx(1_007.0 - row["started_at"]),
    }
    assert (row["target"]["best"], row["target"]["best_step"]) == (0.6, 15)
    assert row["evaluation"]["metrics"] == {"accuracy": 0.6}


def test_evaluations_of_a_run_that_ended_long_ago_are_read_once_for_its_target(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = add_run(store, "r", started_at=900.0)
    write(store, hello(), adopted(0, 0, counts=[[1, 1]] * 16), evaluated(3, accuracy=0.4))
    with store.write() as connection:
        wanted = {"metric": "accuracy", "value": 0.5, "direction": ">="}
        target.set_target(connection, key, wanted)
    read_all = evaluations.read
    asked: list[str | None] = []

    def noting(*given: Any, metric: str | None = None, **more: Any) -> Any:
        asked.append(metric)
        return read_all(*given, metric=metric, **more)

    monkeypatch.setattr(evaluations, "read", noting)

    def best() -> tuple[float | None, int]:
        """The best value, and how often it was looked for among all evaluations."""
        asked.clear()
        return runs.get(store, "r")["target"]["best"], asked.count("accuracy")

    def ended(ago_s: float) -> None:
        with store.write() as connection:
            values = {"state": "finished", "seen_at": time.time() - ago_s}
            connection.execute(sa.update(schema.runs).values(values))

    assert [best(), best()] == [(0.4, 1), (0.4, 1)], "it trains"
    ended(ago_s=10.0)
    assert [best(), best()] == [(0.4, 1), (0.4, 1)], "something may be on its way"
    ended(ago_s=100.0)
    assert [best(), best()] == [(0.4, 1), (0.4, 0)]
    write(store, evaluated(7, accuracy=0.6))  # from a node that was cut off
    assert best() == (0.6, 1)
    ended(ago_s=50.0)
    assert [best(), best()] == [(0.6, 1), (0.6, 0)]
    with store.write() as connection:
        target.set_target(connection, key, {**wanted, "direction": "<="})
    assert [best(), best()] == [(0.4, 1), (0.4, 0)]


# Epochs of 4 steps: 35 samples make no fifth one if an incomplete last step is left out.
@pytest.mark.parametrize("samples", (32, 35))
def test_the_training_loss_decides_where_no_evaluation_has_one(store: Store, samples: int) -> None:
    key = add_run(store, "r")
    write(store, _hello_of(samples, epochs=100), adopted(0, 0, counts=[[1, 1]] * 300))
    write(store, *(steps(step, loss=3.0 - step // 100) for step in range(300)))
    with store.write() as connection:
        target.set_target(connection, key, {"metric": "loss", "value": 2.0, "direction": "<="})
    wanted = runs.get(store, "r")["target"]
    assert (wanted["source"], wanted["best"]) == ("training", 1.0)
    met = {name: wanted["met"][name] for name in ("step", "epoch", "value", "trained", "at")}
    assert met == {"step": 199, "epoch": 49, "value": 2.0, "trained": 1_600, "at": 1_199.0}
    write(store, evaluated(299, loss=2.5))
    wanted = runs.get(store, "r")["target"]
    assert (wanted["source"], wanted["met"], wanted["best"]) == ("evaluations", None, 2.5)


@pytest.mark.parametrize("samples", (32, 35))
def test_when_a_run_ends_follows_from_its_steps_and_the_pause_between_epochs(
    store: Store, samples: int
) -> None:
    began = time.time()
    add_run(store, "r", state="running", started_at=began)
    write(store, _hello_of(samples, started_at=began), adopted(0, 0, counts=[[4, 4]] * 6))
    # Epochs have 4 steps of 0.5 s each, and 10 s lie between two.
    ends = [began + 0.5 * (step + 1) + (10.0 if step > 3 else 0.0) for step in range(6)]
    for step, end in enumerate(ends):
        write(store, steps(step, ended_at=end, step_s=0.5))
    row = runs.get(store, "r")
    # 6 of 12 steps are left, and the evaluations after this epoch and the next.
    assert row["eta_at"] == pytest.approx(ends[-1] + 6 * 0.5 + 2 * 10.0, abs=0.01)
    assert progress.of_run(row).steps == 12
    assert (row["jct_s"], row["queued_s"]) == (None, pytest.approx(began - 1.0))


def test_rest(store: Store, bus_url: str) -> None:
    add_run(store, "r", state="finished", created_at=80.0, ended_at=160.0)
    write(store, hello(), adopted(0, 0, counts=[[4, 4]] * 6), steps(0, 1))
    write(store, logged(0, 1, 4.0, rate=0.5), evaluated(1, accuracy=0.5))
    body = {"metric": "accuracy", "value": 0.45, "direction": ">=", "why": "to ship"}
    with serving(store, bus_url) as client:
        run = client.get(f"{V1}/runs/r")
        assert (run.json()["jct_s"], run.json()["queued_s"]) == (60.0, 20.0)
        assert client.get(f"{V1}/runs/r/evaluations").json() == [run.json()["evaluation"]]
        assert run.json()["evaluation"]["after_s"] == 901.0
        shown = client.get(f"{V1}/runs/r/metrics").json()
        assert shown["metrics"] == {"rate": {"step": [1], "value": [0.5]}}
        assert client.put(f"{V1}/runs/r/target", json=body).status_code == 428
        seen = {"If-Match": run.headers["etag"]}
        changed = client.put(f"{V1}/runs/r/target", json=body, headers=seen)
        assert changed.json()["target"]["met"]["after_s"] == 901.0
        forecast = client.get(f"{V1}/runs/r/whatif").json()
        reached = {name: changed.json()[name] for name in ("target", "evaluation")}
        assert forecast["quality"] == reached
        assert client.put(f"{V1}/runs/r/target", json=body, headers=seen).status_code == 412
        _refused(client, body | {"direction": ">"})
        _refused(client, body | {"metric": "a b"})
        gone = client.delete(f"{V1}/runs/r/target", headers=ANY)
        assert (gone.status_code, gone.json()["target"]) == (200, None)
        listed = client.get(f"{V1}/runs/r/audit").json()["items"]
    assert [each["action"] for each in listed] == ["run.target", "run.target"]
    assert listed[1]["details"]["target"]["value"] == 0.45


def _refused(client: httpx.Client, body: dict[str, Any]) -> None:
    assert client.put(f"{V1}/runs/r/target", json=body, headers=ANY).status_code == 422
