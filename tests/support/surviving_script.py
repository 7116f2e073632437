"""A training script whose ranks end themselves by SIGKILL, and that goes on from checkpoints.

python surviving_script.py DIRECTORY KILLS: KILLS is JSON, for each attempt [step, ranks, where].
``where`` is "body", or "saving": after a checkpoint is written, before it is whole. Each rank
writes a line of JSON for each step to DIRECTORY/steps-RANK, [attempt, epoch, step, samples], and at
the end its parameters, the learning rate and the scale to DIRECTORY/end-RANK.pt.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paceline
from paceline.train.checkpoint.saver import Folder

sys.path.append(str(Path(__file__).parents[1]))
from support.waiting import until

SAMPLES, BATCH, EPOCHS, EVERY = 22, 4, 3, 3
STEPS = EPOCHS * -(-SAMPLES // BATCH)

Kill = tuple[int, list[int], str]


class Data(torch.utils.data.Dataset[tuple[int, Tensor, Tensor]]):
    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.x[index].sum(0, keepdim=True)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(directory: Path, kill: Kill, attempt: int) -> None:
    torch.manual_seed(3)  # dropout then differs between ranks, as their batches do
    session = paceline.Session(Data(), global_batch=BATCH, seed=4)
    network = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 1))
    model = session.wrap(network)
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), 0.02))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS + 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    loader = session.loader()
    session.checkpoint(
        directory / "checkpoints", model, optimizer, schedule, scaler, every_steps=EVERY
    )
    step, ranks, where = kill
    dies = session.rank in ranks
    with (directory / f"steps-{session.rank}").open("a", buffering=1) as file:
        for _ in session.epochs(EPOCHS):
            for indices, x, y in loader:
                batch = session.batch
                if dies and batch.step == step:
                    if where == "body":
                        whole = directory / "checkpoints" / f"step-{step // EVERY * EVERY:09}"
                        until(whole.exists, "the checkpoint that is being written", 120)
                        die()
                    mock.patch.object(Folder, "finish", lambda *_: die()).start()
                used = [] if batch.empty else indices.tolist()
                optimizer.zero_grad()
                scaler.scale(mse_loss(model(x), y)).backward()
                scaler.step(optimizer)
                scaler.update()
                schedule.step()
                file.write(json.dumps([attempt, batch.epoch, batch.step, used]) + "\n")
    end: dict[str, Any] = {"scale": scaler.get_scale(), "lr": schedule.get_last_lr()}
    parameters = [p.detach() for p in network.parameters()]
    torch.save({**end, "parameters": parameters}, directory / f"end-{session.rank}.pt")
    session.close()


def main() -> None:
    directory, kills = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    train(directory, kills[attempt] if attempt < len(kills) else (-1, [], ""), attempt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
