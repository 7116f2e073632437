"""Steps of a token budget under the control plane, from ranks to REST."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from paceline.core.batch_limits.budget import counts_within
from paceline.core.errors import PacelineError
from paceline.train.epochs import epoch_order
from paceline_backend.insight.replay import replay
from paceline_backend.server.stack import Stack
from paceline_backend.store import Store
from support import budget_script
from support.budget_script import BUDGET, EPOCHS, SAMPLES
from support.e2e import start_script, wait_for_end, wait_for_step

pytestmark = pytest.mark.ranks

WORLD = 3
EMULATE = {"a_s": [5e-5, 5e-5, 1.5e-4], "b_s": [0.002] * WORLD}


@pytest.mark.timeout(600)
def test_steps_hold_the_budget_and_follow_the_ranks_speeds(
    shared_stack: Stack, tmp_path: Path
) -> None:
    run = start_script(shared_stack, budget_script, tmp_path, WORLD, "paceline", EMULATE)
    wait_for_step(shared_stack, run, 5)
    with pytest.raises(PacelineError, match=r"chronica .* cannot keep a token budget"):
        shared_stack.api("POST", f"/runs/{run}/policy", {"policy": "chronica"})
    shown = wait_for_end(shared_stack, run)
    coverage = shared_stack.api("GET", f"/runs/{run}/coverage")
    segments = shared_stack.api("GET", f"/runs/{run}/segments?limit=200")
    with Store.open(f"sqlite:///{shared_stack.data / 'paceline.db'}") as store:
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
