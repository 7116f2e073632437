"""A script that trains a small residual network with BatchNorm, and writes what it trained on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

import paceline

SAMPLES, BATCH, EPOCHS = 240, 12, 10
STEPS = EPOCHS * SAMPLES // BATCH
CLASSES = 4


class Images(torch.utils.data.Dataset[tuple[int, Tensor, int]]):
    """Made-up images, [3, 8, 8], whose brightest quadrant is their class."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.labels = torch.randint(CLASSES, (SAMPLES,), generator=generator).tolist()
        self.images = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
        for image, label in zip(self.images, self.labels, strict=True):
            row, column = divmod(label, 2)
            image[:, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] += 0.5

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, int]:
        return index, self.images[index], self.labels[index]


class Block(nn.Module):
    """Two convolutions, each with a BatchNorm, around which the input goes on."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(out)
        self.last = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.last_norm = nn.BatchNorm2d(out)
        self.around = nn.Sequential(
            nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.last_norm(self.last(relu(self.first_norm(self.first(x)))))
        return relu(inner + self.around(x))


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        Block(8, 8, 1),
        Block(8, 16, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def optimiser_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    session = paceline.Session(Images(), global_batch=BATCH)
    loader = session.loader()
    plain = network()
    model = session.wrap(plain, batchnorm="sync")
    optimiser = session.optimizer(optimiser_of(model))
    trained: list[list[int]] = []
    for _ in session.epochs(EPOCHS):
        for indices, images, labels in loader:
            optimiser.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimiser.step()
            session.log(loss=loss)
            trained.append([] if session.batch.empty else indices.tolist())
    (folder / f"{session.rank}.json").write_text(json.dumps(trained))
    torch.save(plain.state_dict(), folder / f"{session.rank}.pt")
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
