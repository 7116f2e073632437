"""Whether scripts suit a relaxed synchroniser, without processes: how often they are looked at."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.train.batchnorm import adapt
from paceline.train.ddp import CurrentStep, SingleProcess
from paceline.train.plan_shard import LocalStep
from paceline.train.sync import discovery
from paceline.train.sync.base import Ranks
from paceline.train.sync.optimiser import ScriptOptimiser
from paceline.train.sync.suitability import Suitability, Suits

RANKS = cast(Ranks, SimpleNamespace(rank=0, world=2, group=None))


class Rank0:
    """Rank 0's script; on rank 1 the same happens, except that its optimiser may not step."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 1)
        self.optimiser = torch.optim.SGD(self.model.parameters(), 0.1)
        self.script = ScriptOptimiser()
        models = [SingleProcess(self.model, CurrentStep(2))]
        self.suitability = Suitability(self.script, models)
        self.rank_1_steps = True
        self.reported: list[tuple[int, str]] = []  # segments with a fallback, and why
        self.suitability.on_fallback = lambda step, why: self.reported.append((step.segment, why))

    def gather(self, answers: list[Any], mine: object, group: object) -> None:
        """In place of torch's."""
        theirs = mine
        if not self.rank_1_steps:
            theirs = (mine[0], False) if isinstance(mine, tuple) else False
        answers[:] = [mine, theirs]

    def steps(self) -> None:
        self.script.trains(self.optimiser, lambda: list(self.model.parameters()))

    def asks(self, times: int = 1) -> Suits:
        for _ in range(times):
            self.suitability.ask("partial", RANKS)
        return self.suitability.answer

    def tells(self, segment: int) -> list[tuple[int, str]]:
        self.suitability.tell(LocalStep(0, 0, segment, [], 1.0, 1.0, 1.0, 1.0, None, 0))
        return self.reported


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank0:
    made = Rank0()
    monkeypatch.setattr(dist, "all_gather_object", made.gather)
    return made


@pytest.fixture
def looks(rank: Rank0) -> Iterator[mock.Mock]:
    """Looks for the script's optimisers; it has no scaler."""
    with (
        mock.patch.object(discovery, "optimisers", return_value=[rank.optimiser]) as made,
        mock.patch.object(discovery, "scalers", return_value=[]),
    ):
        yield made


def test_a_script_is_looked_at_before_and_after_its_optimiser_s_first_step(
    rank: Rank0, looks: mock.Mock
) -> None:
    assert rank.asks(20) is Suits.NOT_YET
    assert looks.call_count == 1
    rank.steps()
    assert rank.asks() is Suits.YES
    assert looks.call_count == 2


def test_all_ranks_optimisers_must_have_stepped(rank: Rank0, looks: mock.Mock) -> None:
    rank.steps()
    rank.rank_1_steps = False
    assert rank.asks(20) is Suits.NOT_YET
    assert looks.call_count == 1
    rank.rank_1_steps = True
    assert rank.asks() is Suits.YES


def test_what_comes_to_light_with_the_first_step_counts(rank: Rank0, looks: mock.Mock) -> None:
    assert rank.asks(2) is Suits.NOT_YET
    rank.steps()
    rank.script.closures = True
    assert rank.asks() is Suits.NO


def test_a_long_wait_is_logged_once_and_warned_of_once(
    rank: Rank0, looks: mock.Mock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rank.asks(100)
    (waits,) = caplog.records
    assert (waits.levelname, waits.getMessage()) == (
        "INFO",
        "partial starts after the optimiser's first step; until then gradients are all-reduced",
    )
    rank.steps()
    rank.rank_1_steps = False
    rank.asks(200)
    (_, warning) = caplog.records
    assert warning.levelname == "WARNING"
    assert "no torch optimiser of the wrapped models has stepped on ranks 1" in warning.getMessage()
    assert "session.optimizer(optimizer) before the loop" in warning.getMessage()


def test_a_script_that_does_not_suit_is_told_once_for_each_segment(
    rank: Rank0, looks: mock.Mock
) -> None:
    rank.steps()
    rank.script.closures = True
    assert rank.asks() is Suits.NO
    why = "the script steps its optimiser with a closure"
    assert rank.tells(3) == [(3, why)]
    assert rank.tells(3) == [(3, why)]
    assert rank.tells(4) == [(3, why), (4, why)]


def test_a_wait_for_the_first_step_is_told_once_it_takes_long(
    rank: Rank0, looks: mock.Mock
) -> None:
    rank.steps()
    rank.rank_1_steps = False
    rank.asks(100)  # the first looks at the script, before any step
    assert rank.tells(0) == []
    rank.asks()
    why = "no torch optimiser of the wrapped models has stepped on ranks 1"
    assert rank.tells(0) == [(0, why)]
    rank.rank_1_steps = True
    assert rank.asks() is Suits.YES
    assert rank.tells(1) == [(0, why)]


def test_a_rank_that_reports_nothing_is_not_told(rank: Rank0, looks: mock.Mock) -> None:
    rank.suitability.on_fallback = None
    rank.script.closures = True
    rank.steps()
    assert rank.asks() is Suits.NO
    assert rank.tells(0) == []


@pytest.mark.parametrize(("how", "answer"), [("sync", Suits.NO), ("local", Suits.YES)])
def test_synchronised_layers_keep_the_all_reduce(
    rank: Rank0, looks: mock.Mock, how: str, answer: Suits
) -> None:
    current = CurrentStep(2)
    layer = nn.BatchNorm1d(2)
    adapt(layer, how, current)
    rank.suitability._models = [*rank.suitability._models, SingleProcess(layer, current)]
    rank.steps()
    assert rank.asks() is answer
    said = [why for _, why in rank.tells(3)]
    assert said == [] if how == "local" else "batchnorm='local'" in said[0]
