"""Clips of handwritten digits: each of scikit-learn's 1,797 drifts through 2 to 64 frames.

The digits are Optical Recognition of Handwritten Digits (E. Alpaydin and C. Kaynak, 1998), read
from the installed scikit-learn; nothing is downloaded. Frames are made of them here: the digit
bounces off the frame's edges, and there is noise. A sample's size is its number of frames.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset

CLASSES = 10
SIDE = 16  # pixels of a frame; a digit has 8
SHORTEST, LONGEST = 2, 64  # frames
NOISE = 0.2  # standard deviation; a digit's brightest pixel is 1

Item = tuple[torch.Tensor, int]


def clip(digit: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
    """Frames [frames, 1, SIDE, SIDE] of a digit [8, 8], as many as are drawn."""
    count = int(np.clip(np.exp(rng.normal(1.9, 0.9)), SHORTEST, LONGEST))
    room = SIDE - len(digit)
    start, speed = rng.uniform(0, 2 * room, 2), rng.uniform(-1.5, 1.5, 2)
    path = (start + speed * np.arange(count)[:, None]) % (2 * room)
    path = np.rint(np.minimum(path, 2 * room - path)).astype(int)  # back from the edge
    frames = rng.normal(0, NOISE, (count, 1, SIDE, SIDE))
    for frame, (row, column) in zip(frames, path, strict=True):
        frame[0, row : row + len(digit), column : column + len(digit)] += digit
    return torch.tensor(frames, dtype=torch.float32)


class Clips(Dataset[Item]):
    """One part of a random 80:20 split; items are (clip [frames, 1, SIDE, SIDE], digit)."""

    def __init__(self, train: bool) -> None:
        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.images))
        # An even number: DistributedSampler would repeat a sample for the second of two ranks.
        cut = len(order) * 4 // 5 // 2 * 2
        self.items: list[Item] = [
            (clip(digits.images[i] / 16, np.random.default_rng([1, i])), int(digits.target[i]))
            for i in (order[:cut] if train else order[cut:])
        ]
        self.sizes = [len(frames) for frames, _ in self.items]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        return self.items[index]


def collate(items: list[Item]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All frames one after the other [Σ frames, 1, SIDE, SIDE], lengths [n], digits [n].

    Nothing is padded: BatchNorm would take padded frames for pictures.
    """
    frames = torch.cat([frames for frames, _ in items])
    lengths = torch.tensor([len(frames) for frames, _ in items])
    return frames, lengths, torch.tensor([digit for _, digit in items])
