"""A compiled model under a policy that gives ranks different numbers of samples, on a grid."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline_backend.server.stack import Stack
from support import compiled_script
from support.compiled_script import BATCH, EPOCHS, GRID, SAMPLES
from support.e2e import start_script, wait_for_end

pytestmark = pytest.mark.ranks

WORLD = 2
EMULATE = {"a_s": [0.001, 0.0025], "b_s": [0.002, 0.002]}


@pytest.mark.timeout(600)
def test_ranks_get_numbers_on_the_grid_and_report_recompilations(
    shared_stack: Stack, tmp_path: Path
) -> None:
    run = start_script(shared_stack, compiled_script, tmp_path, WORLD, "paceline", EMULATE)
    wait_for_end(shared_stack, run)
    columns = shared_stack.api("GET", f"/runs/{run}/worker-steps?points=1000&columns=recompiles")
    workers = shared_stack.api("GET", f"/runs/{run}/workers?last=1000")
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD)]
    given, counted, weights = np.moveaxis(np.array(seen), 2, 0)  # [W, steps] each
    totals = counted.sum(axis=0)
    whole = totals == BATCH
    assert whole.sum() == SAMPLES // BATCH * EPOCHS
    assert (given % GRID == 0).all()  # fillers, too; GRID divides what an epoch leaves
    np.testing.assert_allclose(weights, counted / totals)
    assert counted[0, whole].sum() > 1.3 * counted[1, whole].sum()  # rank 1 is slow
    recompiles = np.array(columns["recompiles"])
    shapes = [len(set(of_rank)) for of_rank in given]
    # Each new number of samples compiles again, once.
    assert recompiles.sum(axis=1).tolist() == [distinct - 1 for distinct in shapes]
    assert [worker["recompiles"] for worker in workers] == recompiles.sum(axis=1).tolist()
    assert recompiles[:, len(totals) // 2 :].sum() <= 2
