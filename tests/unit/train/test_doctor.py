"""The checks of `paceline doctor`, of data sets and models without ranks."""

from __future__ import annotations

import random
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.train.doctor import drawing
from paceline.train.doctor.watching import Seen, SeenSession
from paceline.train.seeding.samples import Epoch


class Loading(Dataset[Any]):
    """Samples that a function of the index makes."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def seen(make: Callable[[int], Any], collate: Callable[[list[Any]], Any] | None = None) -> Seen:
    """A script that has begun to read a loader of these samples."""
    data = Loading(make)
    loader: Any = SimpleNamespace(
        _epoch=Epoch(7, shared=False), _loader=DataLoader(data, collate_fn=collate)
    )
    return Seen(sessions=[SeenSession("train.py:1", dataset=data, loader=loader)])


def says(what: Seen) -> str:
    (finding,) = drawing.samples(what)
    return finding.says


def flipped(draw: Callable[[], Any]) -> Callable[[int], Any]:
    """Samples that are flipped if a number drawn is low: hardly ever."""
    return lambda index: torch.arange(3.0) + index if draw() > 1e-9 else torch.zeros(3)


def with_paceline(index: int) -> Any:
    with paceline.seeded(index):
        noise = torch.rand(2), np.random.random(), random.random()
    return noise, torch.rand(2, generator=paceline.generator(index))


def seeds_itself(index: int) -> Any:
    torch.manual_seed(index)
    return torch.rand(2)


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(()), np.random.random, random.random], ids=["torch", "np", "random"]
)
def test_a_draw_counts_also_where_it_changes_nothing(draw: Callable[[], Any]) -> None:
    before = torch.get_rng_state(), random.getstate()
    assert "draws from the process's random numbers" in says(seen(flipped(draw)))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()

    def collate(samples: list[Any]) -> Any:
        return flipped(draw)(len(samples))

    assert "collate_fn draws" in says(seen(float, collate))


def test_random_numbers_of_the_data_sets_own() -> None:
    own = np.random.default_rng(0)
    assert "gives another sample" in says(seen(lambda _: UserDict(noise=own.random(2))))
    assert "gives another sample" in says(seen(lambda _: np.float32(own.random())))


@pytest.mark.parametrize("make", [float, with_paceline, seeds_itself, lambda _: np.float32("nan")])
def test_samples_that_depend_on_no_rank(make: Callable[[int], Any]) -> None:
    assert "takes no random numbers that depend on the rank" in says(seen(make))
