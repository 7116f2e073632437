"""Memory runs out on ranks of a token budget: the run goes on, and it happens once on each."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import memory_script
from support.launched import WORLD, Line, launched, not_trained_again
from support.marks import some_long
from support.memory_script import BUDGET, EPOCHS, SAMPLES
from support.sessions import Sized

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
SIZES = np.array(Sized(SAMPLES).sizes)


def run(directory: Path, rooms: list[float | None], micro: bool, restarts: int) -> tuple[int, str]:
    arguments = [str(directory), json.dumps(rooms), str(int(micro))]
    return launched(memory_script.__file__, directory, arguments, restarts)


def turns(directory: Path) -> list[list[Line]]:
    """What each rank did in each turn of its loop."""
    texts = [(directory / f"turns-{rank}").read_text() for rank in range(WORLD)]
    return [[tuple(json.loads(line)) for line in text.splitlines()] for text in texts]


def parameters(directory: Path) -> list[Any]:
    return [torch.load(directory / f"end-{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Where training ends with enough memory."""
    directory = tmp_path_factory.mktemp("memory") / "calm"
    code, said = run(directory, [None, None], micro=False, restarts=0)
    assert code == 0, said
    return parameters(directory)


@pytest.mark.parametrize(
    ("rooms", "micro"),
    some_long([([5.0, 5.0], True), ([None, 7.0], False), ([None, 5.0], True)], 3),
)
def test_memory_runs_out_once_on_a_rank(
    tmp_path: Path, calm: list[Any], rooms: list[float | None], micro: bool
) -> None:
    directory = tmp_path / "run"
    bounded = [rank for rank, room in enumerate(rooms) if room is not None]
    code, said = run(directory, rooms, micro, restarts=5)
    assert code == 0, said
    lines = turns(directory)
    last = max(line[0] for line in lines[0])
    assert 1 <= last <= len(bounded)
    memory = directory / "runs" / "r0" / "memory"
    learned = {int(path.stem): json.loads(path.read_text()) for path in memory.iterdir()}
    assert set(learned) <= set(bounded)  # with micro-batches a rank learns from its like
    for rank, word in learned.items():
        assert word["limit"] <= rooms[rank] < word["ran_out"]
    for rank in bounded:
        after = [SIZES[used].sum() for attempt, *_, used in lines[rank] if attempt == last]
        assert max(after) <= max(word["limit"] for word in learned.values())
    trained: dict[int, list[int]] = {}
    for _, epoch, _, samples in chain.from_iterable(map(not_trained_again, lines)):
        trained.setdefault(epoch, []).extend(samples)
    assert {epoch: sorted(used) for epoch, used in trained.items()} == {
        epoch: list(range(SAMPLES)) for epoch in range(EPOCHS)
    }
    for mine, other in zip(parameters(directory), calm, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-9)


def test_ranks_that_cannot_hold_a_step_say_what_they_hold(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    code, said = run(directory, [5.0, 5.0], micro=False, restarts=1)
    assert code != 0
    assert "memory ran out in earlier attempts, on ranks [0" in said
    assert f"token_budget is {BUDGET:g}: lower token_budget to that" in said
    assert "micro_batches=True" in said
