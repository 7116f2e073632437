"""How often the database is asked about the tokens of open event streams."""

from __future__ import annotations

import asyncio

import pytest

from paceline_backend.api import event_streams
from paceline_backend.api.event_streams import Rights
from paceline_backend.store import StoreUnavailableError


def answers(checks: Rights, *tokens: str) -> list[bool]:
    async def together() -> list[bool]:
        return await asyncio.gather(*(checks.valid(token) for token in tokens))

    return asyncio.run(together())


def test_streams_of_a_token_share_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_streams, "CHECK_S", 3600.0)
    asked: list[str] = []

    def holds(token: str) -> bool:
        asked.append(token)
        return token != "revoked"

    checks = Rights(holds)
    answers(checks, *["mine", "revoked"] * 50)
    assert sorted(asked) == ["mine", "revoked"]
    assert answers(checks, "mine", "revoked") == [True, False]
    assert len(asked) == 2


def test_asked_again_after_a_while_and_as_it_was_without_a_database(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_streams, "CHECK_S", 0.0)
    happens: list[bool | Exception] = [
        *(True, StoreUnavailableError("away")),
        *(False, StoreUnavailableError("away")),
    ]

    def holds(_token: str) -> bool:
        now = happens.pop(0)
        if isinstance(now, Exception):
            raise now
        return now

    checks = Rights(holds)
    assert [answers(checks, "mine") for _ in range(4)] == [[True], [True], [False], [False]]
