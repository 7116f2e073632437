"""What the client of the REST API sends."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.node.client import Client


@pytest.mark.parametrize(
    ("run", "body", "if_match"),
    [
        ({"revision": 3}, {"force": True, "by": "cli"}, '"3"'),
        ({}, {"force": True}, "*"),
    ],
)
def test_a_server_of_release_0_1_0_gets_no_newer_fields(
    monkeypatch: pytest.MonkeyPatch, run: dict[str, int], body: dict[str, Any], if_match: str
) -> None:
    """It has no revisions, and refuses fields that it does not know."""
    sent: list[tuple[Any, ...]] = []

    def call(_: Client, method: str, path: str, body: Any = None, *, if_match: str = "") -> Any:
        sent.append((method, path, body, if_match))
        return run

    monkeypatch.setattr(Client, "call", call)
    with Client("http://127.0.0.1:1", "token") as client:
        client.change("POST", "r", "stop", {"force": True}, {"by": "cli"})
    assert sent == [("GET", "/runs/r", None, ""), ("POST", "/runs/r/stop", body, if_match)]
