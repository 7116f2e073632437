"""Training in Ray Train's loop is the same with Paceline, on two workers of a real Ray."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline_backend.server.stack import Stack
from support.frameworks import ROOT, WORLD, Results, environment, read
from support.ray import BINARIES, MISSING

pytestmark = [
    pytest.mark.long,  # Ray is there for `make test-engines` only
    pytest.mark.ranks,
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]

SCRIPT = Path(__file__).with_name("ray_train_script.py")  # beside no other module named ray
PLAIN, EVEN, UNEVEN, REFUSALS, EXAMPLE = range(5)  # its cases
STEPS = 60
FAILED_IN = 2  # epoch
# Rank 1 is three times slower: half of a step's 250 words take it 75 ms.
EMULATE = {"a_s": [2e-4, 6e-4], "b_s": [0.004, 0.004]}


@pytest.fixture(scope="module")
def of_ray() -> Iterator[Path]:
    """Short: names of Ray's sockets below it have at most 107 letters."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, of_ray: Path) -> Path:
    """Of the script's cases, which have no control plane."""
    made = tmp_path_factory.mktemp("ray_train")
    python(made, str(SCRIPT), str(made), str(of_ray), "cases")
    return made


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Results:
    return read(folder)


@pytest.mark.parametrize("case", [EVEN, UNEVEN])
def test_training_is_ray_trains_own(ranks: Results, case: int) -> None:
    got, wanted = ranks[0][case], ranks[0][PLAIN]
    assert got["losses"] == pytest.approx(wanted["losses"], abs=1e-5)
    assert wanted["losses"][-1] < wanted["losses"][0]
    assert got["losses"] == ranks[1][case]["losses"]
    assert len(got["counts"]) == len(wanted["counts"]) == STEPS


def test_batches_were_uneven(ranks: Results) -> None:
    assert [set(rank[UNEVEN]["counts"]) for rank in ranks] == [{5}, {11}]


def test_what_ray_train_wraps_is_refused_at_once(ranks: Results) -> None:
    wanted = [
        "the model is already a DistributedDataParallel: give session.wrap the plain model, once, "
        "instead of DistributedDataParallel; Ray Train's prepare_model(model, "
        "parallel_strategy=None) does not wrap it",
        "session.wrap has already wrapped this model, and DistributedDataParallel around it would",
        "session.loader has no sampler that a framework could replace",
    ]
    for said in (rank[REFUSALS] for rank in ranks):
        assert len(said) == len(wanted)
        for sentence, part in zip(said, wanted, strict=True):
            assert part in sentence


def test_the_example_prints_what_ray_train_alone_reports(ranks: Results, folder: Path) -> None:
    accuracy, weights = (ranks[0][EXAMPLE][name] for name in ("accuracy", "weights"))
    wanted = f"held-out accuracy {accuracy:.4f}, sum of weights {weights:.4f}\n"
    assert (folder / "example").read_text() == wanted


def test_a_driver_makes_a_run_whose_workers_are_planned(
    ranks: Results, of_ray: Path, tmp_path: Path
) -> None:
    """One worker fails once: Ray starts all anew, which is the run's next attempt."""
    with Stack(tmp_path / "server", 0) as server:
        token = ["--token-file", str(tmp_path / "server" / "token")]
        where = ["--server", server.url, *token, "--data", str(tmp_path / "data")]
        ranks_are = ["--nproc", str(WORLD), "--max-restarts", "1", "--emulate", json.dumps(EMULATE)]
        script = [str(SCRIPT), str(tmp_path), str(of_ray), "run"]
        python(tmp_path, "-m", "paceline", "run", "--driver", *where, *ranks_are, *script)
        [run] = server.api("GET", "/runs?limit=1")["items"]
        assert (run["state"], run["world"], run["attempt"]) == ("finished", WORLD, 1)
        assert run["step"] == STEPS - 1
        losses = server.api("GET", f"/runs/{run['id']}/steps?points=5000")["loss"]
        assert None not in losses
        fast, slow = server.api("GET", f"/runs/{run['id']}/workers")
        segments = server.api("GET", f"/runs/{run['id']}/segments?limit=500")
    assert slow["samples"] < 0.8 * fast["samples"]
    assert any(each["source"] == "controller" for each in segments)
    results = read(tmp_path)
    ((got, of_first), (other, of_second)) = results
    wanted = ranks[0][PLAIN]["losses"]
    assert got["losses"] == pytest.approx(wanted[FAILED_IN:], abs=1e-5)
    assert sum(other["counts"]) < 0.8 * sum(got["counts"])
    assert of_first == of_second and len(json.loads(of_first["PACELINE_PLACEMENT"])) == WORLD
    assert of_first["PACELINE_ATTEMPT"] == "1"
    assert_is_nowhere(of_first["PACELINE_KEY"], of_ray)


def assert_is_nowhere(key: str, of_ray: Path) -> None:
    """Nothing that Ray has written down has the run's key."""
    logs = [log for log in of_ray.glob("session_*/**/*") if log.is_file()]
    assert logs
    assert not [log for log in logs if key.encode() in log.read_bytes()]


def python(home: Path, *command: str) -> None:
    """Runs a command with the Python that has Ray; Ray's own files go to a home of its own."""
    env: dict[str, Any] = {**os.environ, **environment()}
    env["PYTHONPATH"] += f"{os.pathsep}{ROOT / 'examples' / 'frameworks'}"
    env |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "HOME": str(home)}
    ended = subprocess.run(
        [str(BINARIES / "python"), *command], env=env, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
