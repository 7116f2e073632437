"""A web process that has no token of its own gets its first one from whoever has the database."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from paceline.core.errors import PacelineError
from paceline.node.processes import number_of, reserved_port
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store
from paceline_backend.store.schema import audit
from support.command_line import Main
from support.waiting import DEADLINE_S, until


@contextmanager
def web(database: str, bus_url: str, host: str, log: Path) -> Iterator[int]:
    """A web process alone; its port."""
    with reserved_port() as reserved, log.open("w") as file:
        port = number_of(reserved)
        where = ["--only", "web", "--host", host, "--port", str(port)]
        command = [sys.executable, "-m", "paceline", "server", *where, "--database", database]
        process = subprocess.Popen([*command, "--bus", bus_url], stderr=file)
        try:
            until(lambda: healthy(port) or process.poll() is not None, "the web process", 120, 0.2)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(DEADLINE_S)
            finally:
                process.kill()
                process.wait()


def healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False).is_success
    except httpx.TransportError:
        return False


def test_a_web_process_alone(main: Main, database_url: str, bus_url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with web(database_url, bus_url, "0.0.0.0", log) as port:
        server = f"http://127.0.0.1:{port}"
        assert "token create NAME --scope admin --database URL" in log.read_text()
        code, _, err = main("runs", "--server", server)
        assert (code, "requires a token" in err) == (3, True)

        at = ("--scope", "admin", "--database", database_url)
        code, out, err = main("token", "create", "first", *at, "--expires", "1h", "--json")
        assert code == 0, err
        made = json.loads(out)
        assert (made["name"], made["scope"]) == ("first", "admin")
        assert made["created_by"].startswith("database, by ")
        code, out, err = main("token", "list", "--server", server, "--token", made["token"])
        assert (code, "first" in out) == (0, True), err

    with Store.open(database_url) as store, store.read() as connection:
        c = audit.c
        rows = connection.execute(sa.select(c.action, c.target, c.via)).all()
        assert rows == [("token.create", "first", "paceline token")]


def test_mistakes_make_no_token(main: Main, tmp_path: Path) -> None:
    at = ("--database", f"sqlite:///{tmp_path}/paceline.db", "--scope", "admin")
    code, _, err = main("token", "create", "auto", *at)
    assert (code, "name: " in err) == (2, True), err
    code, _, err = main("token", "create", "n", *at, "--node", "n1")
    assert (code, "node: give a valid node name" in err) == (2, True), err
    code, _, err = main("token", "create", "n", "--database", "nonsense", "--scope", "admin")
    assert code in (2, 3), err
    assert "Traceback" not in err


def test_a_server_with_an_agent_s_bus_still_wants_a_token_beyond_loopback() -> None:
    Settings("sqlite://", "redis://bus", "0.0.0.0", makes_token=False)
    with pytest.raises(PacelineError, match="--token"):
        Settings("sqlite://", "redis://bus", "0.0.0.0")
