"""Start and end of the control plane's parts, in this process."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import uvicorn
from fastapi import FastAPI

from paceline_backend.api import web
from paceline_backend.server.settings import Settings
from paceline_backend.server.supervisor import ServerSupervisor


@pytest.fixture
def killed() -> Iterator[list[int]]:
    """Signals that would have ended the process, as its handlers were the default ones."""
    numbers: list[int] = []
    both = (signal.SIGINT, signal.SIGTERM)
    before = {
        number: signal.signal(number, lambda given, _: numbers.append(given)) for number in both
    }
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_web_process_returns_after_a_signal(
    number: int, killed: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def serve(server: uvicorn.Server, sockets: list[socket.socket] | None) -> None:
        signal.raise_signal(number)
        assert server.should_exit

    monkeypatch.setattr(uvicorn.Server, "_serve", serve)
    monkeypatch.setattr(web, "create_app", lambda store, settings: FastAPI())
    monkeypatch.setattr(web, "_import_policies", lambda: None)
    settings = Settings(f"sqlite:///{tmp_path / 'paceline.db'}", "redis://127.0.0.1:1")
    with socket.socket() as listener:
        assert web.run(settings, listener) == (130 if number == signal.SIGINT else 0)
    assert killed == []


class _NotYet(BaseHTTPRequestHandler):
    """Answers that it is ready when it has been asked three times."""

    protocol_version = "HTTP/1.1"
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        self.send_response(200 if self.asked >= 3 else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_no_connection_is_open_when_the_supervisor_may_fork(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_NotYet, "asked", 0)
    open_at_forks = []
    with ThreadingHTTPServer(("127.0.0.1", 0), _NotYet) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]

        class Supervisor(ServerSupervisor):
            def _tend(self) -> None:
                found = psutil.Process().net_connections("tcp")
                open_at_forks.append(
                    [each for each in found if each.raddr and each.raddr.port == port]
                )

        Supervisor(Settings("", "", port=port), None, {})._await_ready()
        server.shutdown()
    assert open_at_forks == [[]] * 3
