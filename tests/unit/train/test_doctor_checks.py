"""The checks of `paceline doctor`, of data sets and models without ranks."""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.node import rundir
from paceline.node.starting.examining import Examined, Finding, Level, path_of
from paceline.train.doctor import checks, drawing, examination
from paceline.train.doctor.watching import Calls, ScriptRecord, SeenSession
from paceline.train.seeding import Epoch


@pytest.fixture(autouse=True)
def _no_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have imported a framework's adapter."""
    monkeypatch.delitem(sys.modules, "paceline.train.adapting", raising=False)


class Loading(Dataset[Any]):
    """Samples that a function of the index makes."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def seen(
    make: Callable[[int], Any], collate: Callable[[list[Any]], Any] | None = None
) -> ScriptRecord:
    """A script that has begun to read a loader of these samples."""
    data = Loading(make)
    loader: Any = SimpleNamespace(
        _epoch=Epoch(7, shared=False), _loader=DataLoader(data, collate_fn=collate)
    )
    return ScriptRecord(sessions=[SeenSession("train.py:1", dataset=data, loader=loader)])


def says(what: ScriptRecord) -> str:
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
    assert "uses the process's global random generator" in says(seen(flipped(draw)))
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()

    def collate(samples: list[Any]) -> Any:
        return flipped(draw)(len(samples))

    assert "collate_fn draws" in says(seen(float, collate))


def test_random_numbers_of_the_data_sets_own() -> None:
    own = np.random.default_rng(0)
    assert "returns another sample" in says(seen(lambda _: UserDict(noise=own.random(2))))
    assert "returns another sample" in says(seen(lambda _: np.float32(own.random())))


@pytest.mark.parametrize("make", [float, with_paceline, seeds_itself, lambda _: np.float32("nan")])
def test_samples_that_depend_on_no_rank(make: Callable[[int], Any]) -> None:
    assert "uses no random numbers that depend on the rank" in says(seen(make))


def test_figures_that_json_has_no_number_for_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {"most": 1.0, "nan": float("nan"), "inf": float("inf")}
    finding = Finding("sizes", Level.OK, "…", figures=figures)
    monkeypatch.setattr(examination, "_CHECKS", [("sizes", lambda _: [finding])])
    examination.Examination(tmp_path, 2, 0)._conclude(None)
    read = rundir.read(path_of(tmp_path, 0), Examined)
    assert read is not None
    assert read.findings[0].figures == {"most": 1.0}


def test_a_tensor_without_values_does_not_end_the_script() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    calls = Calls(model, lambda: True)
    torch.vmap(model)(torch.rand(4, 2, 3))  # the model sees tensors of 2 by 3 with no values
    assert calls.called


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "pickle"],
)
def test_a_copy_of_the_model_is_not_the_model(copied: Callable[[nn.Module], nn.Module]) -> None:
    """It may be a teacher, which goes first, or an average."""
    model = nn.Sequential(nn.Linear(3, 3))
    calls = Calls(model, lambda: True)
    other = copied(model)
    other(torch.rand(2, 3))
    assert (calls.called, calls.draws) == (False, False)
    model(torch.rand(2, 3))
    assert (calls.called, calls.draws) == (True, False)


@pytest.mark.parametrize(
    ("sizes", "count"), [(lambda n: n, 0), (lambda n: n.max() + 1 - n, 1), (np.ones_like, 0)]
)
def test_sizes_that_do_not_go_with_samples(sizes: Callable[[Any], Any], count: int) -> None:
    what = seen(lambda index: torch.ones(3 + index))
    (known,) = what.sessions
    known.sizes = np.asarray(sizes(np.arange(3.0, 8.0)))
    findings = list(checks.fitting(what))
    assert [finding.level for finding in findings] == [Level.NOTE] * count
    assert not count or findings[0].figures["correlation"] == pytest.approx(-1)


class Lengthless:
    """As the loader of a stream."""

    def __len__(self) -> int:
        raise TypeError("a stream has no length")


def test_a_stream_has_its_loader_and_a_checkpoint_of_its_own() -> None:
    what = seen(lambda index: index)
    (known,) = what.sessions
    loader: Any = Lengthless()
    session: Any = object()
    known.session, known.loader = session, loader
    known.dataset = paceline.data.Stream([1, 2], size=float, split="none")
    assert [f.level for f in checks.loader(what)] == [Level.OK]
    (finding,) = checks.checkpoint(what)
    assert "save session.state_dict()" in finding.do


def test_a_script_that_failed_before_its_loop_may_declare_a_checkpoint_further_on() -> None:
    session: Any = object()
    what = ScriptRecord(sessions=[SeenSession("train.py:1", session=session)], failed=True)
    assert list(checks.checkpoint(what)) == []
    what.failed = False
    assert [finding.level for finding in checks.checkpoint(what)] == [Level.NOTE]
