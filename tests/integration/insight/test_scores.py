"""`GET /forecasts/scores`: forecasts against outcomes, over all runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from paceline_backend.store import Store
from paceline_backend.store.outcomes.effects import RUN_SETTLE_S
from paceline_backend.store.schema import runs
from support.outcomes import keep_outcome
from support.records import add_run

PATH = "/api/v1/forecasts/scores"


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    """The database in both kinds."""
    with Store.open(database_url) as opened:
        yield opened


def listed(client: httpx.Client, **params: Any) -> list[str]:
    return [item["run"] for item in client.get(PATH, params=params).json()["items"]]


def test_scores_of_all_runs_and_of_each_preset(store: Store, client: httpx.Client) -> None:
    keep_outcome(store, "a", 0.5, 0.5)
    keep_outcome(store, "b", 0.4, 0.5)
    keep_outcome(store, "c", 0.1, 0.1, policy="lbb", nodes=None, ranks=None)
    answer = client.get(PATH).json()
    assert answer["all"] == pytest.approx(
        {"count": 3, "inside": 2 / 3, "median_error": 0.0, "p90_error": 0.16, "bias": 0.2 / 3}
    )
    assert [(preset["policy"], preset["count"]) for preset in answer["presets"]] == [
        ("chronica", 2),
        ("lbb", 1),
    ]
    assert answer["next_cursor"] is None
    newest, outside, _ = answer["items"]
    assert (newest["run"], newest["policy"], newest["nodes"]) == ("c", "lbb", None)
    assert outside["forecast"] == pytest.approx({"saving": 0.4, "low": 0.37, "high": 0.43})
    assert (outside["inside"], outside["error"]) == (False, pytest.approx(0.2))


def test_nothing_yet(client: httpx.Client) -> None:
    answer = client.get(PATH).json()
    assert answer["all"] == dict.fromkeys(("inside", "median_error", "p90_error", "bias")) | {
        "count": 0
    }
    assert (answer["presets"], answer["items"]) == ([], [])


def test_filters(store: Store, client: httpx.Client) -> None:
    keep_outcome(store, "early", 0.5, 0.5, at=10.0)
    keep_outcome(store, "late", 0.5, 0.5, at=20.0, nodes=2)
    keep_outcome(store, "lbb", 0.5, 0.5, at=30.0, policy="lbb")
    keep_outcome(store, "simulated", 0.5, 0.5, at=40.0, backend="simulated")
    assert listed(client) == ["lbb", "late", "early"]
    assert listed(client, since=20.0) == ["lbb", "late"]
    assert listed(client, until=20.0) == ["early"]
    assert listed(client, nodes=2) == ["late"]
    assert listed(client, policy="lbb") == ["lbb"]
    assert listed(client, simulated=True) == ["simulated", "lbb", "late", "early"]
    assert client.get(PATH, params={"nodes": 0}).status_code == 422


def test_pages_follow_each_other_and_scores_stay(store: Store, client: httpx.Client) -> None:
    for number in range(5):
        keep_outcome(store, f"r{number}", 0.5, 0.5)
    seen: list[str] = []
    cursor = None
    for _ in range(3):
        params = {"limit": 2} | ({} if cursor is None else {"cursor": cursor})
        answer = client.get(PATH, params=params).json()
        assert answer["all"]["count"] == 5
        seen += [item["run"] for item in answer["items"]]
        cursor = answer["next_cursor"]
    assert (seen, cursor) == (["r4", "r3", "r2", "r1", "r0"], None)
    assert client.get(PATH, params={"cursor": "nonsense"}).status_code == 422


def test_only_final_effects_with_a_forecast_count(store: Store, client: httpx.Client) -> None:
    """What is known but may still change is biased: chance made it known early."""
    for run, state, noted in (("going", "running", 0.0), ("over", "finished", RUN_SETTLE_S)):
        key, end = add_run(store, run), time.time() - 2 * RUN_SETTLE_S
        with store.write() as connection:
            values = {"state": state, "ended_at": end if state == "finished" else None}
            connection.execute(sa.update(runs).where(runs.c.key == key).values(**values))
        keep_outcome(store, run, 0.5, 0.5, complete=False, noted_at=end + noted)
    keep_outcome(store, "no forecast", None, 0.5)
    keep_outcome(store, "few steps", 0.5, None)
    assert listed(client) == ["over"]
