"""A training script that tells each epoch what its replica is.

python relaxed_script.py DIRECTORY: trains until DIRECTORY/enough exists, then to its epoch's end.
Each rank writes a line of JSON for each epoch to DIRECTORY/replicas-RANK: [epoch, hash, mean loss].
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

import paceline
from support.chain_script import CLASSES, GLOBAL_BATCH, WIDTH, Digits


def replica(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors = [*model.state_dict().values()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if torch.is_tensor(value)]
    raw = b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(raw).hexdigest()


def train(directory: Path, *, uneven: bool) -> None:
    data = Digits()
    session = paceline.Session(data, global_batch=GLOBAL_BATCH, seed=4, uneven_steps=uneven)
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    model: Any = session.wrap(network)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    loader = session.loader()
    with (directory / f"replicas-{session.rank}").open("w") as file:
        for epoch in session.epochs(100_000):
            losses = []
            for _, x, classes in loader:
                optimizer.zero_grad()
                loss = cross_entropy(model(x), classes)
                loss.backward()
                optimizer.step()
                schedule.step()
                session.log(loss=loss)
                losses.append(float(loss.detach()))
            mean = sum(losses) / max(1, len(losses))  # a slow rank may have had no turn
            file.write(json.dumps([epoch, replica(network, optimizer), mean]) + "\n")
            enough = [(directory / "enough").exists()]
            dist.broadcast_object_list(enough)
            if enough[0]:
                break
    session.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), uneven="uneven" in sys.argv[2:])
    dist.destroy_process_group()
