"""How checkpoints are written while training goes on: in one process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paceline
from paceline.train.checkpoint import storage
from paceline.train.checkpoint.contents import Contents
from paceline.train.checkpoint.position import Position
from paceline.train.checkpoint.saver import Folder, Saver, Schedule
from paceline.train.plan_shard import LocalStep
from paceline.train.sync.outer import Outer
from support.sessions import Numbered, network, parameters
from support.waiting import until

WAIT_S = 30
LAST = LocalStep(0, 0, 0, [0], 1.0, 1.0, 1.0, 1.0, None, 0, last=True)


@pytest.fixture
def session() -> Iterator[paceline.Session]:
    with contextlib.closing(paceline.Session(Numbered(96), global_batch=4)) as made:
        yield made


def saved(directory: Path) -> list[int]:
    return Folder(directory, 1).steps()


def during_write(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object]) -> None:
    """Calls something before each checkpoint is written, in the thread that writes."""
    write = storage.write

    def held(*arguments: Any) -> None:
        before()
        write(*arguments)

    monkeypatch.setattr(storage, "write", held)


def watch_waits(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once training waits for a checkpoint."""
    waits, wait = threading.Event(), Saver.wait

    def noted(saver: Saver) -> None:
        if saver._thread is not None:
            waits.set()
        wait(saver)

    monkeypatch.setattr(Saver, "wait", noted)
    return waits


def test_training_goes_on_while_a_checkpoint_is_written(
    session: paceline.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is written is what was there when saving began: two steps early, of 20."""
    release = threading.Event()
    during_write(monkeypatch, lambda: release.wait(WAIT_S))
    model = session.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    session.checkpoint(tmp_path, model, optimizer, every_steps=20)
    after: list[Tensor] = []
    for _, x, y in session.loader():
        mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        after.append(parameters(model).clone())
        if session.step == 18:
            assert saved(tmp_path) == [], "18 steps were done when it began"
            release.set()
    session.close()
    assert saved(tmp_path) == [18]

    again = network()
    state = torch.optim.SGD(again.parameters(), 0.05, momentum=0.9)
    saver = Saver(
        Schedule(tmp_path, 20, None, 1), Contents.of(again, state, None, None), 0, 96, Outer()
    )
    position = saver.load()
    assert position is not None
    assert position.step == 18
    assert torch.equal(parameters(again), after[17])


def test_training_waits_where_too_much_would_be_trained_again(
    session: paceline.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = watch_waits(monkeypatch)
    steps: list[int] = []  # that training was in when a checkpoint was written

    def before() -> None:
        until(lambda: waits.is_set() or session.step > 19, "training to wait or to go on")
        steps.append(session.step)

    during_write(monkeypatch, before)
    model = session.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    session.checkpoint(tmp_path, model, optimizer, every_steps=20)
    for _, x, y in session.loader():
        mse_loss(model(x), y).backward()
        optimizer.step()
    assert steps[0] == 19


def test_a_stop_waits_for_the_checkpoint_that_is_being_written(
    session: paceline.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the script does after its loop may end the process groups, or the process."""
    waits = watch_waits(monkeypatch)
    during_write(monkeypatch, lambda: waits.wait(WAIT_S))
    model = session.wrap(network())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    session.checkpoint(tmp_path, model, optimizer, every_steps=20)
    for _ in session.epochs(3):
        for _, x, y in session.loader():
            mse_loss(model(x), y).backward()
            optimizer.step()
            if session.step == 18:
                assert session._loop.wiring is not None
                session._loop.wiring.follower.stopped = True  # as an operator's stop does
                break
        assert saved(tmp_path) == [18]


def test_a_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits, writing = watch_waits(monkeypatch), threading.Lock()

    def write(*_: object) -> None:
        assert writing.acquire(blocking=False), "two at once"
        if not waits.is_set():
            waits.wait(WAIT_S)
        writing.release()

    monkeypatch.setattr(storage, "write", write)
    finished: list[int] = []
    monkeypatch.setattr(Folder, "finish", lambda _, steps: finished.append(steps))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    contents = Contents.of(model, optimizer, None, None)
    saver = Saver(Schedule(tmp_path, None, 1.0, 1), contents, 0, 8, Outer())
    saver.save(Position(0, 1))
    saver.save(Position(0, 2))
    assert finished[:1] == [1]
    saver.close()
    assert finished == [1, 2]


def test_a_state_dict_that_fails_is_tried_again_only_in_time(tmp_path: Path) -> None:
    """And not at the end of each segment, which is a second long."""

    class Failing(nn.Linear):
        def state_dict(self, *_: Any, **__: Any) -> Any:
            raise ValueError("no")

    model = Failing(1, 1)
    contents = Contents.of(model, torch.optim.SGD(model.parameters(), 0.05), None, None)
    saver = Saver(Schedule(tmp_path, None, 600.0, 1), contents, 0, 8, Outer())
    saver._time -= 601
    assert saver.due(LAST, stepped=True)
    saver.save(Position(0, 1))
    assert not saver.due(LAST, stepped=True)
    saver.close()


@pytest.mark.parametrize("stop", [321, 322, 323])
def test_a_stop_between_two_accumulated_steps_loses_no_sample(tmp_path: Path, stop: int) -> None:
    """It comes in the second of two epochs, of 300 steps each."""
    stepped: list[int] = []
    for attempt in range(2):
        with contextlib.closing(paceline.Session(Numbered(1200), global_batch=4)) as session:
            loader, model = session.loader(), session.wrap(network())
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            session.checkpoint(tmp_path, model, optimizer, every_steps=1000)
            kept: list[int] = []
            for _ in session.epochs(2):
                for number, (i, x, y) in enumerate(loader):
                    kept += i.tolist()
                    mse_loss(model(x), y).backward()
                    if number % 4 == 3:
                        optimizer.step()
                        optimizer.zero_grad()
                        stepped += kept
                        kept.clear()
                    if session.step == stop and not attempt:
                        session._loop.end_plan()
            assert session.stopped is (not attempt)
    assert sorted(stepped) == sorted([*range(1200)] * 2)


def test_a_checkpoint_is_whole_only_once_its_steps_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody trains them again: their records must not die with the rank."""
    order: list[str] = []

    class Reported(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            order.append("reported")
            return True

    monkeypatch.setattr(storage, "write", lambda *_: order.append("written"))
    monkeypatch.setattr(Folder, "finish", lambda *_: order.append("whole"))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    contents = Contents.of(model, optimizer, None, None)
    saver = Saver(Schedule(tmp_path, 1, None, 1), contents, 0, 8, Outer())
    saver.save(Position(0, 1), Reported())
    saver.close()
    assert order == ["reported", "written", "whole"]


def test_a_step_of_an_unwrapped_modules_optimiser_makes_no_checkpoint_due(
    session: paceline.Session, tmp_path: Path
) -> None:
    """Gradients of the wrapped model accumulate over four steps, and would be lost."""
    model, other = session.wrap(network()), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    of_other = torch.optim.SGD(other.parameters(), 0.05)
    session.checkpoint(tmp_path, model, optimizer, every_steps=3, keep=99)
    for _, x, y in session.loader():
        mse_loss(model(x), y).backward()
        other(torch.ones(1, 1)).sum().backward()
        of_other.step()
        if session.step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    session.close()
    assert saved(tmp_path) == [4, 8, 12, 16, 20, 24]
