"""A script that trains a network split over groups of two ranks, until it is told that it suffices.

Arguments: a folder. Each process writes what it trained to ``<rank>.json``: the samples of each
step. Process 0 writes the parameters in the end, too. The script ends with the epoch in which the
file ``enough`` appears in the folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

import paceline
from support.fsdp import whole
from support.sessions import Sized
from support.tensor_parallel import made, mesh_of

SAMPLES, BATCH, RATE = 96, 12, 0.02


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dp, tp = mesh_of()
    session = paceline.Session(Sized(SAMPLES), global_batch=BATCH, seed=1, mesh=dp)
    loader = session.loader()
    model = session.wrap(made(dp, tp))
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    seen = []
    for _ in session.epochs(10_000):
        for indices, x, y in loader:
            loss = mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            seen.append([] if session.batch.empty else indices.tolist())
        enough = [(folder / "enough").exists()]
        dist.broadcast_object_list(enough)
        if enough[0]:
            break
    final = torch.cat([whole(p).flatten() for p in model.parameters()])
    rank = dist.get_rank()
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    if rank == 0:
        torch.save(final, folder / "final.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
