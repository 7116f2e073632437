"""What follows from trials, and which statements of a loop's body are replayed."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.core.terms import Terms
from paceline.train import proof, replay
from paceline.train.profile import Limits
from paceline.train.proof import (
    PROVEN,
    UNKNOWN,
    WRONG,
    Arrangements,
    Judge,
    NotProvableError,
    Outcome,
    ProofResult,
    Sketch,
    Trial,
    arranged,
)


@pytest.mark.parametrize("world", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ["whole", "uneven", "filler", "equal", "again"])
def test_each_trial_has_each_sample_equally_often(world: int, name: str) -> None:
    sizes = np.arange(1.0, 9.0)
    limits = [4, 8, 8, 4, 5][:world]
    trial = Arrangements(sizes, world, [1, 3, 4, 6], limits).trial(name)
    assert all(len(part) <= limit for part, limit in zip(trial.parts, limits, strict=True))
    assert sorted(s for part in trial.parts for s in part) == sorted([1, 3, 4, 6] * world)
    for setting in ("samples", "size"):
        assert sum(trial.weights[setting]) == pytest.approx(1)


TERMS = Terms(8, 4, 0, drop_last=False, loss_mean="samples", coast_steps=2)


@pytest.mark.parametrize(
    ("limits", "samples"),
    [
        (Limits([]), [0, 2]),  # four samples where two are an equal part: small ones
        (Limits([2, 4]), [0, 2]),
        (Limits([], tokens=[3.0, 6.0]), [0, 1]),
    ],
)
def test_parts_that_are_larger_than_in_training_have_small_samples(
    limits: Limits, samples: list[int]
) -> None:
    sizes = np.arange(1.0, 9.0)
    made = arranged(sizes, 2, TERMS, limits)
    parts = made.trial("filler").parts
    assert sorted({sample for part in parts for sample in part}) == samples
    assert max(sizes[part].sum() for part in parts) <= 2 * sizes[-1]


@pytest.mark.parametrize("limits", [Limits([0, 4]), Limits([3, 3]), Limits([], tokens=[3, 5.9])])
def test_a_proof_respects_limits(limits: Limits) -> None:
    with pytest.raises(NotProvableError, match="samples"):
        arranged(np.arange(1.0, 9.0), 2, TERMS, limits)


def judged(gradient: Any, declared: str = "samples", **more: Any) -> ProofResult:
    """The answer where a rank's gradient is a function of its part, the trial and the rank."""
    judge = Judge(Arrangements(np.ones(8), 2, [0, 1, 2, 3], [8, 8]), declared)
    following: Trial | ProofResult = judge.begin()
    while isinstance(following, Trial):
        outcomes = [
            Outcome([gradient(part, following, rank)], tolerance=1e-6, **more)
            for rank, part in enumerate(following.parts)
        ]
        following = judge.then(following, outcomes)
    return following


def mean(part: list[int], trial: Trial, rank: int) -> list[float]:
    return [float(np.mean(part or [7])), 1.0]


def total(part: list[int], trial: Trial, rank: int) -> list[float]:
    return [2.0 * sum(part), 1e-9]


def variance(part: list[int], trial: Trial, rank: int) -> list[float]:
    return [float(np.var(part or [7])), 1.0]


def changing(part: list[int], trial: Trial, rank: int) -> list[float]:
    return [float(hash(trial.name) % 1000), 1.0]


@pytest.mark.parametrize(
    ("gradient", "declared", "verdict", "setting"),
    [
        (mean, "samples", PROVEN, "samples"),
        (mean, "size", PROVEN, "size"),  # as all sizes are equal
        (mean, "ranks", WRONG, "samples"),
        (total, "ranks", PROVEN, "ranks"),
        (total, "samples", WRONG, "ranks"),
        (variance, "samples", WRONG, ""),
        (changing, "samples", UNKNOWN, ""),
        (lambda *_: [float("nan"), 1.0], "samples", UNKNOWN, ""),
        (lambda *_: [0.0, 0.0], "samples", UNKNOWN, ""),
        (lambda part, trial, rank: [float(rank), 1.0], "samples", UNKNOWN, ""),
    ],
)
def test_the_answer_follows_from_the_gradients(
    gradient: Any, declared: str, verdict: str, setting: str
) -> None:
    answer = judged(gradient, declared)
    assert (answer.verdict, answer.setting) == (verdict, setting), answer


def test_a_loop_that_draws_random_numbers_is_not_called_wrong() -> None:
    assert judged(variance).verdict == WRONG
    assert judged(variance, random=True).verdict == UNKNOWN
    assert judged(mean, random=True).verdict == PROVEN


def test_a_sketch_is_linear_and_as_long_as_the_gradient() -> None:
    torch.manual_seed(0)
    model, sketch, made = nn.Linear(300, 200, dtype=torch.float64), Sketch(), []
    gradients = [[torch.randn_like(p) for p in model.parameters()] for _ in range(2)]
    for parts in [*gradients, [a + 2 * b for a, b in zip(*gradients, strict=True)]]:
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad = part
        made.append(sketch.of(model))
    assert torch.allclose(made[2], made[0] + 2 * made[1])
    length = torch.cat([part.flatten() for part in gradients[0]]).norm()
    assert made[0].norm() == pytest.approx(float(length), rel=0.3)


class Script:
    def __init__(self) -> None:
        self.items: list[int] = []
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)


def helper(batch: Any) -> Any:
    made = batch.clone()
    made[0] = 1
    return made


def keeping(batch: Any) -> Any:
    KEPT.append(batch)
    return batch


class Counting:
    calls = 0

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return x


class Meter:
    total = 0.0

    def update(self, value: Any, number: int = 1) -> None:
        self.total += number


def reading(batch: Any) -> Any:
    return batch * METER.total


KEPT: list[Any] = []
METER = Meter()


@pytest.mark.parametrize(
    "code",
    [
        "x = batch.clone(); x[0] = 1; x.mul_(2)",
        "x = helper(batch)",
        "count += 1",
        "s.optimizer.zero_grad()",
        "s.optimizer.step()",
        "parts = []; parts.append(batch)",
        "with torch.autocast('cpu'):\n    loss = s.model(batch).sum()",
        "if count:\n    continue",
        "y = [s.model(b) for b in batch]",
    ],
)
def test_what_leaves_nothing_behind_is_replayed(code: str) -> None:
    assert checked(code) == ""


@pytest.mark.parametrize(
    "code",
    [
        "x = next(other)",
        "s.items.append(1)",
        "items = s.items; items.append(1)",
        "for item in s.items:\n    item.clear()",
        "s.count = 1",
        "s.items[0] = 1",
        "shared += batch",
        "shared.mul_(2)",
        "s.schedule.step()",
        "x = keeping(batch)",
        "print(batch)",
        "yield batch",
        "global count",
        "x = counting(batch)",
        "noise = torch.rand(2, generator=generator)",
    ],
)
def test_what_may_leave_something_behind_is_not(code: str) -> None:
    assert checked(code)


@pytest.mark.parametrize(
    "code",
    [
        "meter.update(batch.sum().item(), len(batch))",
        "meter.update(0.5)\nprint(meter.total)\nprint(1)",
        "if count % 100 == 0:\n    print(batch)",
        "if count:\n    x = next(other)\nelse:\n    y = batch * 2",
        "items.append(batch)",
    ],
)
def test_what_nothing_reads_before_the_gradients_is_left_out(code: str) -> None:
    assert replayed(code) == "an iteration of the loop computes no gradient of a wrapped model"
    assert METER.total == 0 == len(KEPT)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("meter.update(batch)", "line 2 calls meter.update()"),  # it may train on it
        ("meter.update(1)\nx = batch * meter.total", "line 2 calls meter.update()"),
        ("METER.update(1)\nx = reading(batch)", "line 2 calls METER.update()"),
        ("items.append(1)\nif items:\n    x = batch", "line 2 calls items.append()"),
        ("x = batch\nkeeping(batch)", "line 3 calls KEPT.append()"),
        ("print(next(other))", "line 2 calls print()"),
        ("if (x := next(other)):\n    print(x)", "line 2 calls next()"),
    ],
)
def test_what_may_be_read_is_not_left_out(code: str, why: str) -> None:
    assert replayed(code) == why


def replayed(code: str) -> str:
    """Why a loop with these statements is not provable; they run up to their end."""
    body = replay._Body()
    (loop,) = ast.parse("for batch in loader:\n" + indent(code, "    ")).body
    assert isinstance(loop, ast.For)
    own = {"meter": METER, "count": 0, "other": iter([1]), "items": KEPT}
    body._loop, body._names, body._item = loop, {**globals(), **own}, lambda batch: batch
    rehearsal: Any = SimpleNamespace(complete=False)
    body.rehearsal = rehearsal
    with pytest.raises(NotProvableError) as caught:
        body.run(torch.ones(2))
    return str(caught.value)


def checked(code: str) -> str:
    """Why statements are not replayed; empty: they are."""
    names = {
        **globals(),
        "s": Script(),
        "count": 0,
        "shared": torch.ones(2),
        "other": iter([1]),
        "counting": Counting(),
        "generator": torch.Generator(),
    }
    try:
        replay._check(ast.parse(code).body, names, {"batch"})
    except replay._UnsafeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("on_a_gpu", [False, True])
@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.rand(1),
        random.random,
        np.random.random,
        np.random.standard_normal,
        lambda: random.gauss(0, 1),
    ],
    ids=["torch", "random", "numpy", "numpy's normal", "random's normal"],
)
def test_each_random_number_is_noticed(
    draw: Callable[[], object], on_a_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: on_a_gpu)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8))
    before = proof._random_state()
    assert proof._random_state() == before
    draw()
    assert proof._random_state() != before
