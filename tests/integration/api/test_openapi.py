"""OpenAPI tells the truth: what routes answer is documented, and what it refers to is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from paceline_backend.api.auth import COOKIE
from paceline_backend.store import Store, StoreUnavailableError, tokens
from support.records import add_run
from support.web import serving

TOKEN = "secret"
OPEN = ("/healthz", "/readyz")
BODY = {"Content-Type": "application/json"}
BEARER = {"Authorization": f"Bearer {TOKEN}"}
METHODS = {"get", "put", "post", "delete", "patch"}

# From an operation's method and path, and a client with the token, to an answer.
Ask = Callable[[httpx.Client, str, str], httpx.Response]


@pytest.fixture
def client(store: Store, bus_url: str) -> Iterator[httpx.Client]:
    with serving(store, bus_url, token=TOKEN) as opened:
        opened.headers.update(BEARER)
        yield opened


@pytest.fixture
def document(client: httpx.Client) -> dict[str, Any]:
    whole: dict[str, Any] = client.get("/openapi.json").json()
    return whole


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        assert set(methods) <= METHODS
        for method, operation in methods.items():
            yield method, path, operation


def values(node: Any, key: str) -> Iterator[Any]:
    """All values of this key, however deep."""
    if isinstance(node, dict):
        if key in node:
            yield node[key]
        for part in node.values():
            yield from values(part, key)
    elif isinstance(node, list):
        for part in node:
            yield from values(part, key)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    references = list(values(document, "$ref"))
    assert references
    for reference in references:
        place = document
        root, *names = reference.split("/")
        assert root == "#"
        for name in names:
            assert name in place, reference
            place = place[name]


def test_the_token_is_described_as_header_and_as_cookie(document: dict[str, Any]) -> None:
    schemes = document["components"]["securitySchemes"]
    header = {"type": "http", "scheme": "bearer"}
    cookie = {"type": "apiKey", "in": "cookie", "name": COOKIE}
    described = [{k: v for k, v in s.items() if k != "description"} for s in schemes.values()]
    assert described == [header, cookie]
    for _, path, operation in operations(document):
        wanted = [] if path in OPEN else [{name: []} for name in schemes]
        assert operation.get("security", []) == wanted, path


def _no_token(client: httpx.Client, method: str, path: str) -> httpx.Response:
    return client.request(method, path, headers={"Authorization": "Bearer wrong"})


def _large(client: httpx.Client, method: str, path: str) -> httpx.Response:
    return client.request(method, path, content=bytes(2**21), headers=BODY)


def _unreadable(client: httpx.Client, method: str, path: str) -> httpx.Response:
    return client.request(method, path, content=b"[" * 100_000, headers=BODY)


def _unknown_field(client: httpx.Client, method: str, path: str) -> httpx.Response:
    return client.request(method, path, content=b'{"nothing": 1}', headers=BODY)


def _wrong_query(client: httpx.Client, method: str, path: str) -> httpx.Response:
    wrong = dict.fromkeys(("limit", "from", "points", "last", "warmup", "since", "steps"), "!")
    return client.request(method, path, params=wrong)


def _plain(client: httpx.Client, method: str, path: str) -> httpx.Response:
    return client.request(method, path)


REFUSALS: dict[Ask, int] = {
    _large: 413,
    _unreadable: 400,
    _unknown_field: 422,
    _wrong_query: 422,
    _plain: 404,
    _no_token: 401,  # the last one: then the client's address is throttled
}


def test_refusals_are_documented(client: httpx.Client, document: dict[str, Any]) -> None:
    """Each is provoked everywhere, and comes from some routes at least."""
    for ask, expected in REFUSALS.items():
        assert expected in _statuses(client, document, ask)


def test_what_a_role_may_not_is_documented(
    client: httpx.Client, document: dict[str, Any], store: Store
) -> None:
    with store.write() as connection:
        viewer = tokens.create(connection, "viewer", "viewer", "a test")
    client.headers["Authorization"] = f"Bearer {viewer}"
    assert 403 in _statuses(client, document, _plain)


def test_a_database_that_is_away_is_documented(
    client: httpx.Client, store: Store, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise StoreUnavailableError("the database does not answer")

    monkeypatch.setattr(Store, "read", away)
    monkeypatch.setattr(Store, "write", away)
    assert 503 in _statuses(client, document, _plain)


def _statuses(client: httpx.Client, document: dict[str, Any], ask: Ask) -> set[int]:
    """What all operations answer; each answer is documented with its media type."""
    statuses = set()
    for method, path, operation in operations(document):
        answer = ask(client, method, path.replace("{run}", "none").replace("{token}", "none"))
        described = operation["responses"].get(str(answer.status_code))
        assert described is not None, (method, path, answer.status_code)
        kind = answer.headers.get("content-type", "").partition(";")[0]
        assert kind in described.get("content", {"": None}), (method, path, kind)
        statuses.add(answer.status_code)
    return statuses


def test_another_method_is_told_which_there_are(client: httpx.Client) -> None:
    for path, allowed in {
        "/api/v1/version": "GET",
        "/api/v1/runs": "GET, POST",
        "/api/v1/runs/r/auto": "GET, PUT",
        "/api/v1/tokens/t": "DELETE",
    }.items():
        refused = client.patch(path)
        assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
        assert refused.headers["content-type"] == "application/problem+json"
        assert client.patch(f"{path}/x/y/z").status_code == 404


def test_if_match_is_documented_as_it_is_enforced(
    client: httpx.Client, document: dict[str, Any], store: Store
) -> None:
    add_run(store, "r", state="running")
    seen = set()
    for method, path, operation in operations(document):
        for parameter in operation.get("parameters", []):
            if parameter["name"].lower() == "if-match":
                answer = client.request(method, path.replace("{run}", "r"))
                assert parameter["required"] == (answer.status_code == 428), (method, path)
                seen.add(parameter["required"])
    assert seen == {False, True}


def test_refusals_are_written_once(document: dict[str, Any]) -> None:
    """And so the document stays small enough to be read."""
    for _, path, operation in operations(document):
        for status, answer in operation["responses"].items():
            if status >= "400" and (path, status) != ("/readyz", "503"):
                ((kind, content),) = answer["content"].items()
                assert kind == "application/problem+json", (path, status)
                assert content["schema"] == {"$ref": "#/components/schemas/ProblemDocument"}
