"""An open event stream ends soon after its token is worth nothing any more."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest
import redis
import sqlalchemy as sa

from paceline.wire import CHANGES
from paceline_backend.store import Store, tokens
from paceline_backend.store.schema import tokens as table
from support.records import add_run
from support.waiting import DEADLINE_S, until
from support.web import SIGNED_IN

V1 = "/api/v1"
EVENTS = f"{V1}/runs/r/events"


def made(client: httpx.Client) -> dict[str, str]:
    answer = client.post(f"{V1}/tokens", json={"name": "of a test", "scope": "operator"})
    token: dict[str, str] = answer.json()
    return token


def by_token(client: httpx.Client, browser: httpx.Client) -> str:
    token = made(client)
    browser.headers["Authorization"] = f"Bearer {token['token']}"
    return token["id"]


def by_cookie(client: httpx.Client, browser: httpx.Client) -> str:
    token = made(client)
    assert browser.post("/login", data={"token": token["token"]}).status_code == 303
    return token["id"]


def by_link(client: httpx.Client, browser: httpx.Client) -> str:
    """The id is that of the token which asked for the link."""
    token = made(client)
    headers = {"Authorization": f"Bearer {token['token']}"}
    assert browser.get(client.post(f"{V1}/login-links", headers=headers).json()["path"]).is_redirect
    return token["id"]


@pytest.mark.parametrize("enter", [by_token, by_cookie, by_link])
@pytest.mark.parametrize("change", ["revoked_at", "expires_at"])
def test_a_stream_ends_with_its_token(
    client: httpx.Client,
    store: Store,
    enter: Callable[[httpx.Client, httpx.Client], str],
    change: str,
) -> None:
    add_run(store, "r")
    with httpx.Client(base_url=client.base_url, timeout=DEADLINE_S, trust_env=False) as browser:
        token = enter(client, browser)
        with browser.stream("GET", EVENTS) as response:
            lines = response.iter_lines()
            assert next(lines) == ": welcome"
            with store.write() as connection:
                values = {change: time.time()}
                connection.execute(sa.update(table).where(table.c.id == token).values(values))
            list(lines)  # ends: the run goes on
        assert browser.get(EVENTS).status_code == 401


def test_a_stream_outlives_tokens_of_others_and_a_database_that_is_away(
    client: httpx.Client, store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_run(store, "r")
    other = made(client)
    asked: list[str] = []
    check = tokens.is_valid

    def watched(connection: sa.Connection, identity: str, configured: str) -> object:
        asked.append(identity)
        if len(asked) == 1:
            raise sa.exc.OperationalError("SELECT", {}, Exception("database is locked"))
        return check(connection, identity, configured)

    mine = made(client)
    headers = {"Authorization": f"Bearer {mine['token']}"}
    monkeypatch.setattr(tokens, "is_valid", watched)
    with client.stream("GET", EVENTS, headers=headers, timeout=DEADLINE_S) as response:
        lines = response.iter_lines()
        assert next(lines) == ": welcome"
        client.delete(f"{V1}/tokens/{other['id']}", headers=SIGNED_IN)
        before = len(asked)
        until(lambda: len(asked) > before + 1, "two more questions")
        with redis.Redis.from_url(bus_url) as bus:
            bus.xadd(CHANGES, {"r": ""})
        assert next(line for line in lines if line.startswith("data: "))
    assert set(asked) == {mine["id"]}
