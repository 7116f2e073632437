"""Every answer says what a browser may do with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import httpx
import pytest

from paceline import policies
from paceline_backend.store import Store
from support.web import serving


@pytest.fixture
def guarded(store: Store, bus_url: str) -> Iterator[httpx.Client]:
    with serving(store, bus_url, token="secret") as client:
        yield client


def assert_protected(answer: httpx.Response, status: int) -> None:
    assert answer.status_code == status, answer.url
    for name, value in (
        ("X-Frame-Options", "DENY"),
        ("X-Content-Type-Options", "nosniff"),
        ("Referrer-Policy", "same-origin"),
    ):
        assert answer.headers.get_list(name) == [value]
    (policy,) = answer.headers.get_list("Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'self'")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe-eval" not in policy


STATUSES = {
    "/": 200,
    "/runs/none": 200,
    "/assets/css/tokens.css": 200,
    "/docs": 200,
    "/openapi.json": 200,
    "/login": 200,
    "/healthz": 200,
    "/metrics": 200,
    "/api/v1/runs": 200,
    "/api/v1/runs/none": 404,
    "/api/v1/runs?limit=0": 422,
    "/api/none": 404,
}


def test_every_answer_has_the_headers(guarded: httpx.Client) -> None:
    for path, status in STATUSES.items():
        assert_protected(guarded.get(path, headers={"Authorization": "Bearer secret"}), status)
    assert_protected(guarded.get("/"), 401)
    assert_protected(guarded.get("/", headers={"Accept": "text/html"}), 303)
    assert_protected(guarded.post("/api/v1/runs", content=bytes(2**21)), 413)


def test_a_fault_of_the_server_has_them(
    guarded: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> NoReturn:
        raise RuntimeError

    monkeypatch.setattr(policies, "names", broken)
    answer = guarded.get("/api/v1/policies", headers={"Authorization": "Bearer secret"})
    assert_protected(answer, 500)


def test_scripts_of_pages_are_named_by_their_hashes(guarded: httpx.Client) -> None:
    page = guarded.get("/", headers={"Authorization": "Bearer secret"})
    scripts = page.headers["Content-Security-Policy"].split("; ")[1]
    assert "unsafe-inline" not in scripts
    assert scripts.count("'sha256-") == 2
