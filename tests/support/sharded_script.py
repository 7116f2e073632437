"""A training script whose data lives on nodes.

python sharded_script.py DIRECTORY EPOCHS URL LIMIT BANDWIDTH SLOW: the data is at URL, with samples
as `LENGTHS` says; each node keeps LIMIT bytes in DIRECTORY/shard-NODE; a sample takes its size in
ms. From epoch SLOW on rank 0 takes three times as long, and before it the last rank does. It saves
checkpoints in DIRECTORY/checkpoints, and ends with the epoch in which DIRECTORY/enough appears.
Each sample that a rank decodes is checked.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paceline

SAMPLES, BATCH = 240, 12
SIZES = np.random.default_rng(5).lognormal(2.3, 0.5, SAMPLES)  # ms of a sample
LENGTHS = np.random.default_rng(6).integers(4_000, 12_000, SAMPLES)  # bytes of it
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])


def content(index: int) -> bytes:
    return index.to_bytes(4, "little") + bytes(int(LENGTHS[index]) - 4)


def decode(data: bytes, index: int) -> tuple[Tensor, float]:
    assert data == content(index), f"sample {index} is broken"
    x = torch.randn(5, generator=torch.Generator().manual_seed(index))
    return x, float(SIZES[index])


def main() -> None:
    directory, epochs, url = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    limit, bandwidth, slow = int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    placement = json.loads(os.environ["PACELINE_PLACEMENT"])
    data = paceline.data.Sharded(
        paceline.data.Ranges(url, OFFSETS),
        directory=directory / f"shard-{placement[dist.get_rank()]}",
        limit_bytes=limit,
        bandwidth=bandwidth,
        decode=decode,
    )
    session = paceline.Session(data, sizes=SIZES, global_batch=BATCH, seed=4)
    model = session.wrap(nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loader = session.loader()
    session.checkpoint(str(directory / "checkpoints"), model, optimizer, every_steps=4)
    for epoch in session.epochs(epochs):
        slowest = 0 if epoch >= slow else session.world - 1
        slowness = 3e-3 if session.rank == slowest else 1e-3
        for x, ms in loader:
            optimizer.zero_grad()
            if not session.batch.empty:
                time.sleep(slowness * float(ms.sum()))
            mse_loss(model(x), x.sum(1, keepdim=True)).backward()
            optimizer.step()
        enough = [(directory / "enough").exists()]
        dist.broadcast_object_list(enough)
        if enough[0]:
            break
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
