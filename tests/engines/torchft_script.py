"""A replica group of torchft, of one or more ranks, that trains with `paceline.torchft.Batches`.

Arguments: a folder; what the group is and does, as JSON. The group writes what happens to it into
the folder, line by line. It holds still at a place of a step where the test kills it, and waits
before a step until the test opens that step's gate.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from paceline.torchft import Batches
from support.torchft import BATCH, DATA, EPOCHS, SIZES, loss_of, network

_SLOWEST_S = timedelta(seconds=120)


def main(folder: Path, name: str, lighthouse: str, given: dict[str, Any]) -> None:
    rank, ranks = int(given.get("rank", 0)), int(given.get("ranks", 1))
    log = (folder / f"{name}.{rank}.{os.getpid()}.jsonl").open("w", buffering=1)

    def say(what: str, **values: Any) -> None:
        print(json.dumps({"what": what, **values}), file=log, flush=True)

    def hold(step: int, place: str) -> None:
        first, where = given.get("hold") or (None, None)
        if place == where and step >= first:
            say("holds", step=step)
            time.sleep(600)

    inner = network()
    sgd = torch.optim.SGD(inner.parameters(), lr=0.05, momentum=0.9)

    def load(state: dict[str, Any]) -> None:
        inner.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    group, port = None, None
    if ranks > 1:
        at = f"file://{folder / name}.group"
        dist.init_process_group("gloo", init_method=at, rank=rank, world_size=ranks)
        group = dist.group.WORLD
    if rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port = store.port
    if ranks > 1:
        box = [port]
        dist.broadcast_object_list(box, src=0)
        port = box[0]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_SLOWEST_S),
        load_state_dict=load,
        state_dict=lambda: {"model": inner.state_dict(), "optimizer": sgd.state_dict()},
        min_replica_size=2,
        use_async_quorum=False,
        timeout=_SLOWEST_S,
        quorum_timeout=_SLOWEST_S,
        rank=rank,
        world_size=ranks,
        store_addr="localhost",
        store_port=port,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname="localhost",
    )
    model: nn.Module = DistributedDataParallel(manager, inner)
    optimizer = Optimizer(manager, sgd)
    batches = Batches(manager, samples=len(DATA), global_batch=BATCH, sizes=SIZES, group=group)
    while batches.epoch < EPOCHS:
        gate = folder / f"gate-{manager.current_step()}"
        if manager.current_step() in given.get("gates", []) and not gate.exists():
            say("waits")
            while not gate.exists():
                time.sleep(0.02)
        say("asks")
        optimizer.zero_grad()
        batch = batches.next()
        say(
            "given",
            step=batch.step,
            quorum=manager._quorum_id,
            participants=manager.num_participants(),
            indices=batch.indices.tolist() if batch.weight else [],
            weight=batch.weight,
        )
        time.sleep(given.get("slow_s", 0.0) * sum(SIZES[i] for i in batch.indices))
        loss = batch.weigh(loss_of(model, batch.indices))
        hold(batch.step, "forward")
        loss.backward()  # type: ignore[no-untyped-call]
        if ranks > 1:
            for parameter in inner.parameters():
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
                parameter.grad /= ranks
        hold(batch.step, "backward")
        optimizer.step()
        if manager.current_step() > batch.step:
            say("committed", step=batch.step, quorum=manager._quorum_id)
        hold(batch.step, "commit")
    torch.save(inner.state_dict(), folder / f"{name}.{rank}.pt")
    say("ended")
    manager.shutdown(wait=False)
    os._exit(0)  # threads of torchft's servers may keep the process


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
