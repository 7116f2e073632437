"""TLS from end to end: pages and REST, and the bus of server, agent and ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from paceline.core.errors import PacelineError
from paceline.node.client import Client, ServerUnreachable
from paceline.wire import CHANGES, ENDED
from paceline.wire.bus import connect
from paceline_backend.demo import example
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store
from support import web
from support.records import add_run
from support.tls import Certificates, certificates, in_front_of
from support.waiting import DEADLINE_S, TRAINING_S, until

TOKEN = "the token of this test"


@contextmanager
def process(log: Path, env: dict[str, str], *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", "paceline", *arguments],
            env={**os.environ, "PACELINE_TOKEN": TOKEN, **env},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield child
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(DEADLINE_S)
        finally:
            child.kill()
            child.wait()


@pytest.mark.ranks
@pytest.mark.timeout(900)
def test_a_run_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = certificates(tmp_path)
    monkeypatch.setenv("PACELINE_CA_FILE", str(made.ca))
    data = str(tmp_path / "data")
    with EmbeddedBus(tmp_path / "bus") as bus, in_front_of(bus.port, made.cert) as port:
        address = bus.url.replace("redis://", "rediss://").replace(f":{bus.port}", f":{port}")
        with (
            serving(tmp_path, made, address, data) as url,
            process(tmp_path / "agent.log", {}, "agent", "--server", url, "--data", data),
            Client(url, TOKEN) as client,
        ):
            until(lambda: [n for n in client.call("GET", "/nodes") if n["alive"]], "the agent")
            script = str(example("plaid") / "train.py")
            # More epochs than it takes until the policy's kernels are compiled.
            body = {"script": script, "args": ["--epochs", "10000"], "nproc": 2}
            run = client.call("POST", "/runs", body)["id"]

            def planned() -> bool:
                now = client.call("GET", f"/runs/{run}")
                assert now["state"] not in ENDED, now["message"]
                segments = client.call("GET", f"/runs/{run}/segments")
                return "controller" in {segment["source"] for segment in segments}

            until(planned, "a plan of the control plane", TRAINING_S, 0.2)
            client.call("POST", f"/runs/{run}/stop", {"force": False}, if_match="*")

            def ended() -> bool:
                now = client.call("GET", f"/runs/{run}")
                assert now["state"] not in ("failed", "finished"), now["message"]
                return bool(now["state"] == "stopped")

            until(ended, "the end of the run", TRAINING_S, 0.2)
            covered = f"/runs/{run}/coverage"
            until(lambda: client.call("GET", covered)["exact"], "all of the run", TRAINING_S, 0.2)
            _strangers_are_refused(url, monkeypatch)


def test_event_streams_know_who_may_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have connections to the bus of their own."""
    made = certificates(tmp_path)
    monkeypatch.setenv("PACELINE_CA_FILE", str(made.ca))
    with (
        EmbeddedBus(tmp_path / "bus") as bus,
        in_front_of(bus.port, made.cert) as port,
        Store.open(f"sqlite:///{tmp_path / 'paceline.db'}") as store,
        connect(bus.url) as writer,
    ):
        add_run(store, "r")
        address = bus.url.replace("redis://", "rediss://").replace(f":{bus.port}", f":{port}")
        with (
            web.serving(store, address) as client,
            client.stream("GET", "/api/v1/runs/r/events", timeout=DEADLINE_S) as stream,
        ):
            lines = stream.iter_lines()
            assert next(lines) == ": welcome"
            assert any('"type":"change"' in line for line in lines)  # from now on it is followed
            writer.xadd(CHANGES, {"r": "7"})
            assert any('"step":7' in line for line in lines)


@contextmanager
def serving(directory: Path, made: Certificates, bus: str, data: str) -> Iterator[str]:
    """The server's URL."""
    log = directory / "server.log"
    secret = {"PACELINE_BUS": bus, "PACELINE_TLS_CERT": str(made.cert)}
    with process(log, secret, "server", "--port", "0", "--data", data) as server:

        def says() -> re.Match[str] | None:
            assert server.poll() is None, log.read_text()
            return re.search(r"Paceline on (\S+)", log.read_text())

        yield until(says, "the server", DEADLINE_S).group(1)


def _strangers_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert url.startswith("https://127.0.0.1:")
    with pytest.raises(httpx.HTTPError):
        httpx.get(url.replace("https:", "http:") + "/healthz", trust_env=False)
    monkeypatch.delenv("PACELINE_CA_FILE")
    with (
        Client(url, TOKEN) as client,
        pytest.raises(ServerUnreachable, match="certificate verify failed"),
    ):
        client.call("GET", "/runs")


def test_certificates_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    made = certificates(tmp_path)
    with pytest.raises(PacelineError, match="--tls-key needs --tls-cert"):
        Settings("", "", tls_key=made.cert)
    with pytest.raises(PacelineError, match=r"--tls-cert \S+/none\.pem.*No such file"):
        Settings("", "", tls_cert=tmp_path / "none.pem")
    with pytest.raises(PacelineError, match=r"--tls-cert \S+/ca\.pem"):
        Settings("", "", tls_cert=made.ca)  # without its key
    assert Settings("", "", tls_cert=made.cert).url == "https://127.0.0.1:8000"
