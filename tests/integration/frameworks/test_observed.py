"""Scripts that know nothing of Paceline train as ever under `paceline observe`, and are shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import PacelineError
from paceline_backend.server.stack import Stack
from support.e2e import wait_for_end
from support.frameworks import ROOT, WORLD, environment, read
from support.marks import some_long
from support.waiting import until

pytestmark = pytest.mark.ranks

SCRIPT = ROOT / "tests" / "support" / "observed_script.py"
CASE = json.dumps({"plain": True, "count": 320, "epochs": 3})
KINDS = {
    "ddp": [],
    "fsdp": [],
    "compiled": [],
    "accelerate": [CASE],
    "transformers": [CASE],
    "lightning": [CASE],
}


@pytest.mark.parametrize("kind", some_long(KINDS, 6))
def test_an_unchanged_script_is_observed(shared_stack: Stack, tmp_path: Path, kind: str) -> None:
    for name in ("plain", "seen"):
        (tmp_path / name).mkdir()
    torchrun(kind, tmp_path / "plain", before=[])
    run = observed(shared_stack, kind, tmp_path / "seen")
    assert read(tmp_path / "seen") == read(tmp_path / "plain")  # bit by bit
    now = shared_stack.api("GET", f"/runs/{run}")
    assert (now["policy"], now["world"], now["nproc"]) == ("observed", WORLD, WORLD)
    assert now["step"] + 1 >= 60  # all steps of both ranks
    verdict = shared_stack.api("GET", f"/runs/{run}/verdict")
    # A busy machine may hold up all ranks besides, or the other one for a while, which costs less.
    slow_ranks = [each["ranks"] for each in verdict["causes"] if each["kind"] == "node"]
    assert slow_ranks[:1] == [[1]], verdict["words"]
    workers = shared_stack.api("GET", f"/runs/{run}/workers")
    fast, slow = workers
    assert slow["compute_s"] > fast["compute_s"] and fast["wait_s"] > slow["wait_s"]
    assert {each["samples"] for each in workers} == {8.0}


def test_what_an_observed_run_does_not_take(shared_stack: Stack, tmp_path: Path) -> None:
    run = observed(shared_stack, "ddp", tmp_path)
    assert "no policy can be in force" in shared_stack.api("GET", f"/runs/{run}")["notice"]
    for path, body in (("policy", {"policy": "bsp"}), ("auto", {"mode": "switch"})):
        method = "PUT" if path == "auto" else "POST"
        with pytest.raises(PacelineError, match="is observed"):
            shared_stack.api(method, f"/runs/{run}/{path}", body)
    for _ in range(3):  # a busy machine may change a rank's speed in a run's last steps
        answer = shared_stack.api("GET", f"/runs/{run}/whatif")
        if "speed changed" not in (answer["reason"] or ""):
            break
        run = observed(shared_stack, "ddp", tmp_path)
    assert answer["reason"] is None and "reports no sizes" in answer["assumes"]
    best = max(answer["forecasts"], key=lambda each: each["saving"])
    assert best["saving"] > 0.1  # rank 1 would get fewer samples


def test_a_script_without_a_session_is_told_so(shared_stack: Stack, tmp_path: Path) -> None:
    command = ["run", "--nproc", "2", str(SCRIPT), "ddp", str(tmp_path)]
    ended = paceline(shared_stack, tmp_path, command)
    assert ended.returncode == 0, ended.stderr
    assert "No rank has iterated over the loader of a paceline.Session" in ended.stderr
    run = newest(shared_stack)
    assert run["attempt"] is None and "paceline run --observe" in run["notice"]


def test_run_observes_too(shared_stack: Stack, tmp_path: Path) -> None:
    command = ["run", "--observe", "--nproc", "2", str(SCRIPT), "ddp", str(tmp_path)]
    ended = paceline(shared_stack, tmp_path, command)
    assert ended.returncode == 0, ended.stderr
    run = newest(shared_stack)["id"]
    until(lambda: shared_stack.api("GET", f"/runs/{run}")["step"], "its steps")
    causes = shared_stack.api("GET", f"/runs/{run}/verdict")["causes"]
    assert [1] in [each["ranks"] for each in causes]


def observed(stack: Stack, kind: str, directory: Path) -> str:
    """The id of the run that an observed script made."""
    before = ["-m", "paceline", "observe", "--server", stack.url, "--data", str(directory), "--"]
    torchrun(kind, directory, before)
    run = str(newest(stack)["id"])
    wait_for_end(stack, run)
    return run


def torchrun(kind: str, directory: Path, before: Sequence[str]) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}"]
    own = [sys.executable] if before else []
    ended = subprocess.run(
        [sys.executable, *before, *own, *launch, str(SCRIPT), kind, str(directory), *KINDS[kind]],
        env={**os.environ, **environment()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def paceline(stack: Stack, directory: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    name, *rest = command
    where = ["--server", stack.url, "--data", str(directory)]
    return subprocess.run(
        [sys.executable, "-m", "paceline", name, *where, *rest],
        env={**os.environ, **environment()},
        capture_output=True,
        text=True,
        timeout=300,
    )


def newest(stack: Stack) -> dict[str, Any]:
    run: dict[str, Any] = stack.api("GET", "/runs?limit=1")["items"][0]
    return run
