"""Recompilations, and what a rank says of changing shapes.

TorchDynamo's counter of compilations is private. If `test_torchs_counter_counts_recompilations`
fails after an upgrade of torch, `paceline.train.compiling._COUNTER` has moved or counts
otherwise: telemetry then has no recompilations, and nothing else is wrong. Look in torch/_dynamo
for what counts compilations of a frame.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from paceline.core.terms import Terms
from paceline.train import compiling
from paceline.train.compiling import is_compiled, recompilations
from paceline.train.features.shapes import ShapeWarning, suggested_grid
from paceline.train.plan_shard import LocalStep
from paceline.train.timing import CpuClock, RunningStep


@pytest.fixture
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_anew")
def test_torchs_counter_counts_recompilations() -> None:
    """With ``dynamic=False`` each new shape compiles again, and a known one does not."""
    model = torch.compile(nn.Linear(3, 1), backend="eager", dynamic=False)
    counted = []
    for samples in (4, 5, 4, 6, 5):
        step = RunningStep(
            LocalStep(0, 0, 0, [], 0.0, 0.0, 0.0, 0.0, None, 0), CpuClock(), 0.0, None
        )
        model(torch.ones(samples, 3)).sum().backward()
        step.body_done()
        step.finish()
        counted.append(step.recompiles)
    assert counted == [0, 1, 0, 1, 0]
    assert recompilations() == 2


def test_without_torchs_counter_nothing_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.convert_frame as frames

    monkeypatch.setattr(compiling, "_counter", None)
    monkeypatch.delattr(frames, "FRAME_COMPILE_COUNTER")
    assert recompilations() == 0
    monkeypatch.setitem(sys.modules, "torch._dynamo.convert_frame", None)  # nothing was compiled
    assert recompilations() == 0


@pytest.mark.usefixtures("_anew")
def test_compiled_models_are_known() -> None:
    plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    assert not is_compiled(plain)
    assert is_compiled(torch.compile(plain, backend="eager"))
    assert is_compiled(nn.Sequential(torch.compile(plain[0], backend="eager"), plain[1]))
    plain[1].compile(backend="eager")
    assert is_compiled(plain)


def test_the_suggested_grid_divides_the_global_batch() -> None:
    assert suggested_grid(64, 2) == 8
    assert suggested_grid(60, 3) == 5
    assert suggested_grid(7, 4) == 1
    for batch in range(1, 200):
        for world in (1, 2, 3, 8):
            assert batch % suggested_grid(batch, world) == 0


def told(recompiled: int) -> RunningStep:
    """A step in which functions were recompiled so often."""
    step = RunningStep(LocalStep(0, 0, 0, [], 0.0, 0.0, 0.0, 0.0, None, 0), CpuClock(), 0.0, None)
    step.recompiles = recompiled
    return step


def warning_of(batch: int, models: list[Any], *, on_cuda: bool = False) -> ShapeWarning:
    device: Any = SimpleNamespace(on_cuda=on_cuda)
    return ShapeWarning(Terms(256, batch, 0, False, "samples", 2), 2, models, device)


@pytest.mark.usefixtures("_anew")
def test_a_rank_says_once_that_compiled_models_meet_changing_shapes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warning = warning_of(64, [torch.compile(nn.Linear(3, 1), backend="eager")])
    warning.connect()
    warning.recompiled(told(3))
    assert len(caplog.messages) == 1
    assert "a model is compiled by torch.compile" in caplog.text
    assert "Session(shapes=8)" in caplog.text


def test_a_rank_says_once_that_it_compiles_again(caplog: pytest.LogCaptureFixture) -> None:
    warning = warning_of(7, [nn.Linear(3, 1)])
    warning.connect()
    assert not caplog.messages
    warning.recompiled(told(3))
    warning.recompiled(told(4))
    assert len(caplog.messages) == 1
    assert "recompiled 3 times in a step" in caplog.text
    assert "must divide global_batch, 7" in caplog.text


def test_cudnns_benchmark_is_named_where_it_matters(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    warning_of(64, []).connect()
    assert not caplog.messages
    warning_of(64, [], on_cuda=True).connect()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "torch.backends.cudnn.benchmark is on" in caplog.text
    assert "Set it to False, unless few batch sizes occur. Session(shapes=8)" in caplog.text
