"""Who gets in: tokens, cookies, WebSockets, and pages from elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from paceline.core.errors import PacelineError
from paceline_backend.api.auth import COOKIE, Authentication, CredentialCheck
from paceline_backend.api.identity import identity_of
from paceline_backend.api.rules import VIEWER
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store
from support.waiting import DEADLINE_S
from support.web import serving

TOKEN = "a token, naïve: 1"  # not ASCII alone


@pytest.fixture
def guarded(store: Store, bus_url: str) -> Iterator[httpx.Client]:
    with serving(store, bus_url, token=TOKEN) as client:
        yield client


def bearer(token: str) -> dict[str, bytes]:
    return {"Authorization": f"Bearer {token}".encode()}


def websocket_answer(store: Store, **headers: str) -> str:
    """What comes of a WebSocket's handshake: type of the first message back.

    Straight to the middleware: whether uvicorn speaks WebSocket depends on what is installed.
    """
    sent: list[Message] = []

    async def accepting(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    given = {"host": "127.0.0.1:8000", **headers}
    scope = {
        "type": "websocket",
        "path": "/_dash-ws-callback",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    guard = Authentication(accepting, CredentialCheck(store, TOKEN), lambda _: VIEWER)
    asyncio.run(guard(scope, receive, send))
    return str(sent[0]["type"])


PATHS = ["/", "/api/v1/runs", "/docs", "/openapi.json", "/metrics", "/_dash-layout", "/api/none"]


@pytest.mark.parametrize("path", PATHS)
def test_a_token_is_wanted_everywhere(guarded: httpx.Client, path: str) -> None:
    refused = guarded.get(path)
    assert refused.status_code == 401
    assert refused.headers["content-type"] == "application/problem+json"
    assert refused.headers["www-authenticate"] == "Bearer"
    assert guarded.get(path, headers=bearer("wrong")).status_code == 401
    assert guarded.get(path, headers=bearer(TOKEN)).status_code != 401


def test_without_a_guard_nobody_may() -> None:
    with pytest.raises(LookupError, match="middleware"):
        identity_of(Request({"type": "http", "headers": [], "client": ("127.0.0.1", 1)}))


def test_a_websocket_wants_it_too(store: Store) -> None:
    assert websocket_answer(store) == "websocket.close"
    assert websocket_answer(store, authorization=f"Bearer {TOKEN}") == "websocket.accept"
    credentials = CredentialCheck(store, TOKEN)
    holder = credentials.of_token(TOKEN.encode())
    assert holder is not None
    cookie = f"other=1; {COOKIE}={credentials.enter(holder, '127.0.0.1')}"
    assert websocket_answer(store, cookie=cookie) == "websocket.accept"
    for evil in ("http://127.0.0.1:9000", "http://[", "null"):
        assert websocket_answer(store, cookie=cookie, origin=evil) == "websocket.close"


def test_login(guarded: httpx.Client) -> None:
    asked = guarded.get("/runs/abc?x=1", headers={"Accept": "text/html"})
    assert asked.status_code == 303
    page = guarded.get(asked.headers["location"])
    assert 'value="/runs/abc?x=1"' in page.text
    wrong = guarded.post("/login", data={"token": "guess", "next": "/"})
    assert (wrong.status_code, "set-cookie" in wrong.headers) == (401, False)
    entered = guarded.post("/login", data={"token": TOKEN, "next": "/runs/abc?x=1"})
    assert (entered.status_code, entered.headers["location"]) == (303, "/runs/abc?x=1")
    cookie = entered.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=lax" in cookie
    assert TOKEN not in cookie
    assert guarded.get("/api/v1/runs").status_code == 200, "by the cookie"


def test_the_login_page_quotes_what_it_was_asked_for(guarded: httpx.Client) -> None:
    page = guarded.get("/login", params={"next": '/"><script>'})
    assert "<script>" not in page.text


def test_listening_beyond_this_machine_needs_a_token() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(PacelineError, match="--token"):
            Settings("sqlite:///x", "redis://localhost", host=host)
        assert Settings("sqlite:///x", "redis://localhost", host=host, token="t").token == "t"
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert Settings("sqlite:///x", "redis://localhost", host=host).token is None


def test_nothing_reads_a_body_before_the_token(guarded: httpx.Client) -> None:
    """Dash's middleware reads bodies of its paths: here the body never comes."""
    url = guarded.base_url
    with closing(HTTPConnection(url.host, url.port, timeout=DEADLINE_S)) as connection:
        connection.putrequest("POST", "/_dash-update-component")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "10")
        connection.endheaders()
        assert connection.getresponse().status == 401


def test_strangers_learn_nothing_of_the_database(
    guarded: httpx.Client, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with store.write() as connection:
        connection.exec_driver_sql("ALTER TABLE tokens RENAME TO gone")
    answer = guarded.get("/api/v1/runs", headers={"Authorization": "Bearer pl_made_up"})
    assert answer.status_code == 503
    assert answer.json()["detail"] == "the database does not answer: try again later"
    assert "no such table: tokens" in caplog.text


def test_readiness_tells_strangers_no_reasons(
    guarded: httpx.Client, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with store.write() as connection:
        connection.exec_driver_sql("ALTER TABLE runs RENAME TO gone")
    ready = guarded.get("/readyz")
    assert ready.status_code == 503
    assert ready.json()["database"] == "does not answer"
    assert "no such table: runs" in caplog.text
