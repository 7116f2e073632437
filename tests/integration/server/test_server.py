"""`paceline server` as an operator starts it: real processes, killed and started again."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import redis

from paceline.node.tokens import kept
from paceline.wire import (
    TELEMETRY,
    StepBatch,
)
from paceline.wire.bus import publish
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.server.settings import Settings
from paceline_backend.server.supervisor import DataDirectory, listen
from support.command_line import Main
from support.records import hello, record
from support.waiting import DEADLINE_S, until

V1 = "/api/v1"


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "paceline_backend.cli", *map(str, arguments)]


class Server:
    """One `paceline server` on a data directory."""

    def __init__(self, data: Path, *arguments: object) -> None:
        where = ("--port", 0, "--data", data, *arguments)
        self.process = subprocess.Popen(command(*where), stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        first = self.process.stdout.readline()
        match = re.fullmatch(r"Paceline on (http://127\.0\.0\.1:\d+)\n", first)
        assert match, f"said {first!r}, code {self.process.poll()}"
        self.headers = {"Authorization": f"Bearer {(data / 'token').read_text().strip()}"}
        self.client = httpx.Client(
            base_url=match[1], headers=self.headers, timeout=DEADLINE_S, trust_env=False
        )
        self.bus_url: str = self.client.get(f"{V1}/version").json()["bus"]

    def children(self) -> dict[str, psutil.Process]:
        """web, worker and bus, as far as they run."""
        processes = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                program, line = child.name(), " ".join(child.cmdline())
            except psutil.NoSuchProcess:
                continue
            name = "bus" if "127." in line else program.removeprefix("paceline-")
            if name in ("web", "worker", "bus"):
                processes[name] = child
        return processes

    def ready(self) -> bool:
        try:
            return self.client.get("/readyz").is_success
        except httpx.TransportError:
            return False

    def end(self, number: int = signal.SIGTERM) -> int:
        assert self.process.stdout is not None
        self.process.send_signal(number)
        code = self.process.wait(timeout=DEADLINE_S)
        self.process.stdout.close()
        self.client.close()
        return code


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def begin(*arguments: object) -> Server:
        started.append(Server(tmp_path / "data", *arguments))
        return started[-1]

    yield begin
    for server in started:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)


def gone(processes: dict[str, psutil.Process]) -> bool:
    return not any(
        child.is_running() and child.status() != psutil.STATUS_ZOMBIE
        for child in processes.values()
    )


def test_from_bus_to_rest_and_a_clean_end(start: Callable[..., Server], tmp_path: Path) -> None:
    server = start()
    assert server.ready()
    children = server.children()
    assert set(children) == {"web", "worker", "bus"}
    server_url = str(server.client.base_url)
    only_who_has_the_token_gets_in(server_url, tmp_path / "data" / "token", children)
    body = {"script": "train.py", "nproc": 2, "launch": False}
    run = server.client.post(f"{V1}/runs", json=body).json()["id"]
    with redis.Redis.from_url(server.bus_url) as bus:
        publish(bus, TELEMETRY, hello(), run)
        publish(bus, TELEMETRY, StepBatch([record(0, 0), record(0, 1)]), run)
    url = f"{V1}/runs/{run}"
    until(lambda: server.client.get(url).json()["step"] == 0, "the step did not arrive")
    # The worker's first sign of life may be older than the rows that it wrote.
    rows = re.compile(r'paceline_ingest_rows_total\{worker=".+"\} 2\.0')
    until(lambda: bool(rows.search(server.client.get("/metrics").text)), "not counted")
    reading = threading.Event()

    def read() -> None:
        with (
            httpx.Client(
                base_url=server.client.base_url,
                headers=server.headers,
                timeout=DEADLINE_S,
                trust_env=False,
            ) as own,
            own.stream("GET", f"{url}/events") as response,
        ):
            for _ in response.iter_lines():
                reading.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert reading.wait(DEADLINE_S)
    assert server.end() == 0
    reader.join(timeout=DEADLINE_S)
    assert not reader.is_alive()
    assert gone(children)
    assert kept(server_url) is None


def only_who_has_the_token_gets_in(
    url: str, path: Path, children: dict[str, psutil.Process]
) -> None:
    """Not this machine's other users either: the file is its owner's."""
    assert path.stat().st_mode & 0o777 == 0o600
    token = path.read_text().strip()
    assert kept(url) == token, "the command line finds it by the address"
    with httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False) as stranger:
        for asked in (f"{V1}/version", f"{V1}/runs", "/", "/metrics", "/docs"):
            assert stranger.get(asked).status_code == 401
        body = {"script": "train.py", "nproc": 1, "launch": True}
        assert stranger.post(f"{V1}/runs", json=body).status_code == 401
        assert stranger.get("/readyz").is_success
    assert not any(token in " ".join(child.cmdline()) for child in children.values())


def test_parts_that_die_are_started_again(start: Callable[..., Server]) -> None:
    server = start()
    body = {"script": "train.py", "nproc": 2, "launch": False}
    run = server.client.post(f"{V1}/runs", json=body).json()["id"]
    with redis.Redis.from_url(server.bus_url) as bus:
        bus.set("mark", "before")
    before = server.children()
    assert set(before) == {"web", "worker", "bus"}
    for process in before.values():
        process.kill()

    def are_back() -> bool:
        now = server.children()
        return set(now) == set(before) and all(now[n].pid != before[n].pid for n in now)

    until(are_back, "they were not started again")
    until(server.ready, "not ready after they died")
    with redis.Redis.from_url(server.bus_url) as bus:
        assert bus.get("mark") == b"before", "on its port, with its data"
    with redis.Redis.from_url(server.bus_url) as bus:
        publish(bus, TELEMETRY, hello(world=1), run)
        publish(bus, TELEMETRY, StepBatch([record(0, 0)]), run)
    url = f"{V1}/runs/{run}"
    until(lambda: server.client.get(url).json()["step"] == 0, "the step did not arrive")
    assert server.end(signal.SIGINT) == 130


def test_killed_and_started_again(start: Callable[..., Server]) -> None:
    """Nothing outlives it, and agents find its successor's bus where they left it."""
    first = start()
    body = {"script": "train.py", "nproc": 1, "launch": False}
    run = first.client.post(f"{V1}/runs", json=body).json()["id"]
    with redis.Redis.from_url(first.bus_url) as bus:
        bus.set("kept", "yes")
    children = first.children()
    first.end(signal.SIGKILL)
    until(lambda: gone(children), "children outlived the server")
    second = start()
    assert second.bus_url == first.bus_url
    assert second.headers == first.headers, "agents go on with the token"
    assert second.client.get(f"{V1}/runs/{run}").status_code == 200
    with redis.Redis.from_url(second.bus_url) as bus:
        assert bus.get("kept") == b"yes"
    assert second.end() == 0


def test_an_orphaned_bus_is_taken_over(start: Callable[..., Server], tmp_path: Path) -> None:
    directory = tmp_path / "data" / "bus"
    with EmbeddedBus(directory) as orphan:
        (directory / "port").write_text(str(orphan.port))
        with redis.Redis.from_url(orphan.url) as bus:
            bus.set("kept", "yes")
        server = start()
        assert server.bus_url == orphan.url
        assert not orphan.alive()
        with redis.Redis.from_url(server.bus_url) as bus:
            assert bus.get("kept") == b"yes"
        assert server.end() == 0


def test_only_who_may_read_its_password_reaches_the_bus(tmp_path: Path) -> None:
    directory = tmp_path / 'a "quoted" \\ directory'
    with EmbeddedBus(directory) as bus:
        with redis.Redis.from_url(bus.url) as client:
            assert client.ping()
        with (
            redis.Redis(port=bus.port) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
        secret = directory / "password"
        assert secret.stat().st_mode & 0o777 == 0o600
        shown = psutil.Process(bus.pid).cmdline()
        assert secret.read_text().strip() not in " ".join(shown)
        url = bus.url
    assert secret.read_text().strip() not in (directory / "bus.log").read_text()
    assert EmbeddedBus(directory, bus.port).url == url, "agents and ranks come back to it"


def test_port_in_use(main: Main, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, _, said = main("server", "--port", str(port), "--data", str(tmp_path / "d"))
    assert code == 3
    assert f"port {port}" in said
    assert "--port" in said
    assert said.count("\n") == 1


def test_bus_port_taken_by_another_program(main: Main, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        (tmp_path / "bus").mkdir()
        (tmp_path / "bus" / "port").write_text(str(port))
        code, _, said = main("server", "--port", "0", "--data", str(tmp_path))
    assert code == 3
    assert f"port {port}" in said


def test_data_directory_that_cannot_be_written(main: Main, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, said = main("server", "--port", "0", "--data", str(tmp_path / "file" / "data"))
    assert code == 3
    assert "cannot be written" in said
    assert "--data" in said


def test_one_server_per_data_directory(main: Main, tmp_path: Path) -> None:
    with DataDirectory(tmp_path):
        code, _, said = main("server", "--port", "0", "--data", str(tmp_path))
    assert code == 3
    assert "another paceline server" in said


def test_a_part_alone_needs_to_be_told_where(main: Main) -> None:
    code, _, said = main("server", "--only", "web", "--bus", "redis://localhost:1")
    assert code == 2
    assert "--database" in said


def test_answers_leave_at_once() -> None:
    """Where asyncio leaves it to the socket: otherwise each body waits 40 ms for its header."""
    with listen(Settings("sqlite://", "redis://127.0.0.1", port=0)) as listener:
        with socket.create_connection(listener.getsockname()):
            connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
