"""Time of a step on three nodes far apart: Paceline without a control plane, and plain DDP.

python benchmarks/latency.py [--round-trip 0.1] [--pairs 3] [--steps 60]

Three network namespaces, a switch that holds each frame for half the round trip, one rank each, a
small model: a step is little but round trips. Needs root. Prints JSON: seconds a step of each, in
interleaved pairs, and the medians' ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import paceline

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.network import Network, network

WORLD, BATCH = 3, 12
WARM_STEPS = 10


class Data(Dataset[tuple[Tensor, Tensor]]):
    """As many samples as the steps need."""

    def __init__(self, steps: int) -> None:
        self.x = torch.randn(BATCH * steps, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index].sum()[None]


def rank(kind: str, steps: int) -> None:
    """Trains one epoch; rank 0 prints the seconds a step after the first ones."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data, network_ = Data(steps), nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    if kind == "ddp":
        model: nn.Module = nn.parallel.DistributedDataParallel(network_)
        sampler = DistributedSampler(data)
        loader = iter(DataLoader(data, batch_size=BATCH // WORLD, sampler=sampler))
        _train(model, loader)
    else:
        session = paceline.Session(data, global_batch=BATCH)
        model = session.wrap(network_)
        batches = session.loader()
        for _ in session.epochs(1):
            _train(model, iter(batches))
        session.close()
    dist.destroy_process_group()


def _train(model: nn.Module, loader: object) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    began, count = 0.0, 0
    for x, y in loader:  # type: ignore[attr-defined]
        if count == WARM_STEPS:
            began = time.perf_counter()
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        count += 1
    if dist.get_rank() == 0:
        print((time.perf_counter() - began) / (count - WARM_STEPS))


def measured(net: Network, kind: str, steps: int) -> float:
    """Seconds a step of one training."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    env |= {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": net.address(1), "MASTER_PORT": "29511"}
    env |= {"GLOO_SOCKET_IFNAME": "eth0"}
    command = [sys.executable, __file__, "--rank", kind, "--steps", str(steps)]
    ranks = [
        subprocess.Popen(
            net.command(index + 1, command),
            env={**env, "RANK": str(index)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(WORLD)
    ]
    said = [each.communicate(timeout=600)[0] for each in ranks]
    if any(each.returncode for each in ranks):
        raise SystemExit(f"a rank of {kind} failed")
    return float(said[0])


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--round-trip", type=float, default=0.1, help="seconds")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", choices=("ddp", "paceline"), help="be one rank")
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.steps)
        return
    times: dict[str, list[float]] = {"ddp": [], "paceline": []}
    with network(WORLD, options.round_trip / 2) as net:
        for _ in range(options.pairs):
            for kind, measurements in times.items():
                measurements.append(round(measured(net, kind, options.steps), 4))
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    ratio = medians["paceline"] / medians["ddp"]
    answer = {"round_trip_s": options.round_trip, "step_s": times, "ratio": round(ratio, 3)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
