"""The checks of `paceline doctor`, of data sets and models without ranks."""

from __future__ import annotations

import copy
import pickle
import random
import sys
import weakref
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import paceline
from paceline.node import rundir
from paceline.node.starting.examining import Examined, Finding, Level, path_of
from paceline.train.doctor import checks, drawing, examination, padding
from paceline.train.doctor.calls import Calls, tensors
from paceline.train.doctor.watching import Seen, SeenSession
from paceline.train.seeding.samples import Epoch


@pytest.fixture(autouse=True)
def _no_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test of this process may have imported a framework's adapter."""
    monkeypatch.delitem(sys.modules, "paceline.train.adapting.loader", raising=False)


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


class Pooled(nn.Module):
    """The mean over a series' points, each divided by something that depends on its length."""

    def __init__(self, divide: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.divide = divide
        self.head = nn.Linear(1, 2)

    def forward(self, series: Tensor, lengths: Tensor) -> Tensor:
        inside = torch.arange(series.shape[1]) < lengths[:, None]
        pooled = (series * inside).sum(1) / lengths
        out: Tensor = self.head(pooled[:, None])
        return self.divide(out, inside)


def padded(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    return pad_sequence(samples, batch_first=True), torch.tensor([len(s) for s in samples])


def passed(model: nn.Module, batch: Any) -> None:
    model(batch) if isinstance(batch, paceline.Packed) else model(*batch)


def trained(
    model: nn.Module,
    collate: Callable[[list[Any]], Any] = padded,
    call: Callable[[nn.Module, Any], object] = passed,
) -> Seen:
    """A script whose model was called once with a batch of series of 2 to 6 points."""
    what = seen(lambda index: torch.arange(2.0 + index), collate)
    (known,) = what.sessions
    batch: Any = collate([torch.ones(3), torch.ones(5)])
    known.steps, known.batch = 1, list(tensors(batch))
    known.calls = [Calls(model, lambda: True, lambda: known.batch)]
    call(model, batch)
    known.calls[0].close()
    return what


def nan_where_padded(out: Tensor, inside: Tensor) -> Tensor:
    return torch.where(inside.all(1)[:, None], out, torch.nan)


def masked(out: Tensor, inside: Tensor) -> Tensor:
    """One of two numbers is masked, and the other one stays or depends on padding."""
    return torch.stack([out[:, 0], torch.full_like(out[:, 0], -torch.inf)], 1)


def masked_and_padded(out: Tensor, inside: Tensor) -> Tensor:
    return masked(out * (2 - inside.float().mean(1))[:, None], inside)


@pytest.mark.parametrize(
    ("divide", "level", "says"),
    [
        (lambda out, _: out, Level.OK, "stays when it is padded"),
        (lambda out, _: out * torch.nan, Level.NOTE, "cannot be told: the model's output has NaN"),
        (nan_where_padded, Level.NOTE, "cannot be told: the model's output has NaN"),
        (masked, Level.OK, "stays when it is padded"),
        (masked_and_padded, Level.PROBLEM, "when it is padded beside a long one"),
        (lambda out, _: out.mean() * torch.nan, Level.NOTE, "loss is NaN or infinite"),
    ],
    ids=["right", "nan", "nan-where-padded", "masked", "masked-and-padded", "loss"],
)
def test_padding_where_numbers_are_not_finite(
    divide: Callable[[Tensor, Tensor], Tensor], level: Level, says: str
) -> None:
    (finding,) = padding.padding(trained(Pooled(divide)))
    assert finding.level is level, finding
    assert says in finding.says


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


def test_activations_are_not_kept() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    batch = torch.rand(2, 3)
    calls = Calls(model, lambda: True, lambda: list(tensors([batch])))
    made: list[weakref.ref[Tensor]] = []
    for part in model:
        part.register_forward_hook(lambda _, __, output: made.append(weakref.ref(output)))
    model(batch).sum().backward()
    assert len(made) == 3
    assert [reference() for reference in made] == [None] * 3
    # The model and its first part had the batch itself.
    assert [call.name for call in calls.of_parts] == ["", "0"]
    assert calls.called
    assert not any(call.numbers for call in calls.of_parts)


def test_a_tensor_that_cannot_be_compared_does_not_end_the_script() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    calls = Calls(model, lambda: True, lambda: list(tensors([torch.rand(2, 3)])))
    torch.vmap(model)(torch.rand(4, 2, 3))  # the model sees tensors of 2 by 3 with no values
    assert calls.called
    assert calls.of_parts == []


class OfPacked(nn.Module):
    """Sums up what comes before each position: of all sequences, or of its own alone."""

    def __init__(self, *, apart: bool) -> None:
        super().__init__()
        self.apart = apart
        self.head = nn.Linear(1, 2)

    def forward(self, batch: paceline.Packed) -> Tensor:
        (series,) = batch.values
        assert batch.max_seqlen == int(batch.cu_seqlens.diff().max())
        parts = series.split(batch.cu_seqlens.diff().tolist()) if self.apart else (series,)
        out: Tensor = self.head(torch.cat([part.cumsum(0) for part in parts])[:, None])
        return out


@pytest.mark.parametrize(
    ("apart", "level", "words"),
    [
        (
            True,
            Level.OK,
            "Batches are not padded, and what OfPacked says of a sample depends on no",
        ),
        (False, Level.PROBLEM, "depends on the other samples of its batch"),
    ],
)
def test_packed_sequences_are_kept_apart(apart: bool, level: Level, words: str) -> None:
    (finding,) = padding.padding(trained(OfPacked(apart=apart), paceline.packed))
    assert finding.level is level, finding
    assert words in finding.says
    assert apart or "by cu_seqlens or position_ids" in finding.do


class OfLongest(nn.Module):
    """Takes what FlashAttention takes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 2)

    def forward(self, series: Tensor, bounds: Tensor, longest: int) -> Tensor:
        out: Tensor = self.head(series[:longest, None])
        return out


def test_a_number_of_another_batch_is_not_taken_for_this_ones() -> None:
    with_number = trained(
        OfLongest(),
        paceline.packed,
        lambda model, b: model(b.values[0], b.cu_seqlens, b.max_seqlen),
    )
    (finding,) = padding.padding(with_number)
    assert finding.level is Level.NOTE
    assert "a whole number, which may be max_seqlen" in finding.says


class Noisy(Pooled):
    """Draws random numbers in evaluation mode, too."""

    def __init__(self) -> None:
        super().__init__(lambda out, _: out + torch.rand_like(out))


def scaled(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    return padded([sample * random.random() for sample in samples])


@pytest.mark.parametrize(
    ("model", "collate", "words"),
    [
        (Noisy(), padded, "the model says something else of the same batch"),
        (Pooled(lambda out, _: out), scaled, "the same sample gives another batch"),
    ],
    ids=["model", "collate"],
)
def test_random_numbers_are_not_taken_for_padding(
    model: nn.Module, collate: Callable[[list[Any]], Any], words: str
) -> None:
    (finding,) = padding.padding(trained(model, collate))
    assert finding.level is Level.NOTE, finding
    assert f"cannot be told: {words}" in finding.says


class Lossy(nn.Module):
    """Returns its loss alone, which depends on padding; its largest layer does not."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(1, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, series: Tensor, lengths: Tensor) -> Tensor:
        made: Tensor = self.head(torch.tanh(self.read(series))).mean(1)
        return (made[:, 0] - lengths).square().mean()


def columns(samples: list[Tensor]) -> tuple[Tensor, Tensor]:
    series, lengths = padded(samples)
    return series[..., None], lengths


def test_a_layer_says_nothing_of_a_model_that_returns_its_loss() -> None:
    (finding,) = padding.padding(trained(Lossy(), columns))
    assert finding.level is Level.NOTE, finding
    assert "the model returns its loss alone" in finding.says


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "pickle"],
)
def test_a_copy_of_the_model_is_not_the_model(copied: Callable[[nn.Module], nn.Module]) -> None:
    """It may be a teacher, which goes first, or an average."""
    model = nn.Sequential(nn.Linear(3, 3))
    calls = Calls(model, lambda: True, lambda: [])
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
    what = Seen(sessions=[SeenSession("train.py:1", session=session)], failed=True)
    assert list(checks.checkpoint(what)) == []
    what.failed = False
    assert [finding.level for finding in checks.checkpoint(what)] == [Level.NOTE]
