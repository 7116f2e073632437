"""Groups of ranks that split a model, under the control plane: each group is one worker."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import mse_loss

from paceline_backend.insight.replay import replay
from paceline_backend.server.stack import Stack
from paceline_backend.store import Store
from support import tensor_parallel_script
from support.e2e import planned_segments, start_script, wait_for_end, wait_for_step
from support.gradients import difference
from support.sessions import Sized
from support.tensor_parallel import TP, network
from support.tensor_parallel_script import BATCH, RATE, SAMPLES
from support.waiting import TRAINING_S, until

pytestmark = pytest.mark.ranks

GROUPS = 2
EMULATE = {"a_s": [5e-3, 15e-3], "b_s": [0.002] * GROUPS}  # of each group


@pytest.mark.timeout(300)
def test_a_group_is_one_worker_and_the_training_is_that_of_one_process(
    shared_stack: Stack, tmp_path: Path
) -> None:
    run = start_script(shared_stack, tensor_parallel_script, tmp_path, GROUPS * TP, "bsp", EMULATE)
    wait_for_step(shared_stack, run, 20)
    shared_stack.api("POST", f"/runs/{run}/policy", {"policy": "paceline"})

    def planned() -> bool:
        return sum(s["policy"] == "paceline" for s in planned_segments(shared_stack, run)) > 10

    until(planned, "segments of paceline", TRAINING_S, 0.2)
    (tmp_path / "enough").touch()
    shown = wait_for_end(shared_stack, run)
    coverage = shared_stack.api("GET", f"/runs/{run}/coverage")
    columns = shared_stack.api("GET", f"/runs/{run}/worker-steps?points=5000")
    with Store.open(f"sqlite:///{shared_stack.data / 'paceline.db'}") as store:
        again = replay(store, run)
    assert coverage["exact"]
    assert shown["world"] == GROUPS
    assert again.first_difference is None
    seen = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(GROUPS * TP)]
    for group in range(GROUPS):
        assert seen[TP * group] == seen[TP * group + 1]  # ranks of a group have the same batches
    steps = list(zip(*seen[::TP], strict=True))
    assert len(steps) == shown["step"] + 1 == len(columns["load"][0])
    per_epoch = SAMPLES // BATCH
    for epoch in range(len(steps) // per_epoch):
        of_epoch = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(chain(*chain(*of_epoch))) == list(range(SAMPLES))
    loads = np.array(columns["load"], float)
    assert len(loads) == GROUPS
    late = loads[:, -per_epoch:].sum(axis=1)
    assert late[0] > 1.5 * late[1]  # group 1 is three times as slow
    compute_s = np.array(columns["compute_s"], float)
    assert (compute_s[1] >= EMULATE["a_s"][1] * loads[1]).all()
    trained = torch.load(tmp_path / "final.pt")
    assert difference(trained, _one_process(steps)) <= 1e-5


def _one_process(steps: list[tuple[list[int], ...]]) -> torch.Tensor:
    """Parameters after the same global batches in one process."""
    data, model = Sized(SAMPLES), network()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for parts in steps:
        _, x, y = zip(*(data[index] for index in chain(*parts)), strict=True)
        optimizer.zero_grad()
        mse_loss(model(torch.stack(x)), torch.stack(y)).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])
