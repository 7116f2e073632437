"""A loop as torchtitan's, with Paceline: a config, FSDP2, accumulation, distributed checkpoints.

With --plain, the same without Paceline.

paceline run --nproc 2 examples/frameworks/like_torchtitan.py
"""

import argparse
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import paceline
from text import Classifier, Sentences, collate


@dataclass
class Config:
    steps: int = 60
    local_batch: int = 8  # samples of each rank in each batch, without Paceline
    accumulate: int = 2  # batches of a step
    rate: float = 3e-3
    max_norm: float = 1.0
    plain: bool = False
    folder: str = ""  # of checkpoints
    interval: int = 20  # steps between two of them


class Trainer:
    """Model, optimiser, schedule and data of a training.

    Args:
        config: of the training.
        **options: of the session.
    """

    def __init__(self, config: Config, **options: Any) -> None:
        self.config, self.step = config, 0
        self.data, world = Sentences(640), dist.get_world_size()
        torch.manual_seed(1)
        self.model = Classifier()
        for part in (self.model.embedding, self.model.word, self.model):
            fully_shard(part)
        if not config.plain:
            self.session = paceline.Session(
                self.data, global_batch=config.local_batch * world, drop_last=True, **options
            )
            self.loader = self.session.loader(collate_fn=collate)
            self.session.wrap(self.model)  # stays the same object
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.rate)
        self.schedule = torch.optim.lr_scheduler.LinearLR(
            self.optimizer, 1.0, 0.1, total_iters=config.steps
        )

    def train(self, steps: int | None = None) -> list[float]:
        """Trains to the last step, or to an earlier one; the gradients' norm in each step."""
        batches = self.batches()
        norms = []
        while self.step < (self.config.steps if steps is None else steps):
            norms.append(self.train_step(batches))
            if self.config.folder and self.step % self.config.interval == 0:
                self.save(f"{self.config.folder}/{self.step}")
        return norms

    def train_step(self, batches: Iterator[dict[str, Tensor]]) -> float:
        config = self.config
        self.optimizer.zero_grad()
        for number in range(config.accumulate):
            batch = next(batches)
            labels = batch.pop("labels")
            self.model.set_requires_gradient_sync(number == config.accumulate - 1)
            loss = cross_entropy(self.model(**batch), labels)
            (loss / config.accumulate).backward()
            if not config.plain:
                self.session.log(loss=loss)
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), config.max_norm)
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        return float(norm.full_tensor())

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Epoch after epoch, without an end."""
        if not self.config.plain:
            while True:
                yield from self.loader
        sampler = DistributedSampler(self.data, drop_last=True)
        loader = DataLoader(
            self.data, self.config.local_batch, sampler=sampler, collate_fn=collate, drop_last=True
        )
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    def states(self) -> dict[str, Any]:
        """What a checkpoint has; all ranks call it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        # Only rank 0 knows what all ranks have used. Bytes, because its size grows with an epoch.
        box = [pickle.dumps(self.session.state_dict())]
        dist.broadcast_object_list(box, src=0)
        rest = {"schedule": self.schedule.state_dict(), "step": self.step, "dataloader": box[0]}
        return {"model": model, "optimizer": optimizer, **rest}

    def save(self, folder: str) -> None:
        dcp.save(self.states(), checkpoint_id=folder)

    def load(self, folder: str) -> None:
        states = self.states()
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
        )
        self.schedule.load_state_dict(states["schedule"])
        self.step = states["step"]
        self.session.load_state_dict(pickle.loads(states["dataloader"]))

    @torch.no_grad()
    def loss(self) -> float:
        """Of all samples; all ranks call it."""
        batch = collate([self.data[k] for k in range(len(self.data))])
        labels = batch.pop("labels")
        return float(cross_entropy(self.model(**batch), labels))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", default="", help="for checkpoints, which --plain has none of")
    parser.add_argument("--load", help="go on from this checkpoint")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    trainer = Trainer(Config(steps=options.steps, plain=options.plain, folder=options.folder))
    if options.load:
        trainer.load(options.load)
    trainer.train()
    loss = trainer.loss()
    if dist.get_rank() == 0:
        print(f"loss of all samples {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
