"""What an observer makes of what happens in a script."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import threading
from collections import UserDict
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from paceline import observation
from paceline.train.environment import Environment
from paceline.train.observing import patches, timeline
from paceline.train.observing.observer import Observer
from paceline.train.observing.start import AfterImport
from paceline.train.observing.timeline import NOTHING, BatchSize, Timeline, size_of
from paceline.train.timing import CpuClock
from paceline.wire import Phase

ONE = BatchSize(4, 8.0, 16.0, 2.0)
seconds = st.floats(0.001, 10)


class Time:
    """A clock that tests set, also in place of the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    time = perf_counter

    def sleep(self, for_s: float) -> None:
        self.now += for_s

    def stamp(self) -> float:
        return self.now

    def between(self, first: float, second: float) -> float:
        return second - first

    def passed(self, _stamp: float) -> bool:
        return True

    def wait(self, _stamp: float) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(timeline, "time", made)
    return made


def a_step(line: Timeline, clock: Time, times: tuple[float, ...], data: int = 1) -> Any:
    """Loads, computes, waits and steps in these times."""
    load, compute, wait, after = times
    clock.now += load
    line.loaded(load, data, ONE, first=False)
    clock.now += compute
    line.waits()
    clock.now += wait
    line.reduced()
    clock.now += after
    return line.stepped()


@given(st.lists(st.tuples(seconds, seconds, seconds, seconds), min_size=2, max_size=6))
def test_the_parts_of_steps_are_what_happened(steps: list[tuple[float, ...]]) -> None:
    clock: Any = Time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "time", clock)
        line = Timeline(clock)
        reported = [step for times in steps for step in a_step(line, clock, times)]
        reported += line.closed()
    assert [step.number for step in reported] == list(range(len(steps)))
    for step, (load, compute, wait, after), following in zip(
        reported, steps, [*steps[1:], None], strict=True
    ):
        assert step.data_s == load
        assert step.read(clock) == pytest.approx((compute, wait))
        until_next = compute + wait + after + (0 if following is None else following[0])
        assert step.step_s == pytest.approx(until_next)
        assert step.size == ONE


def test_an_evaluation_is_no_part_of_a_step(clock: Time) -> None:
    line = Timeline(clock)  # type: ignore[arg-type]
    a_step(line, clock, (1, 2, 3, 1))
    clock.now += 50
    line.loaded(50, 2, ONE, first=True)  # other data
    assert line.activity == (1, Phase.COMPUTE)
    reported = a_step(line, clock, (1, 2, 3, 1)) + line.closed()
    first, second = reported
    assert first.step_s == pytest.approx(2 + 3 + 1 + 1)
    assert (second.data_s, second.step_s) == (1, 6)


def test_a_step_may_train_on_two_loaders(clock: Time) -> None:
    """Labelled samples, and in each step unlabelled ones; then an evaluation of one batch."""
    line = Timeline(clock)  # type: ignore[arg-type]
    reported = []
    for number in range(4):
        for data, takes in ((1, 3), (2, 1)):
            clock.now += takes
            line.loaded(takes, data, ONE, first=number in (0, 3))
        clock.now += 2
        line.waits()
        line.reduced()
        reported += line.stepped()
        clock.now += 7
        line.loaded(7, 9, ONE, first=True)
    reported += line.closed()
    # Of the first step it is not known yet that the labelled samples are trained on.
    assert [step.data_s for step in reported] == [1, 4, 4, 4]
    assert line.trained == {1, 2}


def test_epochs_are_passes_over_the_data_that_is_trained_on(clock: Time) -> None:
    line = Timeline(clock)  # type: ignore[arg-type]
    reported = []
    #  data set and whether a pass begins; an evaluation reads data set 9
    reads = [(1, True), (1, False), (9, True), (1, False), (1, True), (9, True), (2, True)]
    for data, first in reads:
        line.loaded(0, data, ONE, first=first)
        if data != 9:
            line.waits()
            line.reduced()
            reported += line.stepped()
    assert [step.epoch for step in reported + line.closed()] == [0, 0, 0, 1, 2]


def test_micro_batches_add_up(clock: Time) -> None:
    line = Timeline(clock)  # type: ignore[arg-type]
    for _ in range(2):
        clock.now += 1
        line.loaded(1, 1, ONE, first=False)
        line.entered(ONE)
        line.entered(ONE)  # the model is called twice
        clock.now += 2
        line.waits()
        line.reduced()
    line.stepped()
    [step] = line.closed()
    assert step.size == ONE + ONE
    assert (step.data_s, step.read(clock)) == (2, (4.0, 0.0))


def test_waiting_between_two_backward_passes_is_no_computing(clock: Time) -> None:
    line = Timeline(clock)  # type: ignore[arg-type]
    line.loaded(0, 1, ONE, first=True)  # both micro-batches at once
    for _ in range(2):
        clock.now += 2
        line.waits()
        clock.now += 1
        line.reduced()
    line.stepped()
    [step] = line.closed()
    assert step.read(clock) == (4, 2)


def test_a_loss_belongs_to_the_step_that_made_it(clock: Time) -> None:
    line = Timeline(clock)  # type: ignore[arg-type]
    a_step(line, clock, (1, 1, 1, 1))
    line.logged(0.5)  # after the optimiser's step
    clock.now += 1
    line.loaded(1, 1, ONE, first=False)
    line.waits()
    line.reduced()
    line.logged(0.25)  # before it
    reported = line.stepped() + line.closed()
    assert [step.loss for step in reported] == [0.5, 0.25]


def test_without_a_backward_pass_that_is_seen(clock: Time) -> None:
    line = Timeline(clock)  # type: ignore[arg-type]
    line.loaded(0, 1, ONE, first=True)
    clock.now += 3
    line.stepped()
    [step] = line.closed()
    assert (step.read(clock), step.size) == ((3.0, 0.0), ONE)


def test_a_device_that_crashed_is_not_waited_for(
    clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = Timeline(clock)  # type: ignore[arg-type]
    passed = 0.0
    monkeypatch.setattr(clock, "passed", lambda stamp: stamp < passed)
    for _ in range(2):
        assert a_step(line, clock, (1, 1, 1, 1)) == []
    passed, began = 104.0, clock.now  # between the two steps
    assert [step.number for step in line.closed()] == [0]
    assert clock.now - began == pytest.approx(1, abs=0.1)


def test_sizes_of_batches() -> None:
    words = torch.zeros(4, 7)
    wanted = BatchSize(4, 28.0, 196.0, 7.0)
    for batch in (
        words,
        [words, torch.zeros(4)],
        ((words,), {"labels": torch.zeros(4)}),
        UserDict(scale=torch.tensor(1.0), words=words),
    ):
        assert size_of(batch) == wanted
    assert size_of(["a", "b"], samples=2) == BatchSize(2, 2.0, 2.0, 1.0)
    assert size_of(object()).samples == 1
    assert NOTHING + ONE == ONE


@pytest.mark.parametrize("name", ["loss", "train/loss", "Train.Loss", "train_loss", "loss/total"])
def test_names_of_losses(name: str) -> None:
    assert patches.is_loss(name)


@pytest.mark.parametrize(
    "name", ["val_loss", "eval/loss", "losses", "lossless", "accuracy", "test.loss", "blossom"]
)
def test_names_of_others(name: str) -> None:
    assert not patches.is_loss(name)


def test_losses_are_seen_once_a_logger_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "class SummaryWriter:\n"
        "    def add_scalar(self, tag, scalar_value, global_step=None):\n"
        "        return tag\n"
    )
    package = tmp_path / "tensorboardX"
    package.mkdir()
    (package / "__init__.py").write_text("from tensorboardX.writer import SummaryWriter\n")
    (package / "writer.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[tuple[str, Any]] = []
    observer: Any = SimpleNamespace(logged=lambda name, value: seen.append((name, value)))
    finder = AfterImport(patches.loss_hooks(observer))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    try:
        writer = importlib.import_module("tensorboardX").SummaryWriter()
        assert writer.add_scalar("train/loss", 0.5, global_step=3) == "train/loss"
        assert writer.add_scalar("val/loss", 0.7) == "val/loss"
        with pytest.raises(TypeError):
            writer.add_scalar()
    finally:
        for name in ("tensorboardX", "tensorboardX.writer"):
            sys.modules.pop(name, None)
    assert seen == [("train/loss", 0.5)]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that can be imported."""
    (tmp_path / "watched_module.py").write_text("value = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "watched_module"
    sys.modules.pop("watched_module", None)


def test_a_script_may_ask_for_a_module_before_it_imports_it(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    finder = AfterImport({module: lambda imported: seen.append(imported.value)})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert importlib.util.find_spec(module) is not None
    assert seen == []
    importlib.import_module(module)
    assert seen == [7]
    importlib.reload(sys.modules[module])
    assert seen == [7]


def test_an_error_in_a_hook_leaves_the_import_alone(
    module: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    finder = AfterImport({module: lambda imported: imported.no_such_name})
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    assert importlib.import_module(module).value == 7
    assert f"code that uses {module} is not observed" in caplog.text


def test_another_release_of_fsdp_is_left_as_it_is() -> None:
    class Group:
        def unshard(self) -> None: ...

    class State(Enum):
        PRE_BACKWARD = 1

    before = dict(vars(Group))
    with pytest.raises(AttributeError, match="wait_for_unshard"):
        patches._watch_shards(
            Observer(), SimpleNamespace(FSDPParamGroup=Group, TrainingState=State)
        )
    assert dict(vars(Group)) == before


def test_arguments_that_cannot_be_looked_at_reach_the_logger() -> None:
    class Client:
        def log_batch(self, run_id: str, metrics: Any = ()) -> int:
            return len(list(metrics))

    patches._watch_logger(Observer(), Client, "log_batch", patches._listed)
    assert Client().log_batch("run", [object(), object()]) == 2
    assert Client().log_batch("run", (SimpleNamespace(key="loss", value=k) for k in range(3))) == 3


def test_metrics_of_each_logger() -> None:
    metric = SimpleNamespace(key="loss", value=0.5)
    assert patches._mapped({"loss": 0.5}, step=1) == {"loss": 0.5}
    assert patches._of_run("run", "loss", 0.5, step=1) == {"loss": 0.5}
    assert patches._listed("run", metrics=[metric]) == {"loss": 0.5}
    assert patches._named("loss", 0.5, 1) == {"loss": 0.5}


def recorded(observer: Observer) -> Timeline:
    """The timeline of an observer whose model is wrapped, without a process group."""
    line = Timeline(CpuClock())
    recorder: Any = SimpleNamespace(timeline=line, reads=lambda _samples: None)
    observer._recorder, observer._thread = recorder, threading.get_ident()
    return line


@pytest.mark.parametrize("seen", [True, False])
def test_reentrant_checkpoints_count_a_batch_once(seen: bool) -> None:
    observer = Observer()
    line = recorded(observer)
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(3)])
    observer.wrapped(model)
    for _ in range(2):  # micro-batches
        line.loaded(0, 1, ONE, first=False)
        hidden = torch.zeros(4, 2, requires_grad=True)
        if seen:
            line.entered(ONE)
        for layer in model:
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        torch.autograd.backward(hidden.sum())
    assert line.spans > 2
    line.stepped()
    [step] = line.closed()
    assert step.size == ONE + ONE and not observer.ended


def test_backward_passes_without_a_step_end_observing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("paceline.train.observing.observer._MOST_SPANS", 3)
    observer = Observer()
    line = recorded(observer)
    model = torch.nn.Linear(2, 2)
    observer.wrapped(model)
    for _ in range(6):
        model(torch.zeros(4, 2)).sum().backward()
    assert line.spans == 4
    assert "no optimiser steps the model" in caplog.text


class Unmeasured(Dataset[float]):
    def __getitem__(self, _index: int) -> float:
        return 1.0

    def __len__(self) -> int:
        raise RuntimeError("ask me later")


def test_a_data_set_may_refuse_its_length() -> None:
    observer = Observer()
    line = recorded(observer)
    batches = iter(DataLoader(Unmeasured(), batch_sampler=[[0, 1, 2]]))
    observer.loaded(batches, next(batches), 0.0)
    line.stepped()
    [step] = line.closed()
    assert step.size.samples == 3 and not observer.ended


def test_an_error_ends_observing_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    observer = Observer()
    with caplog.at_level(logging.WARNING):
        observer.wrapped(torch.nn.Linear(2, 2))  # there is no process group
        observer.wrapped(torch.nn.Linear(2, 2))
    assert observer.ended
    assert len(caplog.records) == 1
    assert "is no longer observed" in caplog.text


def test_what_a_process_gets() -> None:
    given = observation.extended({"PYTHONPATH": "/mine", "PACELINE_RUN": "r"})
    first, rest = given["PYTHONPATH"].split(":", 1)
    assert (Path(first) / "sitecustomize.py").is_file() and rest == "/mine"
    assert Environment.read(given).run is None  # a session leaves the run to the observer
    assert Environment.of_observed(given).run == "r"
