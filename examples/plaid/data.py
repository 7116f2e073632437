"""The PLAID appliance recordings that sktime ships: 1,074 series, 11 classes.

Plug Load Appliance Identification Dataset, J. Gao et al. (2014). The data is read from the
installed sktime package; nothing is downloaded. A sample's size is its number of points, 100 to
1,344.
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

CLASSES = 11


def _read(path: Path) -> list[tuple[torch.Tensor, int]]:
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "@#":
            values, label = line.rsplit(":", 1)
            rows.append((torch.tensor([float(v) for v in values.split(",")]), int(label)))
    return rows


class Plaid(Dataset):
    """One part of a random 80:20 split; items are (series [points], class)."""

    def __init__(self, train: bool, seed: int = 0) -> None:
        spec = find_spec("sktime")
        if spec is None or spec.origin is None:
            raise SystemExit("this example reads PLAID from sktime: pip install 'paceline[demo]'")
        folder = Path(spec.origin).parent / "datasets" / "data" / "PLAID"
        rows = _read(folder / "PLAID_TRAIN.ts") + _read(folder / "PLAID_TEST.ts")
        order = np.random.default_rng(seed).permutation(len(rows))
        cut = len(rows) * 4 // 5
        self.items = [rows[i] for i in (order[:cut] if train else order[cut:])]
        self.sizes = [len(series) for series, _ in self.items]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.items[index]


def collate(
    items: list[tuple[torch.Tensor, int]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pads to the longest: series [n, longest], lengths [n], classes [n]."""
    series = torch.nn.utils.rnn.pad_sequence([s for s, _ in items], batch_first=True)
    lengths = torch.tensor([len(s) for s, _ in items])
    return series, lengths, torch.tensor([label for _, label in items])
