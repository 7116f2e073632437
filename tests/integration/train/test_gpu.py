"""The GPU kit: its checks on a GPU, if there is one, and its program on the CPU."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.train.timing import CudaClock
from support.ranks import hang

ROOT = Path(__file__).parents[3]
PARTS = (
    "timing",
    "nccl",
    "gradients",
    "synchronisers",
    "kinds",
    "overhead",
    "copies",
    "mixed-precision",
    "memory",
    "compiled",
)
pytestmark = pytest.mark.ranks
no_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU here, or torch has no CUDA"
)


@pytest.fixture(scope="module")
def program() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("gpu_check")


@pytest.fixture
def kit(program: Any) -> Iterator[Any]:
    made = program.Kit("cpu", quick=True)
    yield made
    made.close()


@pytest.fixture(scope="module")
def gpu(program: Any) -> Iterator[Any]:
    made = program.Kit("cuda", quick=True)
    yield made
    made.close()


def misses(program: Any, checks: list[Any]) -> list[str]:
    """Failed checks, but for those that depend on time."""
    return [
        f"{check.name}: {check.value}"
        for check in checks
        if not (check.ok or check.name.endswith(program.TIME))
    ]


def test_every_part_is_tested(program: Any) -> None:
    assert tuple(program.PARTS) == PARTS


@no_gpu
@pytest.mark.parametrize("part", PARTS)
def test_on_a_gpu(program: Any, gpu: Any, part: str) -> None:
    results, checks = program.run_parts(gpu, [part])
    assert not misses(program, checks), results


def test_on_the_cpu(program: Any, kit: Any) -> None:
    results, checks = program.run_parts(kit, PARTS)
    assert not misses(program, checks), results
    assert all(len([c for c in checks if c.name.startswith(f"{part}:")]) >= 2 for part in PARTS)
    assert program.table_of(results).count("\n") > len(PARTS)
    json.dumps(results)


def test_a_part_that_hangs_or_fails_is_reported_and_the_others_go_on(
    program: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Any) -> Any:
        raise RuntimeError("out of memory")

    parts = {
        "hangs": (lambda kit: kit.run(hang, world=1), 1.0),
        "fails": (fails, 60.0),
        "fine": (lambda kit: ({"seen": 1}, [program.Check("seen", 1, 1, ">=")]), 60.0),
    }
    monkeypatch.setattr(program, "PARTS", parts)
    results, checks = program.run_parts(kit, [*parts])
    assert [check.name for check in checks if not check.ok] == [
        "hangs: ended without an error",
        "fails: ended without an error",
    ]
    assert "did not end" in results["hangs"]["error"]
    assert "out of memory" in results["fails"]["error"]
    assert results["fine"]["seen"] == 1


def test_no_part_begins_once_the_time_is_used_up(program: Any) -> None:
    kit = program.Kit("cpu", quick=True, whole_s=0.0)
    results, (check,) = program.run_parts(kit, ["gradients"])
    assert not check.ok
    assert "no time is left" in results["gradients"]["error"]


def test_wrong_gradients_are_a_miss(
    program: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(_: Any, __: Any, ___: str, shares: list[float], *____: Any, **_____: Any) -> Any:
        return program.Outcome([{"errors": [1e-8, 3e-5], "empty": 0}])

    monkeypatch.setattr(program.Kit, "run", wrong)
    _, checks = program.run_parts(kit, ["gradients"])
    missed = misses(program, checks)
    assert len(missed) == 6 + 2  # all errors, and the batches that should have been empty


class Event:
    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.streams: list[object] = []

    def record(self, stream: object) -> None:
        self.streams.append(stream)


def test_stamps_are_in_the_streams_of_the_models_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a thread whose current device is another one: else times cannot be compared."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    clock: Any = CudaClock(torch.device("cuda", 1))
    first = clock.stamp()
    assert clock.restamp(first) is first
    assert first.streams == ["stream of cuda:1"] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_program_says_so(tmp_path: Path) -> None:
    """One line, or JSON; no file, and no failure."""
    out = tmp_path / "gpu.json"
    command = ["make", "-s", "gpu-check", f"PYTHON={sys.executable}", f"ARGS=--json --out {out}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    whole = json.loads(ended.stdout)
    assert whole["results"]["skipped"].startswith("no GPU")
    assert whole["checks"] == []
    assert not out.exists()
