"""A real headless Chromium on the real web application."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import (
    ConsoleMessage,
    Error,
    Page,
    Request,
    expect,
    sync_playwright,
)

from paceline.node.processes import number_of, reserved_port
from paceline_backend.store import Store
from support.web import SIGNED_IN, serving

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from find_chromium import find_chromium

TIMEOUT_MS = 60_000  # of a busy machine
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 'paceline.db'}") as opened:
        yield opened


@pytest.fixture(scope="session")
def port() -> Iterator[int]:
    """One for all tests: the same origin, so that the browser loads Dash's megabytes only once.

    It stays reserved between two tests, when nothing listens there.
    """
    with reserved_port() as reserved:
        yield number_of(reserved)


@pytest.fixture
def web(store: Store, bus_url: str, port: int) -> Iterator[httpx.Client]:
    """The application; its base URL is the server's root."""
    with serving(store, bus_url, port=port) as client:
        yield client


@pytest.fixture(scope="module")
def _tab() -> Iterator[Page]:
    """The browser's only page: each new one would cost the tests another second of CPU time.

    The browser ends with the file, as Playwright's event loop runs as long and other tests have
    loops of their own.
    """
    path = find_chromium()
    if path is None:
        pytest.skip("no Chromium on this machine")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        context = browser.new_context(extra_http_headers=SIGNED_IN)
        context.set_default_timeout(TIMEOUT_MS)
        expect.set_options(timeout=TIMEOUT_MS)
        yield context.new_page()
        browser.close()


@pytest.fixture
def page(_tab: Page) -> Iterator[Page]:
    """An empty page that must raise no error, log none, and ask no other machine for anything."""
    try:
        with _watched(_tab):
            yield _tab
    finally:
        _tab.goto("about:blank")
        _tab.context.clear_cookies()
        _tab.context.set_extra_http_headers(SIGNED_IN)  # a test may have come as a stranger


@pytest.fixture
def new_page(_tab: Page) -> Iterator[Page]:
    """As `page`, for a test that leaves scripts in it."""
    page = _tab.context.new_page()
    try:
        with _watched(page):
            yield page
    finally:
        page.close()


@contextmanager
def _watched(page: Page) -> Iterator[None]:
    problems: list[str] = []
    page.set_viewport_size({"width": 1280, "height": 800})

    def logged(message: ConsoleMessage) -> None:
        # The browser logs each refused call by itself; tests provoke some and look at the page.
        if message.type == "error" and "Failed to load resource" not in message.text:
            problems.append(f"console: {message.text}")

    def failed(error: Error) -> None:
        problems.append(f"page: {error.stack or error}")

    def asked(request: Request) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:", "blob:")):
            problems.append(f"left this machine: {request.url}")

    page.on("console", logged)
    page.on("pageerror", failed)
    page.on("request", asked)
    try:
        yield
        page.unroute_all(behavior="ignoreErrors")
        if page.url.startswith("http"):
            page.evaluate("localStorage.clear()")  # such as the theme that this test chose
    finally:
        page.remove_listener("console", logged)
        page.remove_listener("pageerror", failed)
        page.remove_listener("request", asked)
    assert problems == []
