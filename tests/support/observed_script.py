"""Scripts that know nothing of Paceline, in which rank 1 is slow: its model sleeps.

python observed_script.py KIND DIRECTORY [CASE]: trains with DistributedDataParallel ("ddp"), FSDP2
("fsdp"), or as the script of a framework does. What came of it goes to a file of each rank.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SLEEP_S = 0.02
SAMPLES, BATCH, EPOCHS = 320, 8, 6


def train(kind: str) -> list[Any]:
    """The losses of all steps, and the next random numbers: any draw more would change them."""
    torch.manual_seed(1)
    random.seed(1)
    data = TensorDataset(torch.randn(SAMPLES, 6), torch.randn(SAMPLES, 1))
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    network = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Linear(16, 1))
    model: nn.Module = network
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in network:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(network)
    else:
        model = DistributedDataParallel(network)
        if kind == "compiled":
            model = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, wanted in loader:
            slow()
            loss = nn.functional.mse_loss(model(inputs), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    return [losses, torch.randn(3).tolist(), random.random()]


def slow() -> None:
    if os.environ.get("RANK") == "1":
        time.sleep(SLEEP_S)


def slow_models() -> None:
    """Lets the models of frameworks' scripts sleep, too: each has an embedding."""
    embed = nn.Embedding.forward

    def forward(self: nn.Embedding, words: torch.Tensor) -> torch.Tensor:
        if self.training:
            slow()
        return embed(self, words)

    nn.Embedding.forward = forward  # type: ignore[method-assign]


def main() -> None:
    kind, directory, *case = sys.argv[1:]
    torch.set_num_threads(1)
    if case:
        slow_models()
        sys.argv = [f"{kind}_script.py", directory, *case]
        importlib.import_module(f"support.{kind}_script").main()
        return
    dist.init_process_group("gloo")
    result = train(kind)
    Path(directory, f"{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
