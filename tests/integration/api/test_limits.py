"""What is too large or cannot be stored is refused, before it costs memory or reaches the store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from http import HTTPStatus
from http.client import HTTPConnection
from typing import Any

import httpx
import pytest

from paceline_backend.server.settings import MAX_BODY_BYTES
from paceline_backend.store import Store
from support.records import add_run
from support.waiting import DEADLINE_S
from support.web import ANY, serving

V1 = "/api/v1"
JSON = {"Content-Type": "application/json"}


@pytest.fixture
def patient(store: Store, bus_url: str) -> Iterator[httpx.Client]:
    """A server that takes large bodies, so that the limits of their fields show."""
    with serving(store, bus_url, max_body_bytes=2**26) as opened:
        yield opened


def post(client: httpx.Client, **body: Any) -> httpx.Response:
    content = json.dumps({"script": "/x/train.py", "nproc": 2, "launch": False, **body})
    return client.post(f"{V1}/runs", content=content, headers=JSON)


def refused(
    client: httpx.Client, method: str, path: str, header: tuple[str, str], *parts: bytes
) -> bool:
    """Whether an unfinished request is answered with 413: the server does not wait for the rest."""
    url = client.base_url
    with closing(HTTPConnection(url.host, url.port, timeout=DEADLINE_S)) as connection:
        connection.putrequest(method, path)
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Authorization", client.headers["Authorization"])
        connection.putheader(*header)
        connection.endheaders()
        for part in parts:
            connection.send(part)
        answer = connection.getresponse()
        assert answer.headers["Content-Type"] == "application/problem+json"
        problem = json.loads(answer.read())
    assert "--max-body-bytes" in problem["detail"]
    return bool(answer.status == problem["status"] == HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


PATHS = [
    ("POST", f"{V1}/runs"),
    ("PUT", f"{V1}/runs/none/auto"),
    ("POST", "/_dash-update-component"),
]


def test_a_body_that_is_announced_too_large_is_not_waited_for(client: httpx.Client) -> None:
    more = [("GET", f"{V1}/runs"), ("POST", "/api/none"), ("POST", "/login")]
    for method, path in PATHS + more:
        assert refused(client, method, path, ("Content-Length", str(500 * 2**20))), path


def test_a_body_of_unknown_length_is_read_up_to_the_limit(client: httpx.Client) -> None:
    chunk = b"10000\r\n" + bytes(0x10000) + b"\r\n"
    chunks = [chunk] * (MAX_BODY_BYTES // 0x10000) + [b"1\r\n \r\n"]  # and no last chunk
    for method, path in PATHS:
        assert refused(client, method, path, ("Transfer-Encoding", "chunked"), *chunks), path


def test_the_limit_is_a_setting(store: Store, bus_url: str) -> None:
    with serving(store, bus_url, max_body_bytes=2_000) as client:
        assert post(client, args=["x" * 1_000]).status_code == 201
        assert post(client, args=["x" * 2_000]).status_code == 413


TOO_LONG: list[tuple[dict[str, Any], str]] = [
    ({"args": ["x" * 20_000_000]}, "args"),
    ({"args": ["x"] * 100_000}, "args"),
    ({"env": {"A": "x" * 20_000_000}}, "env"),
    ({"env": {f"V{i}": "x" for i in range(100_000)}}, "env"),
    ({"script": "x" * 5_000}, "script"),
    ({"cwd": "x" * 5_000}, "cwd"),
    ({"name": "x" * 201}, "name"),
    ({"node": "x" * 256}, "node"),
    ({"policy": "x" * 201}, "policy"),
]


def test_a_field_that_is_too_long_is_named(patient: httpx.Client) -> None:
    for body, field in TOO_LONG:
        answer = post(patient, **body)
        assert answer.status_code == 422, field
        assert [error["field"] for error in answer.json()["errors"]] == [field]
        assert len(answer.content) < 2_000, "what is too long is not quoted whole"
    assert patient.get(f"{V1}/runs").json()["items"] == []


def test_what_fits_is_taken(client: httpx.Client) -> None:
    args = ["x" * 1_000] * 100
    made = post(client, args=args, env={"A": "x" * 100_000}, name="x" * 200, cwd="/" * 4_096)
    assert made.status_code == 201
    assert made.json()["args"] == args


def test_a_body_with_many_mistakes_gets_a_short_answer(client: httpx.Client) -> None:
    answer = post(client, args=[1] * 100_000, **{"y" * 10_000: 1})
    assert answer.status_code == 422
    assert len(answer.content) < 20_000


def test_who_asks_has_a_name_that_can_be_stored(client: httpx.Client, store: Store) -> None:
    add_run(store, "r", state="running")
    for by in ("x" * 201, "\ud800"):
        for method, path, body in (
            ("POST", "policy", {"policy": "bsp"}),
            ("PUT", "auto", {"mode": "off"}),
        ):
            content = json.dumps({**body, "by": by})
            url = f"{V1}/runs/r/{path}"
            answer = client.request(method, url, content=content, headers=JSON | ANY)
            assert answer.status_code == 422
            assert answer.json()["errors"][0]["field"] == "by"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        *(({name: "\ud800"}, name) for name in ("script", "policy", "name", "node", "cwd")),
        ({"args": ["\ud800"]}, "args.0"),
        ({"env": {"A": "\ud800"}}, "env.A"),
        ({"parameters": {"mode": "\ud800"}}, "parameters"),
        ({"backend": "\ud800"}, "backend"),
        ({"nproc": "\ud800"}, "nproc"),
        ({"\ud800": 1}, "body"),
        ({"scenario": {"name": "\ud800"}, "backend": "simulated"}, "scenario"),
        ({"scenario": {"\ud800": 1}, "backend": "simulated"}, "scenario"),
    ],
)
def test_a_lone_surrogate_is_refused(
    client: httpx.Client, body: dict[str, Any], field: str
) -> None:
    answer = post(client, **body)
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == [field]


def test_a_query_that_is_too_long_names_its_parameter(client: httpx.Client, store: Store) -> None:
    add_run(store, "r", state="running")
    for path, field in (
        (f"/runs?name={'x' * 60_000}", "name"),
        (f"/runs?policy={'x' * 60_000}", "policy"),
        (f"/runs?cursor={'x' * 60_000}", "cursor"),
        (f"/runs/r/worker-steps?ranks={'1,' * 25_001}1", "ranks"),
    ):
        answer = client.get(V1 + path)
        assert answer.status_code == 422, field
        assert [error["field"] for error in answer.json()["errors"]] == [field]
        assert len(answer.content) < 2_000
