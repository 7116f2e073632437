"""Time of a step on three nodes far apart: Paceline without a control plane, and plain DDP.

python benchmarks/latency.py [--round-trip 0.1] [--mbit 100 --width 1024] [--pairs 3] [--steps 60]

Three network namespaces, a switch that holds each frame for half the round trip, one rank each, a
small model: a step is little but round trips. With `--mbit` each node sends no faster than that,
and with `--width` the model is larger. Needs root. Prints JSON: seconds a step of each, in
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

    def __init__(self, steps: int, width: int) -> None:
        self.x = torch.randn(BATCH * steps, width, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index].sum()[None]


def rank(kind: str, steps: int, width: int) -> None:
    """Trains one epoch; rank 0 prints the seconds a step after the first ones."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = Data(steps, width)
    network_ = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
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


def measured(net: Network, kind: str, steps: int, width: int) -> float:
    """Seconds a step of one training."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    env |= {"WORLD_SIZE": str(WORLD), "MASTER_ADDR": net.address(1), "MASTER_PORT": "29511"}
    env |= {"GLOO_SOCKET_IFNAME": "eth0"}
    command = [sys.executable, __file__, "--rank", kind, "--steps", str(steps)]
    command += ["--width", str(width)]
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


def slow_down(net: Network, mbit: float) -> None:
    """Lets each node send so many Mbit/s and no more."""
    words = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{mbit}mbit"]
    for node in range(1, WORLD + 1):
        limit = net.command(node, [*words, "burst", "64kb", "latency", "400ms"])
        subprocess.run(limit, check=True)


def main() -> None:
    """Measures, and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--round-trip", type=float, default=0.1, help="seconds")
    parser.add_argument("--mbit", type=float, default=0.0, help="of each node; 0: no limit")
    parser.add_argument("--width", type=int, default=16, help="of the model's layers")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rank", choices=("ddp", "paceline"), help="be one rank")
    options = parser.parse_args()
    if options.rank:
        rank(options.rank, options.steps, options.width)
        return
    times: dict[str, list[float]] = {"ddp": [], "paceline": []}
    with network(WORLD, options.round_trip / 2) as net:
        if options.mbit:
            slow_down(net, options.mbit)
        for _ in range(options.pairs):
            for kind, measurements in times.items():
                measurements.append(round(measured(net, kind, options.steps, options.width), 4))
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    ratio = medians["paceline"] / medians["ddp"]
    asked = {"round_trip_s": options.round_trip, "mbit": options.mbit, "width": options.width}
    answer = {**asked, "step_s": times, "ratio": round(ratio, 3)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
