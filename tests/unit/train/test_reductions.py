"""Where a rank waits for the reduction of its gradients, and the error if that fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.core.errors import PacelineError
from paceline.train.ddp import CurrentStep, WeightedDDP, _Weighing
from paceline.train.timing import RunningStep
from support.gradients import running_with


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which reductions ended."""
    ended: list[int] = []
    reduced = RunningStep.reduced

    def noted(running: RunningStep) -> None:
        ended.append(threading.get_ident())
        reduced(running)

    monkeypatch.setattr(RunningStep, "reduced", noted)
    return ended


def step(current: CurrentStep, *models: WeightedDDP) -> None:
    current.enter(running_with(4, 1.0))
    for model in models:
        model.zero_grad()
        model(torch.ones(4, 3)).sum().backward()


def test_a_single_models_reduction_ends_in_the_scripts_thread(threads: list[int]) -> None:
    current = CurrentStep(1)
    model = WeightedDDP(nn.Linear(3, 1), current)
    for _ in range(4):
        step(current, model)
        assert [p.grad.tolist() for p in model.parameters() if p.grad is not None] == [
            [[4.0, 4.0, 4.0]],
            [4.0],
        ]
    assert threads == [threading.get_ident()] * 4


@pytest.mark.parametrize("unused", [False, True])
def test_other_reductions_do_not_block_the_pass(unused: bool, threads: list[int]) -> None:
    current = CurrentStep(1)
    models = [
        WeightedDDP(nn.Linear(3, 1), current, find_unused_parameters=unused)
        for _ in range(1 if unused else 2)
    ]
    waits: list[Any] = []
    for _ in range(3):
        step(current, *models)
        waits += [model._weighing._waited for model in models]
    assert not any(waits)
    assert len(threads) == 3 * len(models)


def test_a_failed_reduction_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    class Work:
        def wait(self) -> None:
            raise RuntimeError("Connection closed by peer")

    current = CurrentStep(1)
    current.explained = lambda error: PacelineError(f"rank 1 failed: {error}")
    model = WeightedDDP(nn.Linear(3, 1), current)
    monkeypatch.setattr(_Weighing, "all_reduce", lambda self, share: Work())
    with pytest.raises(PacelineError, match=r"^rank 1 failed: Connection closed by peer"):
        step(current, model)
