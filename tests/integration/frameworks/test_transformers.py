"""Training with Hugging Face's Trainer is the same with Paceline, on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.frameworks import ROOT, Results, results

pytestmark = pytest.mark.ranks

SCRIPT = ROOT / "tests" / "support" / "transformers_script.py"
UNEVEN = {"limits": [5, 12]}  # without a control plane, that leaves each rank another size
UNEVEN_PARTS = {"limits": [11, 24]}
ACCUMULATING = {"gradient_accumulation_steps": 2}
MEAN = {"kind": "classification"}  # its loss is a mean, whatever `num_items_in_batch` is
ODD = {"count": 161}  # the last step has one sample, and rank 1 a filler
CASES: dict[str, Any] = {
    "plain": {"plain": True},
    "even": {},
    "uneven": {"paceline": UNEVEN, "dataloader_num_workers": 1},
    "plain, accumulating": {"plain": True, **ACCUMULATING},
    "even, accumulating": ACCUMULATING,
    "uneven, accumulating": {"paceline": UNEVEN_PARTS, **ACCUMULATING},
    "plain, mean": {"plain": True, **MEAN},
    "uneven, mean": {"paceline": UNEVEN, **MEAN},
    "plain, mean, accumulating": {"plain": True, **MEAN, **ACCUMULATING},
    "uneven, mean, accumulating": {"paceline": UNEVEN_PARTS, **MEAN, **ACCUMULATING},
    "shapes, accumulating": {"paceline": {**UNEVEN_PARTS, "shapes": 8}, **ACCUMULATING},
    "first blank": {"paceline": UNEVEN, "blank": True},
    "odd": {**ODD, "folder": "steps", "save_strategy": "steps", "save_steps": 1},
    "from the middle": {**ODD, "resume": "steps/checkpoint-4"},
    "from the last step": {**ODD, "resume": "steps/checkpoint-11"},
    "by epoch": {**ODD, "folder": "epochs", "save_strategy": "epoch"},
    "from the epoch's end": {**ODD, "resume": "epochs/checkpoint-11"},
    "saved without": {
        "plain": True,
        "epochs": 1,
        "folder": "plain",
        "save_strategy": "steps",
        "save_steps": 3,
    },
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    directory = tmp_path_factory.mktemp("transformers")
    return results(SCRIPT, directory, *CASES.values(), "refusals", "example")


def case(ranks: Results, name: str, rank: int = 0) -> dict[str, Any]:
    got: dict[str, Any] = ranks[rank][list(CASES).index(name)]
    return got


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("even", "uneven"))])
def test_training_is_trainers_own(ranks: Results, name: str) -> None:
    """Loss, evaluation, and in each step the loss, the norm of gradients and the learning rate."""
    got = case(ranks, name)
    wanted = case(ranks, name.replace("uneven", "plain").replace("even", "plain"))
    assert got["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
    assert got["evaluated"] == pytest.approx(wanted["evaluated"], abs=1e-5)
    assert got["steps"] == wanted["steps"]
    for step, other in zip(got["logged"], wanted["logged"], strict=True):
        assert step == pytest.approx(other, abs=2e-5)
    assert got["loss"] == case(ranks, name, rank=1)["loss"]
    assert got["logged"][-1][0] < got["logged"][0][0]


def test_batches_were_uneven(ranks: Results) -> None:
    for name, counts in (("uneven", (5, 11)), ("uneven, accumulating", (11, 21))):
        for rank, count in enumerate(counts):
            assert set(case(ranks, name, rank)["counts"]) == {count}
    assert case(ranks, "odd", rank=1)["counts"][10] == 0


def test_shapes_are_those_of_a_ranks_whole_part(ranks: Results) -> None:
    got, wanted = case(ranks, "shapes, accumulating"), case(ranks, "plain, accumulating")
    assert got["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
    assert set(got["counts"]) == {8}
    assert set(case(ranks, "shapes, accumulating", rank=1)["counts"]) == {24}


def test_a_batch_without_labels_does_not_say_how_a_loss_is_normalised(ranks: Results) -> None:
    """Loss 0 of a language model, NaN of a classifier."""
    for rank in range(2):
        blank, uneven = case(ranks, "first blank", rank), case(ranks, "uneven", rank)
        assert blank["normalised"] == uneven["normalised"] == [True, 2.0]
        assert not uneven["without_labels"]
        mean = case(ranks, "uneven, mean", rank)
        assert mean["normalised"] == [False, 2.0]
        assert not mean["without_labels"]


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("from the middle", "odd"),
        ("from the last step", "odd"),
        ("from the epoch's end", "by epoch"),
    ],
)
def test_goes_on_from_a_checkpoint(ranks: Results, name: str, whole: str) -> None:
    got, wanted = case(ranks, name), case(ranks, whole)
    assert got["loss"] == pytest.approx(wanted["loss"], abs=1e-5)
    assert got["steps"] == wanted["steps"] == 22
    assert len(got["counts"]) == (18 if name == "from the middle" else 11)


def test_refusals_say_what_to_do(ranks: Results) -> None:
    wanted = [
        "auto_find_batch_size=True changes the global batch: leave it out",
        "train_sampling_strategy='group_by_length': Paceline plans which samples a batch has",
        "ignore_data_skip=True: leave it out",
        "does not take 'uneven_steps': a framework's loop runs the same number of steps on all",
        "dispatch_batches=True makes rank 0 read all batches: leave it out",
        "loss_mean='size' and gradient_accumulation_steps > 1",
        "plain/checkpoint-3 has no paceline_session.pt: it was saved without Paceline",
    ]
    said = ranks[0][-2]
    assert len(said) == len(wanted)
    for sentence, part in zip(said, wanted, strict=True):
        assert part in sentence


def test_the_example_prints_what_trainer_alone_does(ranks: Results) -> None:
    paced, plain = ranks[0][-1]
    assert "held-out loss after each epoch 4." in plain
    assert paced.splitlines()[-1] == plain.splitlines()[-1]


@pytest.mark.long
def test_training_is_trls_own(tmp_path: Path) -> None:
    """SFTTrainer, a subclass of Trainer, with the mixin before it."""
    script = ROOT / "tests" / "support" / "trl_script.py"
    uneven, parts = {"limits": [5, 12]}, {"limits": [11, 24]}
    cases = [
        {"plain": True},
        {"paceline": uneven},
        {"plain": True, **ACCUMULATING},
        {"paceline": parts, **ACCUMULATING},
    ]
    plain, paced, plain_parts, paced_parts = results(script, tmp_path, *cases)[0]
    assert len(plain) == 12
    for got, wanted in zip(paced + paced_parts, plain + plain_parts, strict=True):
        assert got[:2] == pytest.approx(wanted[:2], abs=2e-5)
    for got, wanted in zip(paced, plain, strict=True):
        assert got[2] == pytest.approx(wanted[2], abs=1e-4)
