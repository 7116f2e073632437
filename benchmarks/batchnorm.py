"""What BatchNorm over the global batch costs a step, beside each rank's own under DDP.

Two real ranks train a residual network with 20 BatchNorm layers on made-up images. One model has
layers that ``session.wrap(model, batchnorm="sync")`` synchronises, the other is wrapped by torch's
DistributedDataParallel. Both make a step on the same images, in pairs and in random order, so that
what else the machine does meets both alike. With ``--device cuda`` the other model has torch's
SyncBatchNorm, which needs a GPU; on the CPU it has plain BatchNorm, which does not communicate.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from harness import Check, finish, parser
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.nn.parallel import DistributedDataParallel

from paceline.train import ddp
from paceline.train.norms.layers import adapt
from paceline.train.parts import Step
from paceline.train.timing import CpuClock, CudaClock, RunningStep

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.ranks import Ranks

WORLD, CLASSES, WARM = 2, 10, 3
BOUND = {"cpu": 1.35, "cuda": 1.1}  # of a step's time over the other's


class Block(nn.Module):
    """A residual block: three BatchNorm layers."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.last = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.around = nn.Conv2d(channels, out, 1, stride, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(out) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        inner = self.last(relu(self.norms[0](self.first(x))))
        return relu(self.norms[1](inner) + self.norms[2](self.around(x)))


def network() -> nn.Module:
    """A small ResNet for images of 32 × 32."""
    torch.manual_seed(1)
    widths = [(32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        *(Block(*width) for width in widths),
        nn.BatchNorm2d(128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


def measure(pairs: int, batch: int, device: str) -> list[tuple[float, float]]:
    """Times of a step, s: with synchronised layers, and of the other model; of each pair."""
    current = ddp.CurrentStep(dist.get_world_size())
    ours = network().to(device)
    adapt(ours, "sync", current)
    other = network().to(device)
    if device == "cuda":
        other = nn.SyncBatchNorm.convert_sync_batchnorm(other)
    models = [ddp.WeightedDDP(ours, current), DistributedDataParallel(other)]
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(batch, 3, 32, 32, generator=generator).to(device)
    y = torch.randint(CLASSES, (batch,), generator=generator).to(device)
    clock = CudaClock(x.device) if device == "cuda" else CpuClock()
    part = Step(0, 0, 0, list(range(batch)), 1.0, 1.0, 1.0, 1 / dist.get_world_size(), None, 0)

    def step(model: nn.Module) -> float:
        dist.barrier()
        current.running = RunningStep(part, clock, 0.0, None)
        began = time.perf_counter()
        cross_entropy(model(x), y).backward()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    shuffled = random.Random(1)  # the same on all ranks
    times: list[tuple[float, float]] = []
    for pair in range(WARM + pairs):
        order = shuffled.sample((0, 1), 2)
        took = {which: step(models[which]) for which in order}
        if pair >= WARM:
            times.append((took[0], took[1]))
    return times


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % of medians of resampled pairs."""
    drawn = np.random.default_rng(1).choice(ratios, (2000, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)


def main() -> None:
    """Runs the benchmark."""
    made: argparse.ArgumentParser = parser(__doc__)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = made.parse_args()
    pairs, batch = (12, 8) if options.quick else (100, 32)
    on_gpu = options.device == "cuda"
    ranks = Ranks(WORLD, start="spawn" if on_gpu else "forkserver")
    try:
        every = ranks.run(partial(measure, pairs, batch, options.device), timeout_s=600)
    finally:
        ranks.stop()
    # A step ends when the slower rank is through.
    ours, other = (
        [max(times[pair][which] for times in every) for pair in range(pairs)] for which in (0, 1)
    )
    ratios = [a / b for a, b in zip(ours, other, strict=True)]
    low, high = interval(ratios)
    name = "torch's SyncBatchNorm" if on_gpu else "BatchNorm"
    results = {
        "synchronised_s": statistics.median(ours),
        "other_s": statistics.median(other),
        "ratio": statistics.median(ratios),
        "interval_95": [low, high],
        "layers": sum(isinstance(layer, nn.BatchNorm2d) for layer in network().modules()),
    }
    bound = BOUND[options.device]
    checks = [Check(f"a step over that with {name} under DDP", results["ratio"], bound, "<=")]
    table = (
        f"step with synchronised layers {1e3 * results['synchronised_s']:.1f} ms, with {name} "
        f"{1e3 * results['other_s']:.1f} ms: {results['ratio']:.3f} ({low:.3f} to {high:.3f})"
    )
    config = {"ranks": WORLD, "batch": batch, "pairs": pairs, "device": options.device}
    finish(options, config, results, checks, table)


if __name__ == "__main__":
    main()
