"""A script in steps of a token budget, on ranks whose memory is bounded and runs out.

python memory_script.py DIRECTORY ROOM MICRO: ROOM is JSON, for each rank how many size units fit
into its memory, or null; MICRO is 1 for micro-batches, else 0. A size unit takes 32 MiB, which are
asked for and not written. Memory runs out in PyTorch's own allocator, as the operating system
refuses more. Each rank writes a line of JSON for each turn to DIRECTORY/turns-RANK, [attempt,
epoch, step, samples], and at the end its parameters to DIRECTORY/end-RANK.pt.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import paceline

sys.path.append(str(Path(__file__).parents[1]))
from support.sessions import Sized, network, parameters

SAMPLES, BUDGET, EPOCHS, SEED = 40, 14.0, 3, 5
_UNIT = 32 << 20  # bytes: other threads, as of checkpoints, take and give less meanwhile
_MMAP_THRESHOLD = -3  # of malloc.h
_PAGES = Path("/proc/self/statm")


@contextmanager
def bounded(room: float | None) -> Iterator[None]:
    """Within it this process gets memory for so many size units, and half of one."""
    if room is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(_PAGES.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + int((room + 0.5) * _UNIT), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def activations(sizes: Tensor) -> list[Tensor]:
    return [torch.empty(int(size), _UNIT, dtype=torch.int8) for size in sizes]


def train(directory: Path, rooms: list[float | None], micro_batches: bool) -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    data = Sized(SAMPLES)
    session = paceline.Session(
        data, token_budget=BUDGET, seed=SEED, micro_batches=micro_batches, loss_mean="size"
    )
    model = session.wrap(network().double())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    loader, sizes = session.loader(), torch.tensor(data.sizes).double()
    session.checkpoint(directory / "checkpoints", model, optimizer, every_steps=2)
    with (directory / f"turns-{session.rank}").open("a", buffering=1) as file:
        for _ in session.epochs(EPOCHS):
            for indices, x, y in loader:
                batch, weight = session.batch, sizes[indices]
                with bounded(rooms[session.rank]):
                    held = activations(weight)
                    each = (model(x.double()) - y.double()).square().squeeze(1)
                optimizer.zero_grad()
                ((each * weight).sum() / weight.sum()).backward()
                optimizer.step()
                del held
                used = [] if batch.empty else indices.tolist()
                file.write(json.dumps([attempt, batch.epoch, batch.step, used]) + "\n")
    torch.save(parameters(model), directory / f"end-{session.rank}.pt")
    session.close()


def main() -> None:
    torch.set_num_threads(1)
    # What is freed goes back to the system, and does not serve the next batch.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3] == "1")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
