"""The training of `mixed.py`: a rank for each GPU of the node, and further ranks on the CPU."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paceline

GLOBAL_BATCH = 256
POINTS, WIDTH, CLASSES, SAMPLES = 512, 32, 8, 8192


class Series(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Noisy sines of one length, to be told apart by their frequency."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        label = index % CLASSES
        generator = torch.Generator().manual_seed(index)
        phase = torch.arange(POINTS) * (0.02 * (1 + label))
        return (phase.sin() + torch.randn(POINTS, generator=generator))[None], torch.tensor(label)

    def __len__(self) -> int:
        return SAMPLES


def network() -> nn.Module:
    """[B, 1, POINTS] → [B, CLASSES]."""
    layers = [nn.Conv1d(1, WIDTH, 9, padding=4), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv1d(WIDTH, WIDTH, 9, padding=4), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(WIDTH, CLASSES))


def main() -> None:
    """Trains until the run is stopped."""
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = local < torch.cuda.device_count()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    torch.set_num_threads(int(os.environ.get("MIXED_THREADS", "1")))
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    session = paceline.Session(Series(), global_batch=GLOBAL_BATCH)
    loader = session.loader(num_workers=2, pin_memory=on_gpu)
    model = session.wrap(network().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in session.epochs(1000):
        for series, labels in loader:
            series, labels = series.to(device, non_blocking=True), labels.to(device)
            loss = cross_entropy(model(series), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
