"""A real agent measures its machine, again when it is asked, and not while ranks train there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline_backend.server.stack import Stack
from support.e2e import PAUSE_S
from support.node import paceline
from support.waiting import DEADLINE_S, TRAINING_S, until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]


def check(stack: Stack) -> dict[str, Any] | None:
    """The node, if it was measured."""
    [node] = stack.api("GET", "/nodes")
    return node if node["check"] else None


def test_an_agent_measures_its_machine(stack: Stack, tmp_path: Path) -> None:
    first = until(lambda: check(stack), "the agent to measure", TRAINING_S, PAUSE_S)
    speeds = first["check"]
    assert speeds["compute_gflops"] > 0
    assert speeds["memory_gbps"] > 0
    assert speeds["disk_mbps"] > 0
    assert not list((tmp_path / "data").rglob(".check-*"))
    said = paceline("check", first["id"], "--json", "--server", stack.url)
    out, err = said.communicate(timeout=TRAINING_S)
    assert said.returncode == 0, err
    assert json.loads(out)["checked_at"] > first["checked_at"]
    listed = paceline("nodes", "--server", stack.url).communicate(timeout=DEADLINE_S)[0]
    assert "GFLOP/s" in listed.replace("\n", "")

    script = tmp_path / "train.py"
    script.write_text("import time\ntime.sleep(3600)\n")
    run = stack.api("POST", "/runs", {"script": str(script), "nproc": 1})["id"]
    until(lambda: stack.api("GET", "/nodes")[0]["runs"], "the run to start", DEADLINE_S, PAUSE_S)
    said = paceline("check", first["id"], "--server", stack.url)
    _, err = said.communicate(timeout=DEADLINE_S)
    assert (said.returncode, f"ranks train on {first['id']}" in err) == (2, True)
    stack.api("POST", f"/runs/{run}/stop", {"force": True})
