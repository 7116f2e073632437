"""Nodes on other machines, and the embedded bus of a server that listens beyond loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from paceline.node.client import Client
from paceline.node.session import of_node, of_run
from paceline.wire.bus import connect
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.store import Store
from support.node import paceline, script
from support.ports import free_port
from support.records import add_run
from support.waiting import DEADLINE_S, until
from support.web import ADMIN, serving

TOKEN = "admin-of-tests-0123456789abcdef"
BUS = """
    import os, pathlib, sys
    from urllib.parse import urlsplit
    bus = urlsplit(os.environ["PACELINE_BUS"])
    pathlib.Path(sys.argv[1]).write_text(f"{bus.hostname} {bus.username}")
"""


@pytest.fixture
def address() -> str:
    """Of this machine, as others reach it."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return each.address
    pytest.skip("this machine has only loopback")


@contextmanager
def server(data: Path, host: str, *more: str) -> Iterator[tuple[str, str]]:
    """An embedded server; its URL, and what it says in its log."""
    command = [sys.executable, "-m", "paceline", "server", "--host", host, "--port", "0"]
    log = data.with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--data", str(data), *more],
            env={**os.environ, "PACELINE_TOKEN": TOKEN},
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        assert said.startswith("Paceline on "), log.read_text()
        yield said.split()[-1], log.read_text()
    finally:
        process.terminate()
        process.communicate(timeout=DEADLINE_S)


def test_a_node_reaches_the_bus_where_it_has_found_the_server(tmp_path: Path, address: str) -> None:
    with server(tmp_path / "data", "0.0.0.0", "--trust-network") as (url, said):
        assert "other machines" not in said
        port = urlsplit(url).port
        for host in (address, "127.0.0.1"):
            with Client(f"http://{host}:{port}", TOKEN) as client:
                session = of_node(client, "n")
                assert urlsplit(session.bus).hostname == host
                assert urlsplit(client.version()["bus"]).hostname == host
            with connect(session.bus) as bus:
                assert bus.ping()

        target = f"http://{address}:{port}"
        at = ("--server", target, "--data", str(tmp_path / "node"), "--node", "there")
        agent = paceline("agent", *at, env={"PACELINE_TOKEN": TOKEN})
        try:
            with Client(target, TOKEN) as client:
                until(lambda: [n for n in client.call("GET", "/nodes") if n["alive"]], "the agent")
                seen = tmp_path / "seen"
                body = {"script": script(tmp_path, BUS), "args": [str(seen)], "nproc": 1}
                run = client.call("POST", "/runs", body)["id"]
                over = lambda: client.call("GET", f"/runs/{run}")["state"] == "finished"  # noqa: E731
                until(over, "the run", 120, 0.2)
            assert seen.read_text() == f"{address} paceline-run-{run}", "its ranks, too"
        finally:
            agent.terminate()
            agent.communicate(timeout=DEADLINE_S)


def test_without_the_flag_the_bus_stays_on_loopback(tmp_path: Path, address: str) -> None:
    with server(tmp_path / "data", "0.0.0.0") as (url, said):
        assert "agents on other machines cannot reach the embedded bus" in said
        port = urlsplit(url).port
        with Client(f"http://{address}:{port}", TOKEN) as client:
            bus = urlsplit(client.version()["bus"])
        assert bus.hostname == "127.0.0.1"
        assert bus.port is not None
        with socket.socket() as probe:
            assert probe.connect_ex((address, bus.port)) != 0


def test_with_the_flag_and_on_loopback_the_bus_stays_there(tmp_path: Path, address: str) -> None:
    with server(tmp_path / "data", "127.0.0.1", "--trust-network") as (url, _):
        with Client(url, TOKEN) as client:
            port = urlsplit(client.version()["bus"]).port
        assert port is not None
        with socket.socket() as probe:
            assert probe.connect_ex((address, port)) != 0


def test_an_address_of_its_own_comes_beside_loopback(tmp_path: Path, address: str) -> None:
    with EmbeddedBus(tmp_path / "bus", host=address) as bus:
        for host in (address, "127.0.0.1"):
            with socket.socket() as probe:
                assert probe.connect_ex((host, bus.port)) == 0


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """A server whose bus is on a loopback that is not ours."""
    monkeypatch.setenv("NO_PROXY", "*")
    with (
        Store.open(f"sqlite:///{tmp_path / 'paceline.db'}") as store,
        serving(store, f"redis://127.0.0.1:{free_port()}/0") as client,
    ):
        add_run(store, "r")
        yield client


def far(client: httpx.Client) -> str:
    """The server's address as nodes write one that is not loopback: 127.1 is 127.0.0.1."""
    return f"http://127.1:{client.base_url.port}"


def test_an_agent_elsewhere_says_what_is_missing_and_waits(
    elsewhere: httpx.Client, tmp_path: Path
) -> None:
    at = ("--server", far(elsewhere), "--data", str(tmp_path / "node"))
    agent = paceline("agent", *at, env={"PACELINE_TOKEN": ADMIN})
    try:
        assert agent.stderr is not None
        words = f"the bus of the server {far(elsewhere)} listens on that machine only"
        # A busy server may answer too late at first.
        said = next(line for line in agent.stderr if words in line)
        assert "--trust-network" in said
        assert agent.poll() is None
    finally:
        agent.terminate()
        agent.communicate(timeout=DEADLINE_S)


def test_a_run_elsewhere_says_what_is_missing(elsewhere: httpx.Client, tmp_path: Path) -> None:
    at = ("--server", far(elsewhere), "--data", str(tmp_path / "node"))
    environment = {"PACELINE_TOKEN": ADMIN}
    run = paceline("run", *at, script(tmp_path, "raise SystemExit(7)"), env=environment)
    _, err = run.communicate(timeout=120)
    assert (run.returncode, "--trust-network" in err) == (3, True), err
    assert len(elsewhere.get("/api/v1/runs").json()["items"]) == 1, "no run was registered"


def test_the_bus_s_own_address_is_the_node_s_business(elsewhere: httpx.Client) -> None:
    """Given by --bus, nobody looks at the server's."""
    with Client(far(elsewhere), ADMIN) as client, pytest.raises(Exception, match="--trust-network"):
        of_run(client, "r")
    with Client(far(elsewhere), ADMIN) as client, pytest.raises(Exception) as caught:
        of_node(client, "n", "redis://127.0.0.1:1")
    assert "--trust-network" not in str(caught.value), "but the server cannot make a user"
