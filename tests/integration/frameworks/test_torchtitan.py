"""A loop as torchtitan's trains the same with Paceline, on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.frameworks import ROOT, Results, environment, results

pytestmark = pytest.mark.ranks

SCRIPT = ROOT / "tests" / "support" / "torchtitan_script.py"
EXAMPLE = ROOT / "examples" / "frameworks" / "like_torchtitan.py"
PLAIN, *PACED = range(4)  # even, uneven, and uneven from a checkpoint on


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results(SCRIPT, tmp_path_factory.mktemp("torchtitan"))


@pytest.mark.parametrize("case", PACED)
def test_training_is_that_of_the_plain_loop(ranks: Results, case: int) -> None:
    got, wanted = ranks[0][case], ranks[0][PLAIN]
    assert got["norms"] == pytest.approx(wanted["norms"], abs=2e-5)
    assert got["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
    assert got["rates"] == wanted["rates"]
    assert wanted["loss"] < 1.6  # log 5: it has learned something


def test_the_example_runs_alone() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", EXAMPLE, "--steps=20"],
        env={**os.environ, **environment()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert "loss of all samples 1." in ended.stdout
