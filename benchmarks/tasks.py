"""Tasks of the benchmarks' trainings: real data, small enough to be learnt in seconds."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline_backend.simulator.sizes import Sizes

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "plaid"))

# Number of points of a recording, or of frames of a video, that form one step of an LSTM.
FRAME = 20
# Standard deviation of the noise in a step of a video, as a multiple of that of the digits' pixels.
VIDEO_NOISE = 1.5

Item = tuple[Tensor, int]
# Inputs of the network, and at the end the classes, [n].
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Task:
    """Task with data, network and target.

    Args:
        samples: pairs of the network's input and a class.
        sizes: λ of each sample.
        held_out: batch for the evaluation.
        collate: creates a batch from samples.
        network: creates a network.
        batch: samples per rank and step.
        target: held-out loss to reach.
    """

    samples: list[Item]
    sizes: list[int]
    held_out: Batch
    collate: Callable[[list[Any]], Batch]
    network: Callable[[], nn.Module]
    batch: int
    target: float


class Epoch(Dataset[Item]):
    """Data set as long as a training: a task's samples, repeated."""

    def __init__(self, task: Task, count: int) -> None:
        self._samples = task.samples
        self.sizes = [task.sizes[k % len(task.sizes)] for k in range(count)]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Item:
        return self._samples[index % len(self._samples)]


def _stacked(items: list[Item]) -> Batch:
    return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])


def _digits() -> Task:
    """Return scikit-learn's handwritten digits: two thirds to learn, one third held out."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1)
    images = (images - images.mean()) / images.std()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, classes = images[order], torch.tensor(digits.target)[order]
    cut = len(images) * 2 // 3
    samples = list(zip(images[:cut], classes[:cut].tolist(), strict=True))
    return Task(
        samples,
        [1] * len(samples),
        (images[cut:], classes[cut:]),
        _stacked,
        lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        batch=8,
        target=0.4,
    )


def _wide_digits() -> Task:
    """Return `_digits` with a network of 1.1 million parameters."""

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        )

    return replace(_digits(), network=network)


class SeriesLSTM(nn.Module):
    """LSTM over a series' frames, followed by the mean and the maximum of its states."""

    def __init__(self, classes: int, width: int = 32) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2 * FRAME, width, batch_first=True)
        self.norm = nn.LayerNorm(2 * width + 2)
        self.head = nn.Linear(2 * width + 2, classes)

    def forward(self, series: Tensor, lengths: Tensor) -> Tensor:
        """Return logits [n, classes] of padded series [n, points] with lengths [n]."""
        series = nn.functional.pad(series, (0, -series.shape[1] % FRAME))
        peak = series.abs().amax(1, keepdim=True).clamp_min(1e-4)
        mean = series.sum(1, keepdim=True) / lengths[:, None]
        # An appliance is recognised by the shape of its current (scaled to peak 1) and by the
        # strength of the current.
        kinds = [x.unflatten(1, (-1, FRAME)) for x in (series / peak, torch.asinh(series))]
        states, _ = self.lstm(torch.cat(kinds, 2))
        inside = (torch.arange(states.shape[1]) * FRAME < lengths[:, None])[:, :, None]
        pooled = [
            (states * inside).sum(1) / inside.sum(1),
            states.masked_fill(~inside, -1).amax(1),
            peak.log() / 3,
            torch.asinh(mean),
        ]
        logits: Tensor = self.head(self.norm(torch.cat(pooled, 1)))
        return logits


def _plaid() -> Task:
    """Return PLAID's recordings, of 100 to 1,344 points, for an LSTM."""
    from data import CLASSES, Plaid, collate

    data, held_out = Plaid(train=True), Plaid(train=False)
    return Task(
        data.items,
        data.sizes,
        collate(held_out.items),
        collate,
        lambda: SeriesLSTM(CLASSES),
        batch=4,
        target=1.6,
    )


def ucf101(samples: int) -> Sizes:
    """Return lengths, in frames, that are distributed as those of UCF101's videos (RNA, Fig. 2)."""
    return Sizes("lognormal", samples=samples, mean=186.0, dif=97.7, min=29.0, max=1776.0)


class VideoLSTM(nn.Module):
    """LSTM over a video's frames, followed by the mean of its states."""

    def __init__(self, features: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, videos: Tensor, lengths: Tensor) -> Tensor:
        """Return logits [n, classes] of padded videos [n, steps, features] with lengths [n]."""
        states, _ = self.lstm(videos)
        inside = (torch.arange(states.shape[1]) < lengths[:, None])[:, :, None]
        logits: Tensor = self.head(self.norm((states * inside).sum(1) / lengths[:, None]))
        return logits


def _padded(items: list[Item]) -> Batch:
    videos = nn.utils.rnn.pad_sequence([video for video, _ in items], batch_first=True)
    lengths = torch.tensor([len(video) for video, _ in items])
    return videos, lengths, torch.tensor([label for _, label in items])


def _videos() -> Task:
    """Return videos of scikit-learn's digits for an LSTM, with lengths like UCF101's.

    A video shows a digit with noise. A step of the LSTM reads the mean of `FRAME` frames.
    """
    digits = _digits()
    images, classes = digits.held_out
    generator = torch.Generator().manual_seed(0)

    def videos(items: list[Item], seed: int) -> tuple[list[Item], list[int]]:
        sizes = [round(size) for size in ucf101(len(items)).draw(seed).tolist()]
        steps = [math.ceil(size / FRAME) for size in sizes]
        noise = [torch.randn(count, 64, generator=generator) for count in steps]
        shown = [
            (image + VIDEO_NOISE * each, label)
            for (image, label), each in zip(items, noise, strict=True)
        ]
        return shown, sizes

    samples, sizes = videos(digits.samples, 0)
    held_out, _ = videos(list(zip(images, classes.tolist(), strict=True)), 1)
    return Task(
        samples, sizes, _padded(held_out), _padded, lambda: VideoLSTM(64, 10), batch=4, target=0.6
    )


def _long_digits() -> Task:
    # Reached after 2,000 steps of 32 samples at a learning rate of 0.02.
    return replace(_digits(), target=0.11)


def _long_plaid() -> Task:
    # Reached after 2,000 steps of 16 samples at a learning rate of 0.015.
    return replace(_plaid(), target=0.9)


@cache
def task_of(name: str) -> Task:
    """Return the task of this name, whose data is read once per process, or raise KeyError."""
    tasks = {
        "digits": _digits,
        "wide digits": _wide_digits,
        "long digits": _long_digits,
        "plaid": _plaid,
        "videos": _videos,
        "long plaid": _long_plaid,
    }
    return tasks[name]()
