"""`paceline doctor` on the tutorial's script with a fault planted: it is named, with the mend.

Each case is the clean script with one change, or with a change that is none of its business.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.node import paceline
from support.waiting import TRAINING_S

pytestmark = pytest.mark.ranks

SCRIPT = """
import paceline
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

torch.set_num_threads(1)


class Sequences(Dataset):
    def __init__(self):
        random = torch.Generator().manual_seed(0)
        self.lengths = [
            3 + int(10 * float(x)) for x in torch.empty(100).exponential_(0.7, generator=random)
        ]
        self.data = [torch.randn(n, 1, generator=random) for n in self.lengths]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index], float(self.data[index].mean() > 0)


def collate(samples):
    series, labels = zip(*samples)
    lengths = torch.tensor([len(each) for each in series])
    return pad_sequence(series, batch_first=True), lengths, torch.tensor(labels)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.GRU(1, 8, batch_first=True)
        self.answer = nn.Linear(8, 1)

    def forward(self, series, lengths):
        packed = pack_padded_sequence(series, lengths, batch_first=True, enforce_sorted=False)
        return self.answer(self.read(packed)[1][-1]).squeeze(1)


dist.init_process_group("gloo")
torch.manual_seed(0)
data = Sequences()
session = paceline.Session(data, sizes=data.lengths, global_batch=16, seed=0)
loader = session.loader(collate_fn=collate)
model = session.wrap(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
session.checkpoint("checkpoints/x", model, optimizer, every_steps=100)
for epoch in session.epochs(3):
    for series, lengths, labels in loader:
        loss = nn.functional.binary_cross_entropy_with_logits(model(series, lengths), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.log(loss=loss)
session.close()
dist.destroy_process_group()
"""
WRAP = "model = session.wrap(Model())"
LOADER = "loader = session.loader(collate_fn=collate)"
ITEM = "return self.data[index], float(self.data[index].mean() > 0)"
OPTIMIZER = "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)"
Change = tuple[str, str]  # a part of the script, and what stands in its place


def examined(folder: Path, *changes: Change) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings of the changed script."""
    text = SCRIPT
    for part, other in changes:
        assert part in text, part
        text = text.replace(part, other)
    path = folder / "train.py"
    path.write_text(text)
    process = paceline("doctor", "--json", str(path), cwd=folder)
    out, err = process.communicate(timeout=TRAINING_S)
    assert "Traceback" not in err, err
    return process.returncode, json.loads(out)["findings"]


FAULTS: dict[str, tuple[list[Change], str, str, str]] = {
    # change → the check, words of what it says, words of what to do
    "own DistributedSampler": (
        [
            (
                LOADER,
                "loader = DataLoader("
                "data, 8, sampler=DistributedSampler(data), collate_fn=collate)",
            )
        ],
        "loader",
        "another DataLoader",
        "session.loader",
    ),
    "sizes missing": (
        [("sizes=data.lengths, ", "")],
        "sizes",
        "No sizes are given",
        "sizes=",
    ),
    "sizes of another order": (
        [("sizes=data.lengths", "sizes=sorted(data.lengths)")],
        "sizes",
        "order",
        "order",
    ),
    "optimizer of another model": (
        [(WRAP, WRAP + "\nother = Model()"), ("model.parameters()", "other.parameters()")],
        "optimizer",
        "the wrapped model is not trained",
        "the model that session.wrap() returned",
    ),
    "the model within is called": (
        [("model(series, lengths)", "model.module(series, lengths)")],
        "model",
        "",
        "model",
    ),
}
CLEAN: dict[str, list[Change]] = {
    "the tutorial's": [],
    "optimizer made before wrap": [
        (WRAP, "model = Model()"),
        (OPTIMIZER, OPTIMIZER + "\nmodel = session.wrap(model)"),
    ],
    "evaluation with a DataLoader of its own in the loop": [
        (
            "        session.log(loss=loss)\n",
            "        session.log(loss=loss)\n"
            "        with torch.no_grad():\n"
            "            for series, lengths, labels in DataLoader(data, 50, collate_fn=collate):\n"
            "                model(series, lengths)\n",
        )
    ],
    "accumulation": [
        (
            "    for series, lengths, labels in loader:",
            "    for number, (series, lengths, labels) in enumerate(loader):",
        ),
        (
            "        optimizer.zero_grad()\n        loss.backward()\n        optimizer.step()\n",
            "        if number % 2 == 0:\n"
            "            with model.no_sync():\n"
            "                loss.backward()\n"
            "        else:\n"
            "            loss.backward()\n"
            "            optimizer.step()\n"
            "            optimizer.zero_grad()\n",
        ),
    ],
    "augmentation by index": [
        (
            ITEM,
            "with paceline.seeded(index):\n"
            "            series = self.data[index]\n"
            "            return series + torch.randn(1), float(series.mean() > 0)",
        ),
    ],
    "a frozen part, and an average": [
        (
            WRAP,
            "model = Model()\nmodel.read.requires_grad_(False)\nmodel = session.wrap(model)\n"
            "average = torch.optim.swa_utils.AveragedModel(model.module)",
        ),
        (
            "        optimizer.step()\n",
            "        optimizer.step()\n        average.update_parameters(model.module)\n",
        ),
    ],
}


# Good to know: what samples cost may have little to do with their elements.
NOTES = {"sizes of another order"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(tmp_path: Path, fault: str) -> None:
    changes, check, says, mend = FAULTS[fault]
    code, findings = examined(tmp_path, *changes)
    named = [each for each in findings if each["check"] == check and each["level"] != "ok"]
    said = [each["says"] + each["do"] for each in named]
    assert any(says in words and mend in words for words in said), findings
    assert code == (fault not in NOTES)


@pytest.mark.parametrize("script", CLEAN)
def test_no_false_alarm(tmp_path: Path, script: str) -> None:
    code, findings = examined(tmp_path, *CLEAN[script])
    assert [each for each in findings if each["level"] == "problem"] == []
    assert code == 0
