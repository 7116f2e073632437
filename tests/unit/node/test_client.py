"""What the client of the REST API sends."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.node.client import Client


def test_a_change_names_the_revision_that_it_is_meant_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Any, ...]] = []

    def call(_: Client, method: str, path: str, body: Any = None, *, if_match: str = "") -> Any:
        sent.append((method, path, body, if_match))
        return {"revision": 3}

    monkeypatch.setattr(Client, "call", call)
    body = {"force": True, "by": "cli"}
    with Client("http://127.0.0.1:1", "token") as client:
        client.change("POST", "r", "stop", body)
        client.change("POST", "r", "stop", body, revision=2)
    assert sent == [
        ("GET", "/runs/r", None, ""),
        ("POST", "/runs/r/stop", body, '"3"'),
        ("POST", "/runs/r/stop", body, '"2"'),
    ]
