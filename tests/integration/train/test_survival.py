"""Ranks are killed, TorchElastic starts them again, and training goes on from its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support import surviving_script
from support.launched import WORLD, Line, launched, not_trained_again
from support.surviving_script import EPOCHS, EVERY, SAMPLES, Kill

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
BOTH = [0, 1]


def survive(directory: Path, kills: list[Kill]) -> tuple[list[Line], list[dict[str, Any]]]:
    """What the ranks of a run did in each step, and how each of them ended."""
    arguments = [str(directory), json.dumps(kills)]
    code, said = launched(surviving_script.__file__, directory, arguments, len(kills))
    assert code == 0, said
    lines: list[Line] = []
    for rank in range(WORLD):
        text = (directory / f"steps-{rank}").read_text()
        lines += [tuple(json.loads(line)) for line in text.splitlines()]
    return lines, [torch.load(directory / f"end-{rank}.pt") for rank in range(WORLD)]


def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    """All ranks die, a rank dies with a checkpoint half made, and a rank dies in a later epoch."""
    kills: list[Kill] = [(4, BOTH, "body"), (5, [0], "saving"), (14, [1], "body")]
    _, undisturbed = survive(tmp_path / "calm", [])
    lines, ends = survive(tmp_path / "killed", kills)
    begins = [min(step for a, _, step, _ in lines if a == attempt) for attempt in range(4)]
    assert begins == [0, 3, 3, 12]
    for attempt, begin in enumerate(begins[1:]):
        done = max(step for a, _, step, _ in lines if a == attempt) + 1
        assert done - begin <= EVERY
    trained: dict[int, list[Line]] = {}
    for line in not_trained_again(lines):
        trained.setdefault(line[1], []).append(line)
    assert sorted(trained) == list(range(EPOCHS))
    for epoch in trained.values():
        assert sorted(index for *_, samples in epoch for index in samples) == list(range(SAMPLES))
    for mine, theirs in zip(ends, undisturbed, strict=True):
        torch.testing.assert_close(mine["parameters"], theirs["parameters"], rtol=0, atol=1e-5)
        assert (mine["scale"], mine["lr"]) == (theirs["scale"], theirs["lr"])
    names = sorted(path.name for path in (tmp_path / "killed" / "checkpoints").iterdir())
    assert names == ["step-000000015", "step-000000018"]
