"""What the server answers for pages, without a browser."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.middleware.gzip import GZipResponder

from paceline_dashboard import mount


def test_first_request_for_a_run_gets_styles_and_scripts(web: httpx.Client) -> None:
    page = web.get("/runs/any").text
    assert "assets/css/tokens.css" in page
    assert "assets/bridge.js" in page


def test_nothing_comes_from_elsewhere(web: httpx.Client) -> None:
    page = web.get("/").text
    assert re.findall(r'(?:src|href)="(?:https?:)?//[^"]*"', page) == []


def test_modules_are_versioned_and_there(web: httpx.Client) -> None:
    page = web.get("/").text
    versioned = re.findall(r'"(/assets/js/[a-z]+\.js\?v=[0-9a-f]{12})"', page)
    assert len(versioned) >= 10
    preloaded = re.findall(r'<link rel="modulepreload" href="([^"]*)">', page)
    assert set(preloaded) == set(versioned)
    for path in versioned:
        assert web.get(path).headers["content-type"].startswith("text/javascript")


def test_files_are_compressed_once(web: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    compressed: list[None] = []
    real = GZipResponder.apply_compression

    def compress(self: Any, body: bytes, *, more_body: bool) -> bytes:
        compressed.append(None)
        return real(self, body, more_body=more_body)

    monkeypatch.setattr(GZipResponder, "apply_compression", compress)
    first, second = web.get("/assets/bridge.js"), web.get("/assets/bridge.js")
    times = len(compressed)
    assert times >= 1
    third = web.get("/assets/bridge.js")
    assert len(compressed) == times
    for answer in (second, third):
        assert answer.content == first.content
        assert answer.headers.multi_items() == first.headers.multi_items()
    assert third.headers["content-encoding"] == "gzip"
    assert third.headers.get_list("x-frame-options") == ["DENY"]
    plain = web.get("/assets/bridge.js", headers={"Accept-Encoding": "identity"})
    assert (plain.content, "content-encoding" in plain.headers) == (first.content, False)
    tag = {"If-None-Match": first.headers["etag"]}
    assert web.get("/assets/bridge.js", headers=tag).status_code == 304


def test_a_dashboard_that_could_not_be_built_is_built_by_the_next_request(
    web: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_prefix: str) -> Any:
        raise ImportError("no Dash")

    with monkeypatch.context() as patch:
        patch.setattr("paceline_dashboard.app.build", fails)
        # The server closes the connection after an error that it did not expect.
        assert web.get("/", headers={"Connection": "close"}).status_code == 500
    assert "Paceline" in web.get("/").text


def test_what_is_no_file_is_not_kept(web: httpx.Client) -> None:
    for _ in range(2):
        assert web.get("/assets/js/nothing.js").status_code == 404


def test_pages_leave_unknown_api_paths_alone(web: httpx.Client) -> None:
    answer = web.get("/api/v1/nonsense")
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


def test_pages_open_no_websocket_and_none_is_accepted(web: httpx.Client) -> None:
    assert "_dash-ws-callback" not in web.get("/").text
    app = FastAPI()
    app.state.rules = {}
    mount(app)
    headers = [(b"origin", b"http://here"), (b"host", b"here")]
    scope = {"type": "websocket", "path": "/_dash-ws-callback", "headers": headers}
    sent: list[Any] = []

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    served = app({**scope, "query_string": b"", "subprotocols": []}, receive, send)
    with ThreadPoolExecutor(1) as thread:  # a browser test's event loop may be running in this one
        thread.submit(asyncio.run, served).result()
    assert [message["type"] for message in sent] == ["websocket.close"]
