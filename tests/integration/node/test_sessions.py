"""An agent with a session obeys the control plane, and nobody else who reaches the bus."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from paceline.node.client import Client
from paceline.node.session import of_node
from paceline.wire import (
    TELEMETRY,
    Kill,
    Launch,
    commands,
)
from paceline.wire.bus import publish
from paceline.wire.sealing import Secrets, seal
from paceline_backend.requests import sessions
from paceline_backend.store import Store
from support.leading import ingest, working
from support.node import SLEEP, paceline, script
from support.waiting import DEADLINE_S, until
from support.web import ANY, serving


@pytest.fixture
def web(store: Store, bus_url: str) -> Iterator[httpx.Client]:
    with serving(store, bus_url) as client, working(ingest(store, bus_url)):
        yield client


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(web: httpx.Client, tmp_path: Path) -> Iterator[Start]:
    """Starts `paceline` with the server's address; kills what still runs at the end."""
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str) -> subprocess.Popen[str]:
        command, *rest = arguments
        where = ("--server", str(web.base_url), "--data", str(tmp_path / "data"), "--node", "here")
        started.append(paceline(command, *where, *rest))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def state_of(web: httpx.Client, run: str) -> Any:
    return web.get(f"/api/v1/runs/{run}").json()["state"]


def launch(web: httpx.Client, path: str, *args: str) -> str:
    env = {"PASSWORD": "sunflower"}
    body = {"script": path, "args": [*args], "nproc": 1, "node": "here", "env": env}
    return str(web.post("/api/v1/runs", json=body).raise_for_status().json()["id"])


@pytest.mark.ranks
def test_an_agent_obeys_the_control_plane_only(
    store: Store, web: httpx.Client, bus: redis.Redis, start: Start, tmp_path: Path
) -> None:
    """And its log shows nothing that was sealed."""
    agent = start("agent")
    until(lambda: [n["id"] for n in web.get("/api/v1/nodes").json() if n["alive"]], "the agent")
    text = "import sys; open(sys.argv[1], 'a').write('x')"
    path = script(tmp_path, text, "sunflower.py")
    log, stolen = tmp_path / "log", tmp_path / "stolen"
    forged = Launch(script(tmp_path, text), [str(stolen)], 1, {})
    key = sessions.keys(store, ["here"]).of_node("here")
    publish(bus, commands("here"), forged, "forged")
    publish(bus, commands("here"), forged, "forged", key=b"x" * 32)
    publish(bus, commands("here"), forged, "../../../x", key=key)
    sealed = seal(Secrets({}, "redis://127.0.0.1:1", b"k" * 32), key)
    sealed_too = Launch(forged.script, [str(stolen)], 1, {}, sealed=sealed)
    publish(bus, commands("here"), sealed_too, "../../../x", key=key)

    run = launch(web, path, str(log))
    until(lambda: state_of(web, run) == "finished", "the run to finish")
    assert log.read_text() == "x"
    for _, fields in bus.xrange(commands("here")):  # an eavesdropper sends all once more
        bus.xadd(commands("here"), fields)  # type: ignore[arg-type]
    following = launch(web, path, str(log))
    until(lambda: state_of(web, following) == "finished", "the next run to finish")
    assert log.read_text() == "xx"
    assert not stolen.exists()
    assert sorted(p.name for p in (tmp_path / "data" / "runs").iterdir()) == sorted(
        [run, following]
    )
    assert not list(tmp_path.parent.glob("x"))
    assert not list(tmp_path.glob("x"))
    agent.terminate()
    _, said = agent.communicate(timeout=DEADLINE_S)
    assert f"launching run {run}: {tmp_path}/***.py" in said
    assert "sunflower" not in said


@pytest.mark.ranks
def test_a_run_in_the_foreground_has_a_session_and_can_be_killed(
    web: httpx.Client, bus: redis.Redis, start: Start, tmp_path: Path
) -> None:
    process = start("run", script(tmp_path, SLEEP))

    def known() -> list[str]:
        assert process.poll() is None, process.communicate()
        items = web.get("/api/v1/runs").json()["items"]
        return [run["id"] for run in items if run["state"] == "running"]

    (run,) = until(known, "the run to run", DEADLINE_S) or []
    assert bus.xlen(TELEMETRY) == 0
    publish(bus, commands("here"), Kill("ha", 0), run)
    web.post(f"/api/v1/runs/{run}/stop", json={"force": True}, headers=ANY).raise_for_status()
    until(lambda: state_of(web, run) == "stopped", "the run to stop")
    assert web.get(f"/api/v1/runs/{run}").json()["message"] == "stopped over the API"


def test_a_session_at_another_address_of_the_bus(web: httpx.Client, bus_url: str) -> None:
    with Client(str(web.base_url)) as client:
        session = of_node(client, "here", "redis://bus.example:7000/0")
    assert session.bus.startswith("redis://paceline-node-here:")
    assert session.bus.endswith("@bus.example:7000/0")
