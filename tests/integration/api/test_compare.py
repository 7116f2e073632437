"""Runs side by side: what their models reached, and what they cost."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from paceline.wire import Evaluation, NodeState, StepBatch
from paceline_backend.server.prices import Price
from paceline_backend.store import Store, runs, schema, telemetry
from paceline_backend.store.quality import target
from support.command_line import in_process
from support.records import add_run, adopted, hello, record
from support.web import serving

A, B = "3f9a1c07be52", "77b0aa11bb22"


def train(store: Store, run: str, *accuracies: float, step_s: float = 3.6, **values: float) -> None:
    """Two ranks on a node named as the run, 10 steps before each evaluation; rank 1 is slower.

    The run begins at 0, and an evaluation ends with the step before it.
    """
    state = NodeState(run, run, 8, 2**30, [], 1.0, "0", [run])
    telemetry.write(store, [("", state)])
    add_run(store, run, name=f"run {run}", started_at=0.0, state="finished", ended_at=1_000.0)
    count = 10 * len(accuracies)
    introduced = hello(placement=[run, run], global_batch=8, started_at=0.0)
    plan = adopted(0, 0, counts=[[4, 4]] * count)
    steps = [
        record(step, rank, compute_s=1.0 + rank, step_s=step_s, ended_at=step_s * (step + 1))
        for step in range(count)
        for rank in (0, 1)
    ]
    messages: list[Any] = [introduced, plan, StepBatch(steps)]
    for number, accuracy in enumerate(accuracies):
        step = 10 * number + 9
        measured = {"accuracy": accuracy, **values}
        at = step_s * (step + 1)
        messages.append(Evaluation(0, 0, step, step // 4, 8 * (step + 1), at, None, measured))
    telemetry.write(store, [(run, message) for message in messages])


def want(store: Store, run: str, metric: str, value: float, direction: str = ">=") -> None:
    with store.write() as connection:
        wanted = {"metric": metric, "value": value, "direction": direction}
        target.set_target(connection, runs.key_of(connection, run), wanted)


def rows(client: httpx.Client, *sides: str) -> dict[tuple[str, Any], dict[str, Any]]:
    """The rows by figure and metric; of a target, its metric."""
    answer = client.get("/api/v1/compare", params={"side": list(sides)})
    assert answer.status_code == 200, answer.text
    return {
        (row["figure"], (row["target"] or row)["metric"]): row
        for row in answer.json()["differences"]
    }


def values(row: dict[str, Any]) -> list[float | None]:
    return [None if value is None else round(value, 9) for value in row["values"]]


def test_last_and_best_of_each_evaluated_metric(client: httpx.Client, store: Store) -> None:
    train(store, A, 0.5, 0.7, 0.6, loss=2.0)
    train(store, B, 0.8, 0.4)
    seen = rows(client, A, B)
    assert values(seen["last", "accuracy"]) == [0.6, 0.4]
    assert values(seen["last", "loss"]) == [2.0, None]
    assert values(seen["best", "loss"]) == [2.0, None], "the least loss is the best"
    assert seen["best", "loss"]["changes"] == [None]
    # Nobody has said whether more is better.
    assert ("best", "accuracy") not in seen
    assert values(seen["least", "accuracy"]) == [0.5, 0.4]
    assert values(seen["greatest", "accuracy"]) == [0.7, 0.8]
    [change] = seen["last", "accuracy"]["changes"]
    assert change == {
        **{"value": pytest.approx(-0.2), "ratio": pytest.approx(-1 / 3)},
        **{"low": None, "high": None, "known": False, "better": None},
    }
    assert seen["step_s", None]["changes"][0]["low"] is not None
    want(store, B, "accuracy", 0.75)
    seen = rows(client, A, B)
    assert values(seen["best", "accuracy"]) == [0.7, 0.8]
    assert ("least", "accuracy") not in seen
    want(store, A, "accuracy", 0.75, "<=")
    assert ("least", "accuracy") in rows(client, A, B), "the targets disagree"


def test_parts_of_a_run_have_the_evaluations_after_their_steps(
    client: httpx.Client, store: Store
) -> None:
    train(store, A, 0.5, 0.7, 0.6)
    want(store, A, "accuracy", 0.65)
    seen = rows(client, f"{A}:0-9", f"{A}:10-29", f"{A}:25-28", A)
    assert values(seen["last", "accuracy"]) == [0.5, 0.6, None, 0.6]
    assert values(seen["best", "accuracy"]) == [0.5, 0.7, None, 0.7]
    # The time to target goes from the run's begin.
    assert values(seen["after_s", "accuracy"]) == [None, None, None, 72.0]
    assert not {name for name, _ in rows(client, f"{A}:0-9", f"{A}:10-29")} & {"after_s", "epoch"}


def test_time_to_a_target_is_told_of_every_run(client: httpx.Client, store: Store) -> None:
    train(store, A, 0.5, 0.7)
    train(store, B, 0.8, step_s=1.8)
    assert not [name for name, _ in rows(client, A, B) if name == "after_s"]
    want(store, A, "accuracy", 0.6)
    seen = rows(client, A, B)
    row = seen["after_s", "accuracy"]
    wanted = {"metric": "accuracy", "value": 0.6, "direction": ">=", "source": "evaluations"}
    assert row["target"] == wanted
    assert (row["unit"], row["metric"]) == ("s", None)
    assert values(row) == [72.0, 18.0]
    assert row["changes"][0]["value"] == pytest.approx(-54.0)
    assert values(seen["epoch", "accuracy"]) == [4.0, 2.0]
    assert values(seen["trained", "accuracy"]) == [160.0, 80.0]
    want(store, A, "accuracy", 0.75)
    assert values(rows(client, A, B)["after_s", "accuracy"]) == [None, 18.0]
    want(store, B, "accuracy", 0.6)
    answer = client.get("/api/v1/compare", params={"side": [A, B]}).json()["differences"]
    reached = [row for row in answer if row["figure"] == "after_s"]
    assert [row["target"]["value"] for row in reached] == [0.75, 0.6]
    assert [values(row) for row in reached] == [[None, 18.0], [72.0, 18.0]]


def test_held_out_losses_are_not_compared_with_losses_of_the_training(
    client: httpx.Client, store: Store
) -> None:
    """Rank 0 reports a training loss of 2 in each step; only B evaluates a loss."""
    train(store, A, *[0.5] * 10)
    train(store, B, 0.5, loss=1.5)
    want(store, B, "loss", 2.5, "<=")
    row = rows(client, B, A)["after_s", "loss"]
    assert (values(row), row["target"]["source"]) == ([36.0, None], "evaluations")
    want(store, B, "accuracy", 0.1)
    want(store, A, "loss", 2.5, "<=")
    row = rows(client, B, A)["after_s", "loss"]
    assert (values(row), row["target"]["source"]) == ([None, 360.0], "training")


def test_what_sides_cost(
    client: httpx.Client,
    store: Store,
    bus_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(store, A, 0.5, 0.7)
    train(store, B, 0.8, step_s=1.8)
    train(store, "virtual", 0.8)
    with store.write() as connection:
        virtual = schema.runs.c.id == "virtual"
        connection.execute(sa.update(schema.runs).where(virtual).values(backend="simulated"))
    assert not {name for name, _ in rows(client, A, B)} & {"cost", "waited_cost"}
    want(store, A, "accuracy", 0.6)
    with serving(store, bus_url, hour_price=Price(18.0, "USD")) as priced:
        seen = rows(priced, A, B, f"{A}:0-4", "virtual")
        main = in_process(monkeypatch, capsys)
        code, said, err = main("runs", "compare", A, B, "--server", str(priced.base_url))
    # A step of 3.6 s costs 3.6 cents, and one of two ranks waits for 1 s of it.
    assert values(seen["cost", None]) == [0.72, 0.18, 0.18, None]
    assert values(seen["waited_cost", None]) == [0.1, 0.05, 0.025, None]
    assert seen["cost", None]["unit"] == "USD"
    changes = seen["cost", None]["changes"]
    assert changes[0]["value"] == pytest.approx(0.18 - 0.72)
    assert changes[2] is None
    assert code == 0, err
    lines = {" ".join(line.split()) for line in said.splitlines()}
    assert "accuracy, last 0.7 0.8 0.1" in lines
    assert "accuracy, best 0.7 0.8 0.1" in lines
    assert "after_s, accuracy>=0.6 72 18 -54" in lines
    assert "cost 0.72 USD 0.18 USD -0.54 USD" in lines
    assert "waited_cost 0.10 USD 0.05 USD -0.05 USD" in lines
