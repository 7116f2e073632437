"""A small residual network with BatchNorm on ranks of uneven speeds, against one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from paceline_backend.server.stack import Stack
from support import resnet_script
from support.e2e import start_script, wait_for_end

pytestmark = pytest.mark.ranks

WORLD = 3
EMULATE = {"a_s": [0.002, 0.003, 0.002], "b_s": [0.004, 0.004, 0.02]}


def one_process(batches: list[list[int]]) -> dict[str, Tensor]:
    """The state after training on these global batches."""
    data, model = resnet_script.Images(), resnet_script.network()
    optimiser = resnet_script.optimiser_of(model)
    for batch in batches:
        optimiser.zero_grad()
        labels = torch.tensor([data.labels[index] for index in batch])
        cross_entropy(model(data.images[batch]), labels).backward()
        optimiser.step()
    return model.state_dict()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy", [pytest.param("bsp", marks=pytest.mark.long), "paceline"])
def test_training_is_that_of_one_process(shared_stack: Stack, tmp_path: Path, policy: str) -> None:
    """200 steps. Under `paceline` the slowest rank gets fewer samples than the others."""
    wait_for_end(
        shared_stack, start_script(shared_stack, resnet_script, tmp_path, WORLD, policy, EMULATE)
    )
    parts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD)]
    batches = [
        sorted(index for part in step for index in part) for step in zip(*parts, strict=True)
    ]
    assert len(batches) == resnet_script.STEPS
    counts = [sum(len(step) for step in part) for part in parts]
    assert (counts[2] < 0.8 * counts[0]) == (policy == "paceline")
    wanted = one_process(batches)
    for rank in range(WORLD):
        got = torch.load(tmp_path / f"{rank}.pt")
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value, rtol=0.0, atol=1e-4, msg=name)
