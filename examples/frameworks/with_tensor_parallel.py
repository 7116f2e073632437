"""Tensor parallelism and FSDP2 with Paceline; with --plain, without Paceline.

paceline run --nproc 4 examples/frameworks/with_tensor_parallel.py

Groups of two ranks split the model and share each batch; each group has batches of its own.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import paceline
from text import Classifier, Sentences, collate

BATCH = 16  # samples of each group, without Paceline


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--split", type=int, default=2, help="ranks that split the model")
    options = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = dist.get_world_size() // options.split
    mesh = init_device_mesh("cpu", (groups, options.split), mesh_dim_names=("dp", "tp"))
    train, held_out = Sentences(640), Sentences(200, seed=1)
    torch.manual_seed(1)  # alike on all ranks: they have the same embedding and output layer
    model = split(Classifier(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    if options.plain:
        sampler = DistributedSampler(train, groups, mesh["dp"].get_local_rank())
        loader = DataLoader(train, BATCH, sampler=sampler, collate_fn=collate)
        epochs = iter(range(options.epochs))
    else:
        session = paceline.Session(
            train, sizes=train.sizes, global_batch=BATCH * groups, mesh=mesh["dp"]
        )
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
            optimizer.step()
            optimizer.zero_grad()
            if not options.plain:
                session.log(loss=loss)

        accuracy = evaluate(model, held_out)
        if not options.plain:
            session.evaluated(accuracy=accuracy)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: held-out accuracy {accuracy:.4f}", flush=True)
    dist.destroy_process_group()


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each group splits the hidden layer over its ranks; FSDP shards all of it over groups."""
    plan = {"word.0": ColwiseParallel(), "word.2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model.embedding, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


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
