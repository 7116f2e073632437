"""Each image's very command, run in a clean directory with a real Postgres and Redis."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import yaml

from support.ports import free_port
from support.postgres import Postgres
from support.waiting import DEADLINE_S

DOCKER = Path(__file__).parents[2] / "docker"


def command(image: str, folder: Path, port: int) -> list[str]:
    """ENTRYPOINT + CMD of a Dockerfile, with what a container has to itself moved."""
    text = (DOCKER / f"{image}.Dockerfile").read_text()
    parts = [
        json.loads(re.search(rf"^{k} (\[.*\])$", text, re.M)[1]) for k in ("ENTRYPOINT", "CMD")
    ]
    moved = {"/data": str(folder), "8000": str(port), "0.0.0.0": "127.0.0.1"}
    return [moved.get(part, part) for part in parts[0] + parts[1]]


def environment(service: str, values: dict[str, str]) -> dict[str, str]:
    """The service's environment in compose.yaml, with values put in."""
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    names = compose["services"][service]["environment"]
    assert set(names) == set(values), f"compose.yaml gives {service} other variables than its test"
    keep = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
    venv = str(Path(__file__).parents[2] / ".venv" / "bin")
    return {**keep, **values, "PATH": venv + os.pathsep + keep["PATH"]}


def test_secrets_go_where_they_are_needed_only() -> None:
    """The agent reaches the bus's port: neither that password nor the admin token is for it."""
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services = compose["services"]
    assert "requirepass ${REDIS_PASSWORD:?" in compose["configs"]["redis"]["content"]
    for name in ("agent", "prometheus", "grafana"):
        text = json.dumps(services[name])
        assert not re.search(r"\$\{(PACELINE_TOKEN|REDIS_PASSWORD|POSTGRES_PASSWORD)\b", text), name
        given = {
            compose["secrets"][secret]["environment"]
            for secret in services[name].get("secrets", [])
        }
        assert "PACELINE_TOKEN" not in given, name
    assert services["postgres"]["networks"] == ["database"]
    assert "networks" not in services["agent"]


def test_entry_points(tmp_path: Path, bus_url: str, _postgres: Postgres) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    tokens = {
        "PACELINE_TOKEN": "a-token-for-this-test",
        "PACELINE_AGENT_TOKEN": "an-agents-token-for-this-test",
        "PACELINE_VIEWER_TOKEN": "a-viewers-token-for-this-test",
    }
    headers, agents, viewers = ({"Authorization": f"Bearer {token}"} for token in tokens.values())
    folders = {name: tmp_path / name for name in ("control-plane", "agent")}
    for folder in folders.values():
        folder.mkdir()
    settings = {
        "control-plane": {
            **tokens,
            "PACELINE_DATABASE": _postgres.database().replace("+psycopg", ""),
            "PACELINE_BUS": bus_url,
        },
        "agent": {"PACELINE_TOKEN": tokens["PACELINE_AGENT_TOKEN"], "PACELINE_SERVER": url},
    }
    running: list[subprocess.Popen[bytes]] = []

    def wait_until(path: str, good: object) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            assert running[-1].poll() is None, (folders["agent"].parent / "log").read_text()
            try:
                answer = httpx.get(url + path, headers=headers, timeout=30)
                if good(answer):  # type: ignore[operator]
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        pytest.fail(f"{path} did not become as it should")

    try:
        with (tmp_path / "log").open("wb") as log:
            for service, path, good in (
                ("control-plane", "/readyz", lambda a: a.is_success),
                ("agent", "/api/v1/nodes", lambda a: any(n["alive"] for n in a.json())),
            ):
                running.append(
                    subprocess.Popen(
                        command(service, folders[service], port),
                        cwd=folders[service],
                        env=environment(service, settings[service]),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
                wait_until(path, good)
        assert httpx.get(url + "/api/v1/runs", timeout=DEADLINE_S).status_code == 401
        assert (
            httpx.get(url + "/api/v1/runs", headers=headers, timeout=DEADLINE_S).json()["items"]
            == []
        )
        assert (
            httpx.get(url + "/api/v1/runs", headers=agents, timeout=DEADLINE_S).status_code == 403
        )
        assert httpx.get(url + "/metrics", headers=viewers, timeout=DEADLINE_S).status_code == 200
        assert (
            httpx.get(url + "/api/v1/tokens", headers=viewers, timeout=DEADLINE_S).status_code
            == 403
        )
    finally:
        for process in reversed(running):
            process.send_signal(signal.SIGTERM)
        ended = [process.wait(timeout=DEADLINE_S) for process in running]
    assert set(ended) <= {0, 143}
