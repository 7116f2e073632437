"""The embedded bus."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import yaml

from paceline.core.errors import PacelineError
from paceline.wire import run_telemetry
from paceline.wire.bus import connect
from paceline_backend.server import bus_limits, embedded, users
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.server.keys import Keys
from support.waiting import until

MIB = 2**20
COMPOSE = Path(__file__).parents[3] / "docker" / "compose.yaml"


def test_another_server_on_its_port_is_not_taken_for_its_own(tmp_path: Path) -> None:
    """One that outlived its supervisor answers like the child that could not bind the port."""
    with EmbeddedBus(tmp_path) as orphan:
        second = EmbeddedBus(tmp_path, orphan.port)
        with pytest.raises(PacelineError, match=f"did not start on port {orphan.port}"):
            second.start()
        assert not second.alive()
        assert orphan.alive()


@contextlib.contextmanager
def unfinished(bus: EmbeddedBus, login: users.User, announced: int) -> Iterator[socket.socket]:
    """A run's connection with an XADD whose last value has not come yet."""
    with socket.create_connection(("127.0.0.1", bus.port)) as client:
        command = ["AUTH", login.name, login.password]
        client.sendall(_encoded(command))
        assert client.recv(100).startswith(b"+OK")
        stream = run_telemetry("r")
        client.sendall(_encoded(["XADD", stream, "*", "data"], more=1) + b"$%d\r\n" % announced)
        yield client


def _encoded(words: list[str], more: int = 0) -> bytes:
    parts = [f"*{len(words) + more}\r\n"] + [f"${len(word)}\r\n{word}\r\n" for word in words]
    return "".join(parts).encode()


def test_unfinished_commands_of_a_run_take_bounded_memory(tmp_path: Path) -> None:
    """A run's user may open connections and begin commands on each of them."""
    login = users.of_run(Keys(b"secret" * 6), "r")
    with contextlib.ExitStack() as stack:
        bus = stack.enter_context(EmbeddedBus(tmp_path))
        client = stack.enter_context(connect(bus.url, keep=True))
        assert users.make(client, [login]) is None
        assert bus_limits.missing(client) == []
        with unfinished(bus, login, 400 * MIB) as thief:
            assert b"invalid bulk length" in thief.recv(200)
        # As in production, but with smaller numbers.
        client.config_set("maxmemory-clients", 64 * MIB)
        for _ in range(4):
            thief = stack.enter_context(unfinished(bus, login, 30 * MIB))
            with contextlib.suppress(OSError):  # closed while it sends
                thief.sendall(b"x" * (29 * MIB))
        until(lambda: client.info("stats")["evicted_clients"] >= 2, "the largest to be closed")
        assert client.info("memory")["mem_clients_normal"] < 80 * MIB
        assert client.client_list()[0]["flags"] == "e", "the control plane's is not evicted"
        with connect(login.url(bus.url)) as rank:
            assert rank.xadd(run_telemetry("r"), {"data": "x"})


def test_compose_has_the_same_limits() -> None:
    content = yaml.safe_load(COMPOSE.read_text())["configs"]["redis"]["content"]
    lines = {
        name: value for name, _, value in (each.partition(" ") for each in content.split("\n"))
    }
    assert {name: lines.get(name) for name in bus_limits.LIMITS} == bus_limits.LIMITS


def test_a_bus_without_limits_is_named(tmp_path: Path) -> None:
    """Redis's own defaults, each by its name."""
    defaults = {
        "proto-max-bulk-len": "536870912",
        "client-query-buffer-limit": "1073741824",
        "client-output-buffer-limit": "normal 0 0 0",
        "maxmemory-clients": "0",
        "timeout": "0",
    }
    with EmbeddedBus(tmp_path) as bus, connect(bus.url) as client:
        for name, value in defaults.items():
            client.config_set(name, value)
        assert bus_limits.missing(client) == list(bus_limits.LIMITS)
        rules = ("reset", "on", ">app", "~*", "+@all", "-config")
        client.execute_command("ACL", "SETUSER", "app", *rules)
        with connect(f"redis://app:app@127.0.0.1:{bus.port}/0") as app:
            assert bus_limits.missing(app) is None


def test_redis_7_0_has_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian 12's: it knows no CLIENT SETINFO."""
    path = shutil.which("redis-server")
    version = "" if path is None else subprocess.check_output([path, "--version"], text=True)
    if path is None or " v=7.0." not in version:
        pytest.skip("needs redis-server 7.0 (Debian 12: apt-get install redis-server)")
    monkeypatch.setattr(embedded, "_binary", lambda: path)
    login = users.of_run(Keys(b"secret" * 6), "r")
    with EmbeddedBus(tmp_path) as bus, connect(bus.url, keep=True) as client:
        assert bus_limits.missing(client) == []
        assert users.make(client, [login, users.of_node(Keys(b"secret" * 6), "n")]) is None
        with connect(login.url(bus.url)) as rank:
            assert rank.xadd(run_telemetry("r"), {"data": "x"})
            with pytest.raises(redis.exceptions.NoPermissionError):
                rank.xadd(run_telemetry("other"), {"data": "x"})
