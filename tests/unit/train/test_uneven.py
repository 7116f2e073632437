"""What a script's loop shows of itself, and its schedules where ranks have different turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.optim import lr_scheduler

from paceline.core.errors import PacelineError
from paceline.train.collectives import own
from paceline.train.ddp import CurrentStep
from paceline.train.features import gathers
from paceline.train.features.uneven import Schedules, refuse_collectives
from paceline.train.plan_shard import LocalStep


def step(number: int, *, pooled: bool = False, samples: int = 1, first: int = 0) -> LocalStep:
    return LocalStep(
        0,
        number,
        first,
        list(range(samples)),
        1.0,
        1.0,
        1.0,
        0.5,
        None,
        0,
        segment_first=first,
        segment_end=first + 16,
        pooled=pooled,
    )


def in_turn(current: CurrentStep, of: LocalStep, *, body: bool = True) -> None:
    running: Any = SimpleNamespace(step=of, in_body=body)
    current.enter(running)


@pytest.fixture
def optimiser() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), 1.0)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_collectives_that_all_ranks_come_to_are_not_refused() -> None:
    current = CurrentStep(2)
    end = refuse_collectives(current)
    dist.barrier()  # outside of the loop,
    in_turn(current, step(0, pooled=True), body=False)
    dist.barrier()  # between two turns,
    in_turn(current, step(0))
    dist.barrier()  # in a step that all make,
    in_turn(current, step(0, pooled=True))
    with own():
        dist.barrier()  # and Paceline's own
    end()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "collective",
    [
        dist.barrier,
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.broadcast(torch.ones(1), 0),
        lambda: dist.all_gather_object([None], 1),
        lambda: dist.all_gather([torch.ones(1)], torch.ones(1)),
        lambda: dist.all_gather_single(torch.ones(1), torch.ones(1)),
    ],
)
def test_a_collective_that_not_all_ranks_come_to_is_refused(collective: Any) -> None:
    current = CurrentStep(2)
    end = refuse_collectives(current)
    in_turn(current, step(7, pooled=True))
    with pytest.raises(PacelineError, match=r"in step 7: not all ranks .*uneven_steps=True"):
        collective()
    end()
    collective()


class Nccl:
    """A group whose backend takes lists of different shapes."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self.shapes = shapes

    def size(self) -> int:
        return len(self.shapes)

    def name(self) -> str:
        return "nccl"


@pytest.mark.parametrize(
    ("name", "args", "refused"),
    [
        ("_allgather_base", (torch.ones(8, 1), torch.ones(2, 1)), True),
        ("_reduce_scatter_base", (torch.ones(2, 1), torch.ones(8, 1)), True),
        ("allgather", ([[torch.ones(2, 1), torch.ones(6, 1)]], [torch.ones(2, 1)]), False),
        ("allgather", ([[torch.ones(2, 1), torch.ones(2, 1)]], [torch.ones(2, 1)]), True),
    ],
)
def test_only_gathers_into_lists_take_different_shapes_on_nccl(
    name: str, args: tuple[Any, ...], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = [(2, 1), (6, 1)]
    monkeypatch.setattr(gathers, "_gathered", lambda *_: shapes)
    listeners: list[Any] = []
    monkeypatch.setattr(gathers, "listen", lambda listener, _: listeners.append(listener) or list)
    current = CurrentStep(2)
    in_turn(current, replace(step(3), even=False))
    gathers.refuse_uneven(current, lambda: False)
    with pytest.raises(PacelineError, match="shapes") if refused else nullcontext():
        listeners[0](name, Nccl(shapes), args)


def test_no_method_is_wrapped_that_nobody_listens_to() -> None:
    """DDP's all-reduce, which each step calls, pays nothing for the refusal of uneven gathers."""
    kind = dist.ProcessGroup
    before = dict(vars(kind))
    end_gathers = gathers.refuse_uneven(CurrentStep(2), lambda: False)
    assert vars(kind)["allgather"] is not before["allgather"]
    assert vars(kind)["allreduce"] is before["allreduce"]
    end_all = refuse_collectives(CurrentStep(2))
    assert vars(kind)["allreduce"] is not before["allreduce"]
    end_gathers()
    end_gathers()
    assert vars(kind)["allgather"] is not before["allgather"]  # one of the two still listens
    end_all()
    assert dict(vars(kind)) == before


def rates(
    scheduler: Any, optimiser: torch.optim.Optimizer, turns: list[LocalStep], *, each: int = 1
) -> list[float]:
    """The learning rate in each turn of a script that steps its schedule every `each` turns."""
    current = CurrentStep(2)
    schedules = Schedules(current)
    schedules.look(optimiser)
    optimiser.step()  # else the schedule warns
    seen = []
    for number, of in enumerate(turns):
        if of.pooled:
            schedules.reach(of, of.step)
        in_turn(current, of)
        seen.append(optimiser.param_groups[0]["lr"])
        if (number + 1) % each == 0:
            scheduler.step()
        schedules.turn_ended(of)
        current.enter(None)
    schedules.reach(turns[-1], turns[-1].segment_end)
    seen.append(optimiser.param_groups[0]["lr"])
    schedules.close()
    return seen


def even(count: int = 16) -> list[LocalStep]:
    return [step(number) for number in range(count)]


def test_a_schedule_follows_the_steps(optimiser: torch.optim.Optimizer) -> None:
    """Of a fast rank, which has several batches of a step, and of a slow one, which skips some."""
    scheduler = lr_scheduler.LambdaLR(optimiser, lambda count: count)
    fast = [step(number, pooled=True, first=16) for number in [*range(16, 32), 31, 31]]
    slow = [step(number, pooled=True, first=16) for number in (16, 17, 18)]
    for turns in (fast, slow):
        scheduler.last_epoch = 0
        optimiser.param_groups[0]["lr"] = 0.0
        seen = rates(scheduler, optimiser, even() + turns)
        assert seen == [*(of.step for of in even() + turns), 32]


def test_a_schedule_with_a_rhythm_of_its_own_is_left_to_the_script(
    optimiser: torch.optim.Optimizer,
) -> None:
    scheduler = lr_scheduler.LambdaLR(optimiser, lambda count: count)
    turns = [step(number, pooled=True, first=16) for number in [*range(16, 32), 31, 31]]
    assert rates(scheduler, optimiser, even() + turns, each=3)[-1] == 34 // 3


def test_a_schedule_of_schedules_is_stepped_as_a_whole(optimiser: torch.optim.Optimizer) -> None:
    parts = [lr_scheduler.ConstantLR(optimiser, 0.5, 4), lr_scheduler.ExponentialLR(optimiser, 0.9)]
    whole = lr_scheduler.SequentialLR(optimiser, parts, [8])
    twin_optimiser = torch.optim.SGD(nn.Linear(1, 1).parameters(), 1.0)
    twins = [
        lr_scheduler.ConstantLR(twin_optimiser, 0.5, 4),
        lr_scheduler.ExponentialLR(twin_optimiser, 0.9),
    ]
    twin = lr_scheduler.SequentialLR(twin_optimiser, twins, [8])
    seen = rates(whole, optimiser, [*even(), step(16, pooled=True, first=16)])
    twin_optimiser.step()
    for _ in range(32):
        twin.step()
    assert seen[-1] == pytest.approx(twin_optimiser.param_groups[0]["lr"])


def test_a_schedule_that_is_stepped_once_an_epoch_is_left_alone(
    optimiser: torch.optim.Optimizer,
) -> None:
    scheduler = lr_scheduler.StepLR(optimiser, 1, 0.5)
    seen = rates(scheduler, optimiser, [*even(), step(16, pooled=True, first=16)], each=1000)
    assert set(seen) == {1.0}
    scheduler.step()
    assert optimiser.param_groups[0]["lr"] == 0.5


def test_a_schedule_keeps_its_state(optimiser: torch.optim.Optimizer) -> None:
    scheduler = lr_scheduler.StepLR(optimiser, 1, 0.5)
    before, method = set(scheduler.state_dict()), lr_scheduler.LRScheduler.step
    schedules = Schedules(CurrentStep(2))
    schedules.look(optimiser)
    assert set(scheduler.state_dict()) == before
    assert lr_scheduler.LRScheduler.step is not method
    schedules.close()
    assert lr_scheduler.LRScheduler.step is method
