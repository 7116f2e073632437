"""Training with Lightning is the same with Paceline's strategy, on two ranks."""

from __future__ import annotations

from typing import Any

import pytest

from support.frameworks import ROOT, Results, results

pytestmark = pytest.mark.ranks

SCRIPT = ROOT / "tests" / "support" / "lightning_script.py"
UNEVEN = {"paceline": {"limits": [5, 12]}}  # without a control plane, each rank has another size
ACCUMULATING = {"accumulate_grad_batches": 3}
LIMITED = {"limit_train_batches": 4}
BF16 = {"precision": "bf16-mixed"}
ODD = {"count": 161}  # the last step has one sample, and rank 1 a filler
CASES: dict[str, Any] = {
    "plain": {"plain": True},
    "even": {},
    "uneven": UNEVEN,
    "plain, accumulating": {"plain": True, **ACCUMULATING},
    "uneven, accumulating": {**UNEVEN, **ACCUMULATING},
    "plain, limited": {"plain": True, **LIMITED},
    "uneven, limited": {**UNEVEN, **LIMITED},
    "plain, bf16": {"plain": True, **BF16},
    "uneven, bf16": {**UNEVEN, **BF16},
    "odd": {**ODD, "save": "steps", "save_every": 1},
    "from the middle": {**ODD, "resume": "steps/step=4.ckpt"},
    "from the last step": {**ODD, "resume": "steps/step=11.ckpt"},
    "by epoch": {**ODD, "save": "epochs"},
    "from the epoch's end": {**ODD, "resume": "epochs/step=11.ckpt"},
    "saved without": {"plain": True, "save": "plain", "epochs": 1},
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    directory = tmp_path_factory.mktemp("lightning")
    return results(SCRIPT, directory, *CASES.values(), "refusals", "example")


def case(ranks: Results, name: str, rank: int = 0) -> dict[str, Any]:
    got: dict[str, Any] = ranks[rank][list(CASES).index(name)]
    return got


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("even", "uneven"))])
def test_training_is_lightnings_own(ranks: Results, name: str) -> None:
    got = case(ranks, name)
    wanted = case(ranks, name.replace("uneven", "plain").replace("even", "plain"))
    within = 1e-2 if "bf16" in name else 1e-5  # rounding depends on which samples a rank has
    assert got["loss"] == pytest.approx(wanted["loss"], abs=within)
    assert got["evaluated"] == pytest.approx(wanted["evaluated"], abs=within)
    assert got["rates"] == wanted["rates"]
    assert got["steps"] == wanted["steps"]
    assert got["loss"] == case(ranks, name, rank=1)["loss"]
    assert got["evaluated"][1] < got["evaluated"][0]


def test_batches_were_uneven(ranks: Results) -> None:
    for rank, count in enumerate((5, 11)):
        assert set(case(ranks, "uneven", rank)["counts"]) == {count}
    assert case(ranks, "odd", rank=1)["counts"][10] == 0


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
    assert got["rates"][-1] == wanted["rates"][-1]
    assert got["steps"] == wanted["steps"] == 22
    assert len(got["counts"]) == (18 if name == "from the middle" else 11)


def test_refusals_say_what_to_do(ranks: Results) -> None:
    wanted = [
        "does not take 'drop_last': use the framework's own drop_last",
        "ddp_comm_hook=…): Paceline reduces gradients in its own hook: leave it out",
        "model_averaging_period=…): leave it out and choose the policy local-sgd",
        "Manual.automatic_optimization is False",
        "the training DataLoader has a custom sampler, or none",
        "reload_dataloaders_every_n_epochs=…): Paceline plans one data set",
        "Trainer(overfit_batches=…) trains in a fixed order",
        "the checkpoint was saved without Paceline",
    ]
    said = ranks[0][-2]
    assert len(said) == len(wanted)
    for sentence, part in zip(said, wanted, strict=True):
        assert part in sentence


def test_the_example_prints_what_lightning_alone_does(ranks: Results) -> None:
    paced, plain = ranks[0][-1]
    assert paced == plain
    assert "held-out loss 1." in plain
