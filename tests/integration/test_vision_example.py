"""examples/vision: what it makes, that clips stand for themselves, and that it runs and learns."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from paceline_backend.server.stack import Stack
from support.e2e import wait_for_end

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "vision"


def module(name: str) -> ModuleType:
    """A file of the example, under a name that no other example has."""
    spec = importlib.util.spec_from_file_location(f"vision_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


data, model = module("data"), module("model")


def test_clips_are_of_uneven_length_and_the_same_each_time() -> None:
    train, held_out, again = data.Clips(train=True), data.Clips(train=False), data.Clips(train=True)
    assert (len(train), len(held_out)) == (1436, 361)
    assert train.sizes == [len(frames) for frames, _ in train.items] == again.sizes
    assert min(train.sizes) == data.SHORTEST and max(train.sizes) == data.LONGEST
    assert np.quantile(train.sizes, 0.9) > 2.5 * np.median(train.sizes)
    assert {digit for _, digit in train.items} == set(range(data.CLASSES))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(train.items, again.items, strict=True))
    assert train.items[0][0].shape[1:] == (1, data.SIDE, data.SIDE)


def test_a_digit_stays_whole_and_moves() -> None:
    digit = np.zeros((8, 8))
    digit[0, 0] = digit[7, 7] = 1e3  # outshines the noise
    frames = data.clip(digit, np.random.default_rng(3))
    bright = [np.argwhere(frame[0].numpy() > 500).tolist() for frame in frames]
    corners = [(first, last) for first, last in bright]
    assert all([a + 7 for a in first] == last for first, last in corners)
    assert len({tuple(first) for first, _ in corners}) > 1


def test_a_clips_output_depends_on_its_own_frames_alone() -> None:
    """Outside of training: in training, BatchNorm sees the frames of the whole batch."""
    torch.manual_seed(0)
    net = model.ClipNet(data.CLASSES).eval()
    items = [(torch.randn(n, 1, data.SIDE, data.SIDE), 0) for n in (2, 7, 31)]
    together = net(*data.collate(items)[:2])
    alone = torch.cat([net(*data.collate([item])[:2]) for item in items])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0.0)


@pytest.mark.ranks
def test_it_learns_under_torchrun_alone(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(EXAMPLE / "train.py"), "--epochs", "2", "--result", str(tmp_path / "result")]
    environment = {name: value for name, value in os.environ.items() if "PACELINE" not in name}
    ended = subprocess.run(
        [sys.executable, *launch, *script],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((tmp_path / "result").read_text())["accuracy"][-1] > 0.6


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_it_learns_while_a_controller_plans_for_uneven_ranks(tmp_path: Path) -> None:
    # Rank 1 is five times as slow: half of a step's 300 frames take it 150 ms.
    emulate = {"a_s": [2e-4, 1e-3], "b_s": [0.004, 0.004]}
    with Stack(tmp_path / "data", 0) as stack:
        body = {
            "script": str(EXAMPLE / "train.py"),
            "args": ["--epochs", "2", "--result", str(tmp_path / "result")],
            "nproc": 2,
            "policy": "paceline",
            "env": {"PACELINE_EMULATE": json.dumps(emulate)},
        }
        run = stack.api("POST", "/runs", body)["id"]
        wait_for_end(stack, run)
        evaluations = stack.api("GET", f"/runs/{run}/evaluations")
        coverage = stack.api("GET", f"/runs/{run}/coverage")
        loads = [worker["load"] for worker in stack.api("GET", f"/runs/{run}/workers")]
    assert coverage["exact"]
    accuracies = [each["metrics"]["accuracy"] for each in evaluations]
    assert len(accuracies) == 2
    # One figure of both ranks' parts, which no rank has by itself.
    assert accuracies[-1] > 0.6
    # A busy machine makes both slower than they are to be, and so more alike.
    assert loads[1] < loads[0], "the slow rank gets fewer frames"
