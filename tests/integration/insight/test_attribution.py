"""Who is slow, and why: over REST, and from the rows of a database."""

from __future__ import annotations

import httpx
import numpy as np
import pytest

from paceline.wire import StepBatch
from paceline_backend.insight.attribution import read_rows
from paceline_backend.store import Store, telemetry
from support.records import add_run, adopted, hello, record


def write(store: Store, steps: range, slow: float = 2.0, world: int = 4) -> None:
    step_s = 0.1 * slow + 0.02
    rows = []
    for step in steps:
        for rank in range(world):
            compute_s = 0.1 * (slow if rank == 3 else 1.0)
            times = {"compute_s": compute_s, "sync_s": step_s - compute_s, "step_s": step_s}
            ended_at = 1_000.0 + (step + 1) * (step_s + 0.001)  # the loader takes 1 ms
            rows.append(record(step, rank, load=40.0, ended_at=ended_at, **times))
    telemetry.write(store, [("r", hello(world)), ("r", StepBatch(rows))])


def test_rest_tells_the_verdict(store: Store, client: httpx.Client) -> None:
    add_run(store, "r", nproc=4)
    assert client.get("/api/v1/runs/r/verdict").json()["causes"] == []
    write(store, range(150))
    answer = client.get("/api/v1/runs/r/verdict", params={"from": 20}).json()
    assert (answer["from"], answer["to"], answer["steps"]) == (20, 149, 130)
    [cause] = answer["causes"]
    assert (cause["kind"], cause["ranks"], cause["who"]) == ("node", [3], "Rank 3")
    assert (cause["since"], cause["until"]) == (None, None)
    assert cause["cost_s"] == pytest.approx(130 * 0.1, rel=0.01)
    assert cause["worker_hours"] == pytest.approx(4 * cause["cost_s"] / 3600)
    assert cause["share"] == pytest.approx(cause["cost_s"] / answer["wall_s"])
    assert cause["to_do"].startswith("look at its machine")
    assert answer["words"] == cause["words"]
    assert client.get("/api/v1/runs/s/verdict").status_code == 404


def test_rows_of_steps_that_were_undone_do_not_count(database_url: str) -> None:
    with Store.open(database_url) as store:
        key = add_run(store, "r", nproc=2)
        again = [
            record(step, rank, attempt=1, compute_s=0.3) for step, rank in ((4, 0), (5, 0), (5, 1))
        ]
        old = [record(step, rank, compute_s=0.1) for step in range(10) for rank in (0, 1)]
        messages = [hello(), adopted(0, 0), StepBatch(old)]
        telemetry.write(store, [("r", message) for message in messages])
        messages = [
            hello(attempt=1, step=4),
            adopted(0, 4, attempt=1),
            adopted(1, 6, attempt=1),
            StepBatch([*again, record(6, 0, attempt=1)]),
        ]
        telemetry.write(store, [("r", message) for message in messages])
        with store.read() as connection:
            rows = read_rows(connection, key, (None, None))
    assert rows.step.tolist() == [0, 1, 2, 3, 4, 5], "step 6 lacks a rank"
    assert rows.compute_s[:, 0].tolist() == [0.1] * 4 + [0.3] * 2
    assert np.isnan(rows.compute_s[4, 1]), "what its first attempt did there was undone"
    assert rows.load[[0, 3, 5]].tolist() == [[40.0, 41.0]] * 3
