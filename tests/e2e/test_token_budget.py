"""Steps of a token budget under the control plane, from ranks to REST."""

from __future__ import annotations

import json
import os
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from paceline.core.amounts.budget import counts_within
from paceline.core.errors import PacelineError
from paceline.train.plan.epochs import epoch_order
from paceline_backend.insight.replay import replay
from paceline_backend.server.stack import Stack
from paceline_backend.store import Store
from support import budget_script
from support.budget_script import BUDGET, EPOCHS, SAMPLES
from support.e2e import wait_for_end, wait_for_step

pytestmark = pytest.mark.ranks

WORLD = 3
TESTS = str(Path(budget_script.__file__).parents[1])
EMULATE = {"a_s": [5e-5, 5e-5, 1.5e-4], "b_s": [0.002] * WORLD}


def launch(stack: Stack, *arguments: str, **options: int) -> str:
    """Starts the script under `paceline`; the run's id."""
    body = {
        "script": budget_script.__file__,
        "args": list(arguments),
        "nproc": WORLD,
        "policy": "paceline",
        "env": {
            "PACELINE_EMULATE": json.dumps(EMULATE),
            "PYTHONPATH": os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")]),
        },
    }
    return str(stack.api("POST", "/runs", body | options)["id"])


@pytest.mark.timeout(600)
def test_plans_keep_to_what_a_rank_learned_of_its_memory(tmp_path: Path) -> None:
    room = 560.0  # of rank 0, to which its speed would bring 643 of a step's 1,500
    with Stack(tmp_path / "data", 0) as stack:
        run = launch(stack, str(tmp_path), str(room), max_restarts=3)
        wait_for_end(stack, run)
        attempts = stack.api("GET", f"/runs/{run}/attempts")
        coverage = stack.api("GET", f"/runs/{run}/coverage")
        segments = stack.api("GET", f"/runs/{run}/segments?limit=200")
    assert len(attempts) == 2, "memory ran out once"
    assert coverage["exact"]
    assert any(s["source"] == "controller" for s in segments)
    [kept] = (tmp_path / "data").glob(f"**/{run}/memory/*.json")
    learned = json.loads(kept.read_text())
    assert kept.name == "0.json"
    assert learned["limit"] <= room < learned["ran_out"]
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD)]
    tokens = np.array([[count for _, _, count, _ in of_rank] for of_rank in seen])
    assert tokens[0].max() <= learned["limit"]
    late = tokens[:, tokens.shape[1] // 2 :].sum(axis=1)
    assert late[1] > late[0]  # which is as fast
    assert late[1] > 2 * late[2]  # rank 2 is three times as slow


@pytest.mark.timeout(600)
def test_steps_hold_the_budget_and_follow_the_ranks_speeds(tmp_path: Path) -> None:
    with Stack(tmp_path / "data", 0) as stack:
        run = launch(stack, str(tmp_path))
        wait_for_step(stack, run, 5)
        with pytest.raises(PacelineError, match=r"chronica .* keeps no token budget"):
            stack.api("POST", f"/runs/{run}/policy", {"policy": "chronica"})
        shown = wait_for_end(stack, run)
        coverage = stack.api("GET", f"/runs/{run}/coverage")
        segments = stack.api("GET", f"/runs/{run}/segments?limit=200")
        with Store.open(f"sqlite:///{stack.data / 'paceline.db'}") as store:
            again = replay(store, run)
    assert coverage["exact"]
    planned = sum(s["source"] == "controller" for s in segments)
    assert again.first_difference is None
    assert again.identical == planned > 0
    sizes = np.array(budget_script.lengths(), float)
    due = []
    for epoch in range(EPOCHS):
        order = epoch_order(SAMPLES, 1, epoch)
        due += np.split(order, np.cumsum(counts_within(sizes[order], BUDGET))[:-1])
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD)]
    tokens = []
    for step, parts in enumerate(zip(*seen, strict=True)):
        mine = [samples for _, _, _, samples in parts]
        assert sorted(chain(*mine)) == sorted(due[step].tolist())
        tokens.append([count for _, _, count, _ in parts])
        assert tokens[-1] == [sizes[samples].sum() for samples in mine]
        assert sum(tokens[-1]) <= BUDGET
    assert len(tokens) == len(due) == shown["step"] + 1
    assert shown["token_budget"] == BUDGET
    assert shown["steps_per_epoch"] in {len(due) // EPOCHS + extra for extra in (-1, 0, 1)}
    late = np.array(tokens)[len(tokens) // 2 :].sum(axis=0)
    assert late[0] > 2 * late[2]  # rank 2 is three times as slow
