"""A run whose ranks are Ray Train's workers: its logs, a hang, both stops, and going on."""

from __future__ import annotations

import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.core.errors import InputError
from paceline_backend.server.stack import Stack
from support.e2e import PAUSE_S, wait_for_end
from support.frameworks import WORLD, environment
from support.ray import BINARIES, MISSING
from support.waiting import TRAINING_S, until

pytestmark = [
    pytest.mark.long,  # Ray is there for `make test-engines` only
    pytest.mark.ranks,
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]

STARTING_S = 900.0  # Ray starts a dozen processes of Python, which takes minutes on a busy machine
SCRIPT = Path(__file__).with_name("ray_driver_script.py")
RAY = sysconfig.get_path("purelib", vars={"base": str(BINARIES.parent)})


@pytest.fixture
def of_ray() -> Iterator[Path]:
    """Short: names of Ray's sockets below it have at most 107 letters."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def stack(tmp_path: Path, of_ray: Path) -> Iterator[Stack]:
    """Its agent starts scripts with the Python of the tests, which finds Ray.

    It ends them before Ray's files are deleted.
    """
    assert of_ray.exists()
    made = Stack(tmp_path / "server", 0)
    env = environment()
    made.agent_env = {
        **env,
        "PYTHONPATH": f"{RAY}:{env['PYTHONPATH']}",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",  # a busy machine is no failure
        "RAY_DEDUP_LOGS": "0",  # else the second worker's lines, which are alike, come late
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "HOME": str(tmp_path),
    }
    try:
        yield made.start()
    finally:
        made.stop()


def start(stack: Stack, folder: Path, of_ray: Path) -> str:
    body = {
        "script": str(SCRIPT),
        "args": [str(folder), str(of_ray)],
        "nproc": WORLD,
        "env": {"PACELINE_DRIVER": "1"},
    }
    return str(stack.api("POST", "/runs", body)["id"])


@pytest.mark.timeout(3600)
def test_a_run_of_ray_trains_workers_hangs_is_stopped_and_goes_on(
    stack: Stack, tmp_path: Path, of_ray: Path
) -> None:
    run = start(stack, tmp_path, of_ray)
    reaches(stack, run, 10)
    until(lambda: "worker 1 of 2 begins" in log(stack, run), "a worker's output", TRAINING_S)
    with pytest.raises(InputError, match="so only rank 0 has a log"):
        stack.api("GET", f"/runs/{run}/logs/1")

    (tmp_path / "hangs").touch()
    hang = until(lambda: hung(stack, run), "a worker to hang", TRAINING_S, 1)
    assert (hang["waiting"], hang["holding"]) == ([0], [1])
    with pytest.raises(InputError, match="run `ray stack` on their machine"):
        stack.api("GET", f"/runs/{run}/stacks")
    (tmp_path / "hangs").unlink()

    stack.api("POST", f"/runs/{run}/stop")
    stopped = wait_for_end(stack, run, "stopped")
    said = log(stack, run)
    assert "worker 1 is through" in said and "the driver is through" in said
    assert not left(run), "Ray ends with its driver"

    stack.api("POST", f"/runs/{run}/resume")
    reaches(stack, run, stopped["step"] + 20)
    now = stack.api("GET", f"/runs/{run}")
    assert (now["attempt"], now["world"], now["driver"]) == (1, WORLD, True)
    assert "worker 1 of 2 begins" in log(stack, run)
    [_, again] = stack.api("GET", f"/runs/{run}/attempts")
    assert (again["step"], again["again"]) == (stopped["step"] + 1, 0), "Ray's checkpoint has all"

    stack.api("POST", f"/runs/{run}/stop", {"force": True})
    assert wait_for_end(stack, run, "stopped")["message"] == "stopped over the API"
    until(lambda: not left(run), "the end of all that Ray has started", TRAINING_S)
    assert "the driver is through" not in log(stack, run)


def reaches(stack: Stack, run: str, step: int) -> None:
    def reached() -> bool:
        now = stack.api("GET", f"/runs/{run}")
        assert now["state"] not in ("failed", "stopped"), now["message"]
        return now["step"] is not None and now["step"] >= step

    until(reached, f"step {step} of run {run}", STARTING_S, PAUSE_S)


def log(stack: Stack, run: str) -> str:
    """What the newest driver has printed, and Ray's workers with it."""
    return str(stack.api("GET", f"/runs/{run}/logs/0")["text"])


def hung(stack: Stack, run: str) -> dict[str, object] | None:
    hang = stack.api("GET", f"/runs/{run}/hang?after_s=10")
    return hang if hang["hung"] else None


def left(run: str) -> list[psutil.Process]:
    """Processes of a run: each has its variable, but for those that begin or end just now."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("PACELINE_RUN") == run:
                processes.append(process)
        except (psutil.Error, OSError):
            continue
    return processes
