"""An open event stream ends soon after its token is worth nothing any more."""

from __future__ import annotations

import httpx
import pytest
import redis
import sqlalchemy as sa

from paceline.wire import CHANGES
from paceline_backend.api import event_streams
from paceline_backend.store import Store, tokens
from support.records import add_run
from support.waiting import DEADLINE_S, until
from support.web import SIGNED_IN

V1 = "/api/v1"
EVENTS = f"{V1}/runs/r/events"


def made(client: httpx.Client) -> dict[str, str]:
    answer = client.post(f"{V1}/tokens", json={"name": "of a test", "scope": "operator"})
    token: dict[str, str] = answer.json()
    return token


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
    monkeypatch.setattr(event_streams, "CHECK_S", 0.2)
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
