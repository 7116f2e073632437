"""Ranks are killed, TorchElastic starts them again, and training goes on from its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.node import rundir
from paceline.node.rundir import Record
from paceline.node.supervisor import Supervisor
from paceline.wire import Launch
from support import surviving_script
from support.surviving_script import EPOCHS, EVERY, SAMPLES, STEPS, Kill
from support.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
WORLD = 2
BOTH = [0, 1]

Line = tuple[int, int, int, list[int]]  # attempt, epoch, step, samples


def run(script: str, directory: Path, arguments: list[str], restarts: int) -> Supervisor:
    """Runs a script to its end under a launcher."""
    directory.mkdir()
    launch = Launch(script, arguments, WORLD, {}, max_restarts=restarts)
    supervisor = Supervisor(launch, directory, Record("r0", "here", "the test", ""), None)
    supervisor.start()

    def settled() -> bool:
        supervisor.poll()
        return supervisor.settled

    try:
        until(settled, "the run to settle", 400)
        assert supervisor.last is not None
        assert supervisor.last.exit_code == 0, supervisor.last.message
    finally:
        supervisor.close()
    return supervisor


def survive(directory: Path, kills: list[Kill]) -> tuple[list[Line], list[dict[str, Any]]]:
    """What the ranks of a run did in each step, and how each of them ended."""
    arguments = [str(directory), json.dumps(kills)]
    run(surviving_script.__file__, directory, arguments, len(kills))
    lines: list[Line] = []
    for rank in range(WORLD):
        text = (directory / f"steps-{rank}").read_text()
        lines += [tuple(json.loads(line)) for line in text.splitlines()]
    return lines, [torch.load(directory / f"end-{rank}.pt") for rank in range(WORLD)]


def surviving(lines: list[Line]) -> dict[int, list[Line]]:
    """Epoch → what was trained, without the steps that a later attempt trained again."""
    first: dict[int, int] = {}
    for attempt, _, step, _ in lines:
        first[attempt] = min(step, first.get(attempt, STEPS))
    epochs: dict[int, list[Line]] = {}
    for line in lines:
        if all(line[2] < begin for attempt, begin in first.items() if attempt > line[0]):
            epochs.setdefault(line[1], []).append(line)
    return epochs


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
    trained = surviving(lines)
    assert sorted(trained) == list(range(EPOCHS))
    for epoch in trained.values():
        assert sorted(index for *_, samples in epoch for index in samples) == list(range(SAMPLES))
    for mine, theirs in zip(ends, undisturbed, strict=True):
        torch.testing.assert_close(mine["parameters"], theirs["parameters"], rtol=0, atol=1e-5)
        assert (mine["scale"], mine["lr"]) == (theirs["scale"], theirs["lr"])
    names = sorted(path.name for path in (tmp_path / "killed" / "checkpoints").iterdir())
    assert names == ["step-000000015", "step-000000018"]


@pytest.mark.long
def test_a_run_without_checkpoints_says_what_a_restart_costs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import paceline, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "session = paceline.Session([1, 2, 3, 4], global_batch=2)\n"
        "loader = session.loader()\n"
        "for _ in session.epochs(2):\n"
        "    for _ in loader: pass\n"
        "session.close()\n"
        "dist.destroy_process_group()\n"
    )
    for restarts in (0, 1):
        supervisor = run(str(script), tmp_path / str(restarts), [], restarts)
        logs = [rundir.rank_log(supervisor.directory, 0, rank, "stderr") for rank in range(WORLD)]
        texts = [log.read_text() for log in logs]
        assert [text.count("a restart begins at step 0") for text in texts] == [restarts, 0]
