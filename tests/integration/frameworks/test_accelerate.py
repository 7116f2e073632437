"""Training with Accelerate is the same with Paceline, on two ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from support.frameworks import ROOT, WORLD, Results, results

pytestmark = pytest.mark.ranks

_SPEC = importlib.util.spec_from_file_location(
    "frameworks_text", ROOT / "examples" / "frameworks" / "text.py"
)
assert _SPEC is not None and _SPEC.loader is not None
text: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(text)

SCRIPT = ROOT / "tests" / "support" / "accelerate_script.py"
UNEVEN = {"limits": [5, 12]}  # without a control plane, that leaves each rank another size
ODD = 161  # samples: the last step has one, and rank 1 a filler
CASES = {
    "plain": {"plain": True},
    "even": {},
    "uneven": {"paceline": UNEVEN},
    "plain, accumulating": {"plain": True, "gradient_accumulation_steps": 2},
    "accumulating": {"gradient_accumulation_steps": 2, "paceline": UNEVEN},
    "plain, bf16": {"plain": True, "mixed_precision": "bf16"},
    "bf16": {"mixed_precision": "bf16"},
    "odd": {"count": ODD},
    "shapes": {"paceline": {**UNEVEN, "shapes": 4}},
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    directory = tmp_path_factory.mktemp("accelerate")
    middle, end = str(directory / "middle"), str(directory / "end")
    return results(
        SCRIPT,
        directory,
        *CASES.values(),
        {"count": ODD, "save_at": 4, "folder": middle, "epochs": 1},
        {"count": ODD, "load": True, "folder": middle},
        {"count": ODD, "save_at": 11, "folder": end, "epochs": 1},
        {"count": ODD, "load": True, "folder": end},
        "refusals",
        "example",
    )


def case(ranks: Results, name: str, rank: int = 0) -> dict[str, Any]:
    got: dict[str, Any] = ranks[rank][list(CASES).index(name)]
    return got


@pytest.mark.parametrize(
    ("name", "plain", "within"),
    [
        ("even", "plain", 1e-5),
        ("uneven", "plain", 1e-5),
        ("shapes", "plain", 1e-5),
        ("accumulating", "plain, accumulating", 1e-5),
        ("bf16", "plain, bf16", 1e-2),  # rounding depends on which samples a rank has
    ],
)
def test_training_is_accelerates_own(ranks: Results, name: str, plain: str, within: float) -> None:
    got, wanted = case(ranks, name), case(ranks, plain)
    assert got["losses"] == pytest.approx(wanted["losses"], abs=within)
    assert wanted["losses"][1] < wanted["losses"][0]
    assert got["rates"] == wanted["rates"]
    assert [step[0] for step in got["gathered"]] == [step[0] for step in wanted["gathered"]]
    assert got["losses"] == case(ranks, name, rank=1)["losses"]


def test_batches_were_uneven(ranks: Results) -> None:
    assert set(case(ranks, "uneven", rank=0)["counts"]) == {5}
    assert set(case(ranks, "uneven", rank=1)["counts"]) == {11}
    assert set(case(ranks, "shapes", rank=0)["counts"]) == {4}
    assert set(case(ranks, "shapes", rank=1)["counts"]) == {12}


def test_gathering_for_metrics_gives_each_sample_once_and_no_filler(ranks: Results) -> None:
    got = case(ranks, "odd")["gathered"]
    numbers = [number for step, _ in got[: len(got) // 2] for number in step]
    assert sorted(numbers) == list(range(ODD))
    assert case(ranks, "odd", rank=1)["counts"][10] == 1  # the filler
    assert all(shape == [len(step), 5] for step, shape in got)


def test_a_filler_does_not_count(ranks: Results) -> None:
    """The training is that of one process on the same global batches."""
    got = case(ranks, "odd")
    torch.manual_seed(3)
    sentences, model = text.Sentences(ODD), text.Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=100)
    losses = []
    for step, (numbers, _) in enumerate(got["gathered"], 1):
        optimizer.zero_grad()
        loss_of(model, sentences, numbers).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        for _ in range(WORLD):
            schedule.step()
        if step % 11 == 0:
            losses.append(loss_of(model, sentences, range(ODD)).item())
    assert got["losses"] == pytest.approx(losses, abs=1e-5)


def loss_of(model: Any, sentences: Any, numbers: Iterable[int]) -> torch.Tensor:
    batch = text.collate([sentences[number] for number in numbers])
    labels = batch.pop("labels")
    return torch.nn.functional.cross_entropy(model(**batch), labels)


@pytest.mark.parametrize("start", [0, 2])
def test_goes_on_from_a_saved_state(ranks: Results, start: int) -> None:
    """In the middle of an epoch, and in its last step, after which the next epoch follows."""
    saved = len(CASES) + start
    for rank in range(WORLD):
        whole = case(ranks, "odd", rank)
        again = ranks[rank][saved + 1]
        assert again["losses"] == pytest.approx(whole["losses"][-len(again["losses"]) :], abs=1e-5)
        assert again["rates"] == whole["rates"]
    steps = ranks[0][saved + 1]["counts"]
    assert len(steps) == (18, 11)[start // 2]


def test_refusals_say_what_to_do(ranks: Results) -> None:
    said = ranks[0][-2]
    wanted = [
        "does not take 'micro_batches': a framework's loop runs one iteration for each batch",
        "does not take 'size': known options",
        "dispatch_batches=True makes rank 0 read all batches: leave it out",
        "comm_hook=fp16): Paceline reduces gradients in its own hook: leave it out",
        "give accelerator.prepare(…) the DataLoader with shuffle=True",
        "skip_first_batches: after accelerator.load_state(…) the training loader automatically",
        "join_uneven_inputs: Paceline's loader ends on all ranks together",
        "a second DataLoader with shuffle=True",
        "replacement or num_samples, but Paceline uses each sample once per epoch",
    ]
    assert len(said) == len(wanted)
    for sentence, part in zip(said, wanted, strict=True):
        assert part in sentence


def test_the_example_prints_what_accelerate_alone_does(ranks: Results) -> None:
    paced, plain = ranks[0][-1]
    assert paced == plain
    assert "held-out accuracy 0." in plain
