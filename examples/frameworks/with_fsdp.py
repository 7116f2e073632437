"""FSDP2 with Paceline; with --plain, FSDP2 alone. --replicas 2 shards two replicas (HSDP).

paceline run --nproc 4 examples/frameworks/with_fsdp.py
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import paceline
from text import Classifier, Sentences, collate

BATCH = 16  # samples of each rank, without Paceline


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--replicas", type=int, default=1)
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    train, held_out = Sentences(640), Sentences(200, seed=1)
    torch.manual_seed(1)
    model = sharded(Classifier(), options.replicas)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    if options.plain:
        sampler = DistributedSampler(train)
        loader = DataLoader(train, BATCH, sampler=sampler, collate_fn=collate)
        epochs = iter(range(options.epochs))
    else:
        session = paceline.Session(train, sizes=train.sizes, global_batch=BATCH * world)
        loader = session.loader(collate_fn=collate)
        model = session.wrap(model)  # the same model: its gradients are weighed from now on
        if folder := os.environ.get("PACELINE_CHECKPOINTS"):
            session.checkpoint(folder, model, optimizer, every_steps=20)
        epochs = session.epochs(options.epochs)

    for epoch in epochs:
        if options.plain:
            sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            labels = batch.pop("labels")
            loss = cross_entropy(model(**batch), labels)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if not options.plain:
                session.log(loss=loss, grad_norm=norm.full_tensor())

        accuracy = evaluate(model, held_out)
        if not options.plain:
            session.evaluated(accuracy=accuracy)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: held-out accuracy {accuracy:.4f}", flush=True)
    dist.destroy_process_group()


def sharded(model: nn.Module, replicas: int) -> nn.Module:
    """Each layer is a unit, and so is the rest; a mesh of two dimensions makes replicas."""
    shape, names = (replicas, dist.get_world_size() // replicas), ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for part in (model.embedding, model.word):
        fully_shard(part, mesh=mesh if replicas > 1 else mesh["shard"])
    return fully_shard(model, mesh=mesh if replicas > 1 else mesh["shard"])


@torch.no_grad()
def evaluate(model: nn.Module, data: Sentences) -> float:
    """The share that is classified rightly; all ranks call it, with all of the data."""
    model.eval()
    hits: list[Tensor] = []
    for batch in DataLoader(data, 50, collate_fn=collate):
        labels = batch.pop("labels")
        hits.append(model(**batch).argmax(-1) == labels)
    return float(torch.cat(hits).float().mean())


if __name__ == "__main__":
    main()
