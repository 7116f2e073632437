"""REST answers whatever body it gets, and never with a fault of its own."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from paceline_backend.store import Store
from support.fuzz import COUNTS, json_variants
from support.records import add_run

V1 = "/api/v1"
RUN: dict[str, Any] = {
    "script": "/x/train.py",
    "args": ["--epochs", "3"],
    "nproc": 2,
    "policy": "chronica",
    "parameters": {"window": 32},
    "name": "one",
    "env": {"A": "b"},
    "max_restarts": 1,
    "launch": False,
}
BODIES: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/runs"): RUN,
    ("POST", "/runs/r/policy"): {"policy": "rna", "parameters": {"probes": 2}, "by": "me"},
    ("PUT", "/runs/r/auto"): {"mode": "recommend", "relaxed": True, "by": "me"},
    ("POST", "/runs/r/stop"): {"force": False},
}


@pytest.mark.parametrize("count", COUNTS)
def test_no_body_is_a_fault_of_the_server(client: httpx.Client, store: Store, count: int) -> None:
    add_run(store, "r")
    answered: dict[int, int] = {}
    for seed, ((method, path), good) in enumerate(BODIES.items()):
        for body in json_variants(good, count // len(BODIES) // 2, seed):
            answer = client.request(
                method, V1 + path, content=body, headers={"Content-Type": "application/json"}
            )
            assert answer.status_code < 500, (method, path, body[:500], answer.text)
            if answer.is_error:
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.json()["detail"]
            answered[answer.status_code] = answered.get(answer.status_code, 0) + 1
    assert {201, 400, 422} <= set(answered)
    assert client.get(f"{V1}/runs", params={"limit": 500}).status_code == 200, "what was stored"
