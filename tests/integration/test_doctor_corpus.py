"""`paceline doctor` on scripts that people write: what it finds wrong, and where it is silent.

Each case is one script, with one change or none.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.node import paceline
from support.waiting import TRAINING_S

pytestmark = pytest.mark.ranks

SCRIPT = """
import copy, os, random
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset
import paceline

torch.set_num_threads(1)

class Data(Dataset):
    def __init__(self):
        draw = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(4, 60, (512,), generator=draw).tolist()
        self.series = [torch.randn(length, 8, generator=draw) for length in self.lengths]

    def __len__(self):
        return len(self.series)

    def __getitem__(self, index):
        series = self.series[index]
        return series, int(series.mean() > 0)

def collate(samples):
    series, labels = zip(*samples)
    lengths = torch.tensor([len(each) for each in series])
    return pad_sequence(series, batch_first=True), lengths, torch.tensor(labels)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(8, 16)
        self.answer = nn.Linear(16, 2)

    def forward(self, series, lengths):
        mask = (torch.arange(series.shape[1]) < lengths[:, None])[..., None]
        made = torch.tanh(self.read(series)) * mask
        return self.answer(made.sum(1) / lengths[:, None])

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    data = Data()
    session = paceline.Session(data, sizes=data.lengths, global_batch=64)
    loader = session.loader(collate_fn=collate)
    model = session.wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    session.checkpoint("checkpoints", model, optimizer, every_steps=50)
    for _ in session.epochs(3):
        for series, lengths, labels in loader:
            loss = cross_entropy(model(series, lengths), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    session.close()
    dist.destroy_process_group()

main()
"""
Change = tuple[str, str]  # a part of the script, and what stands in its place
MODEL = "model = session.wrap(Net())\n"
LOSS = "loss = cross_entropy(model(series, lengths), labels)\n"
TEACHER: list[Change] = [
    (MODEL, MODEL + "    teacher = copy.deepcopy(model.module).eval().requires_grad_(False)\n"),
    (
        LOSS,
        "soft = teacher(series, lengths).softmax(1)\n            "
        "loss = cross_entropy(model(series, lengths), soft)\n            "
        "torch.save(model.module, f'model-{dist.get_rank()}.pt')\n",
    ),
]
STREAM: list[Change] = [
    ("(data, sizes=data.lengths,", "(stream,"),
    (
        "    session = ",
        "    stream = paceline.data.Stream(\n"
        "        [data[index] for index in range(512)], size=lambda s: len(s[0]), split='none',\n"
        "        buffer=256,\n    )\n    session = ",
    ),
    ('    session.checkpoint("checkpoints", model, optimizer, every_steps=50)\n', ""),
]
PACKED: list[Change] = [
    ("global_batch=64", "token_budget=2048"),
    ("collate_fn=collate", "collate_fn=paceline.packed"),
    ("return series, int(series.mean() > 0)", "return series, (series.mean(1) > 0).long()"),
    ("for series, lengths, labels in loader", "for batch in loader"),
    ("model(series, lengths), labels", "model(batch.values[0]), batch.values[1]"),
    ("def forward(self, series, lengths)", "def forward(self, series)"),
    (
        "        mask = (torch.arange(series.shape[1]) < lengths[:, None])[..., None]\n"
        "        made = torch.tanh(self.read(series)) * mask\n"
        "        return self.answer(made.sum(1) / lengths[:, None])\n",
        "        return self.answer(torch.tanh(self.read(series)))\n",
    ),
]


def examined(folder: Path, changes: list[Change]) -> list[tuple[str, str, str]]:
    """What the doctor finds that is not "ok": check, level, and what it says and advises."""
    script = SCRIPT
    for part, instead in changes:
        assert part in script, part
        script = script.replace(part, instead)
    (path := folder / "train.py").write_text(script)
    process = paceline("doctor", "--json", "--timeout", "120", str(path), cwd=folder)
    out, err = process.communicate(timeout=TRAINING_S)
    assert "Traceback" not in err, err
    findings = json.loads(out)["findings"]
    assert process.returncode == any(each["level"] == "problem" for each in findings)
    return [
        (each["check"], each["level"], f"{each['says']} {each['do']}")
        for each in findings
        if each["level"] != "ok"
    ]


@pytest.mark.parametrize("changes", [PACKED, TEACHER], ids=["packed", "teacher"])
def test_it_is_silent_where_nothing_is_wrong(tmp_path: Path, changes: list[Change]) -> None:
    assert examined(tmp_path, changes) == []


def test_a_loss_is_proven_although_a_run_could_not(tmp_path: Path) -> None:
    """With limits a run proves it before its first step, and may not run a line that counts."""
    changes = [
        ("global_batch=64", "global_batch=64, limits=[24, 64]"),
        (LOSS, "data.turns = getattr(data, 'turns', 0) + 1\n            " + LOSS),
    ]
    assert "loss" not in {check for check, *_ in examined(tmp_path, changes)}


def test_a_stream_has_checkpoints_of_its_own(tmp_path: Path) -> None:
    loss, checkpoint = examined(tmp_path, STREAM)
    assert loss[:2] == ("loss", "note")
    assert checkpoint[:2] == ("checkpoint", "note")
    assert "save session.state_dict()" in checkpoint[2]


@pytest.mark.parametrize(
    ("changes", "wanted", "says"),
    [
        (
            [*PACKED, ("torch.tanh(self.read(series))", "self.read(series).cumsum(0)")],
            [("loss", "problem")],
            "let no packed sequence attend to another",
        ),
        (
            [("self.read(series)", "self.read(series + 0.1 * torch.randn_like(series))")],
            [("loss", "note"), ("random numbers", "note")],
            "draws random numbers",
        ),
    ],
    ids=["packed-mixed", "noise"],
)
def test_a_fault_is_named(
    tmp_path: Path, changes: list[Change], wanted: list[tuple[str, str]], says: str
) -> None:
    findings = examined(tmp_path, changes)
    assert [each[:2] for each in findings] == wanted, findings
    assert says in findings[0][2]
