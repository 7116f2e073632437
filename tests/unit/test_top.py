"""The live overview in a terminal, without a terminal."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from paceline.commands import top
from paceline.node.client import Client
from support.waiting import until


class Silent:
    """A client of a server that takes questions and does not answer, until it is told to."""

    server = "http://silent"

    def __init__(self) -> None:
        self.answer = threading.Event()

    def call(self, _method: str, path: str, **_: Any) -> Any:
        self.answer.wait()
        return {"items": []} if path == "/runs" else []


def test_a_server_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "_PATIENCE_S", 0.2)
    client = Silent()
    with top.Feed(cast(Client, client), top.Overview(1.0, [], []), 0.01) as feed:
        until(lambda: feed.now.problem == "asked 0 s ago", "the words")
        client.answer.set()
        until(lambda: feed.now.at > 1.0 and not feed.now.problem, "the answer")
