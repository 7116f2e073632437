"""What ranks did within a few steps, from a real server."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from paceline_backend.store import Store
from support.records import add_run
from support.shown import SLOW, STEPS, slow_rank

RUN = "3f9a1c07be52"


def timeline(client: httpx.Client, **query: Any) -> dict[str, Any]:
    answer = client.get(f"/api/v1/runs/{RUN}/timeline", params=query)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_the_newest_steps_phase_by_phase(store: Store, client: httpx.Client) -> None:
    slow_rank(store)
    shown = timeline(client, ranks="0,3")
    assert shown["step"] == [STEPS - 3, STEPS - 2, STEPS - 1]
    assert shown["ranks"] == [0, 3]
    assert shown["compute_s"] == [pytest.approx([0.1] * 3)] * 2


def test_the_slow_rank_computes_while_others_wait(store: Store, client: httpx.Client) -> None:
    slow_rank(store)
    shown = timeline(client, ranks=f"0,{SLOW}", **{"from": 10, "to": 11})
    assert shown["compute_s"] == [pytest.approx([0.1, 0.1]), pytest.approx([0.3, 0.3])]
    assert shown["wait_s"] == [pytest.approx([0.2, 0.2]), pytest.approx([0.0, 0.0])]
    assert shown["reduce_s"] == [pytest.approx([0.02, 0.02])] * 2
    phases = ("compute_s", "wait_s", "reduce_s", "rest_s")
    for row in (0, 1):  # from when the batch is there, a rank's phases fill the step
        assert sum(shown[name][row][0] for name in phases) == pytest.approx(0.34)
        assert shown["began_at"][row][1] - shown["began_at"][row][0] == pytest.approx(0.34)


def test_a_rank_without_a_record_is_null(store: Store, client: httpx.Client) -> None:
    slow_rank(store)
    shown = timeline(client, ranks="0,9", **{"from": 10, "to": 10})
    assert shown["compute_s"] == [pytest.approx([0.1]), [None]]


def test_a_run_without_steps_has_an_empty_timeline(store: Store, client: httpx.Client) -> None:
    add_run(store, RUN)
    assert timeline(client, ranks="0")["compute_s"] == [[None]]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"ranks": ",".join(map(str, range(65)))}, "ranks"),
        ({"ranks": "0", "from": 0, "to": 50}, "to"),
        ({"ranks": "0", "from": 5, "to": 4}, "to"),
        ({}, "ranks"),
        ({"ranks": "a"}, "ranks"),
    ],
)
def test_what_it_refuses(
    store: Store, client: httpx.Client, query: dict[str, Any], field: str
) -> None:
    slow_rank(store)
    answer = client.get(f"/api/v1/runs/{RUN}/timeline", params=query)
    assert answer.status_code == 422
    assert field in str(answer.json())
