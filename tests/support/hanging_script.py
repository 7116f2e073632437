"""A training that stands still in a way that its second argument names.

python hanging_script.py FOLDER WAY STEP: in this step, or where WAY says, until FOLDER/go is there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import paceline

SAMPLES, BATCH = 48, 8
FOLDER, WAY, AT = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
ATTEMPT = int(os.environ["PACELINE_ATTEMPT"])


class Data(torch.utils.data.Dataset[torch.Tensor]):
    stuck = False

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if Data.stuck:
            read_from_a_dead_disk()
        return torch.full((3,), float(index))


class SlowSchedule(torch.optim.lr_scheduler.ConstantLR):
    """Its state takes long to collect."""

    def state_dict(self) -> dict[str, Any]:
        read_from_a_dead_disk()
        return super().state_dict()


def released() -> bool:
    return (FOLDER / "go").exists()


def read_from_a_dead_disk() -> None:
    while not released():
        time.sleep(0.1)


def take_the_lock() -> None:
    lock = threading.Lock()
    lock.acquire()

    def give_it_back() -> None:
        read_from_a_dead_disk()
        lock.release()

    threading.Thread(target=give_it_back, daemon=True).start()
    with lock:
        pass


def sleep_in_user_code() -> None:
    while not released():
        time.sleep(0.1)


def evaluate() -> None:
    while not released():
        time.sleep(0.1)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    aside = dist.new_group()
    if WAY == "before the session" and rank == 1:
        evaluate()
    session = paceline.Session(Data(), global_batch=BATCH, seed=1)
    if WAY == "before wrapping" and rank == 1:
        evaluate()
    model = session.wrap(nn.Linear(3, 1))
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), 0.01))
    workers = {"num_workers": 1, "multiprocessing_context": "fork"} if WAY == "worker" else {}
    loader = session.loader(**workers)
    if WAY == "saving":
        slow = SlowSchedule(optimizer)
        session.checkpoint(FOLDER / "checkpoints", model, optimizer, slow, every_steps=AT)
    if WAY in ("resumed", "suspended, saving"):
        session.checkpoint(FOLDER / "checkpoints", model, optimizer, every_steps=2)
    Data.stuck = WAY in ("first batch", "worker") and rank == 1
    if WAY in ("before the loop", "warms up") and rank == 1:
        evaluate()
    for epoch in session.epochs(100_000):
        for x in loader:
            step = session.step
            optimizer.zero_grad()
            if step == AT:
                stand_still(rank, aside)
            model(x).mean().backward()
            optimizer.step()
            if WAY == "user code" and rank == 1 and step == AT:
                sleep_in_user_code()
            if WAY == "slow" and rank == 1:
                time.sleep(11)
            if WAY in ("loader", "loader and lock") and rank == 1 and step == AT - 1:
                Data.stuck = True
            if WAY == "resumed" and ATTEMPT == 0 and rank == 1 and step == 5:
                os._exit(7)
            time.sleep(0.05)
        if epoch == 0 and (WAY == "all evaluate" or (WAY == "one evaluates" and rank == 1)):
            evaluate()
        if WAY not in ("lock", "all evaluate", "nothing"):
            continue
        enough = [released()]
        dist.broadcast_object_list(enough)
        if enough[0]:
            break
    session.close()
    dist.destroy_process_group()


def stand_still(rank: int, aside: dist.ProcessGroup) -> None:
    """In the loop's body, before the forward pass of step `AT`."""
    first = WAY != "first attempt" or ATTEMPT == 0
    if WAY == "both" or (WAY in ("lock", "resumed", "first attempt") and rank == 1 and first):
        take_the_lock()
    if WAY == "loader and lock" and rank == 2:
        take_the_lock()
    if WAY == "collective" and rank == 0:
        dist.barrier(group=aside)
    if WAY.startswith("suspended") and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main()
