"""A misspelt query parameter is refused by name: ignored, it would answer another question."""

from __future__ import annotations

from typing import Any

import httpx

from support.web import ANY, application

OPEN = ("/healthz", "/readyz")  # a load balancer may add parameters of its own


def test_every_operation_refuses_an_unknown_parameter(client: httpx.Client) -> None:
    taken = []
    for path, methods in application(client).openapi()["paths"].items():
        for method in methods:
            answer = client.request(method, path, params={"stat": "running"}, headers=ANY)
            named = answer.status_code == 422 and answer.json()["errors"][0]["field"] == "stat"
            if not named and path not in OPEN:
                taken.append((method, path, answer.status_code))
    assert taken == []


def test_every_documented_parameter_is_known(client: httpx.Client) -> None:
    refused = []
    for path, methods in application(client).openapi()["paths"].items():
        for method, operation in methods.items():
            names = [p["name"] for p in operation.get("parameters", []) if p["in"] == "query"]
            query: dict[str, Any] = {**dict.fromkeys(names, "1"), "unknown": "1"}
            if names:
                answer = client.request(method, path, params=query, headers=ANY)
                if [each["field"] for each in answer.json()["errors"]] != ["unknown"]:
                    refused.append((method, path, answer.text))
    assert refused == []


def test_the_refusal_names_what_was_meant(client: httpx.Client) -> None:
    answer = client.get("/api/v1/runs", params={"stat": "running", "limits": 5})
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    first, second = answer.json()["errors"]
    assert first == {
        "field": "stat",
        "message": "no such query parameter of GET /api/v1/runs: did you mean state?",
    }
    assert "limit" in second["message"]
    other = client.get("/api/v1/policies", params={"x" * 5_000: 1})
    assert "known parameters: none" in other.json()["detail"]
    assert len(other.content) < 2_000
    assert client.get("/api/v1/runs?state=running&state=failed&limit=5").status_code == 200
