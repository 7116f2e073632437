"""Ray Train with Paceline; with --plain, Ray Train alone.

paceline run --driver --nproc 2 --max-restarts 2 examples/frameworks/with_ray.py
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import paceline
from paceline.ray import PacelineConfig
from text import Classifier, Sentences, collate

BATCH = 16  # samples of each worker, without Paceline


def train(config: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    plain, rank = config["plain"], ray.train.get_context().get_world_rank()
    data, held_out = Sentences(640), Sentences(200, seed=1)
    torch.manual_seed(1)
    network = Classifier()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    if plain:
        model = prepare_model(network)
        loader = prepare_data_loader(DataLoader(data, BATCH, shuffle=True, collate_fn=collate))
    else:
        world = ray.train.get_context().get_world_size()
        session = paceline.Session(data, sizes=data.sizes, global_batch=BATCH * world)
        loader = session.loader(collate_fn=collate)
        model = session.wrap(prepare_model(network, parallel_strategy=None))  # on its device

    first = 0
    if checkpoint := ray.train.get_checkpoint():  # Ray has started the workers anew
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"), weights_only=False)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
        if not plain:
            session.load_state_dict(saved["session"])

    for epoch in range(first, config["epochs"]) if plain else session.epochs(config["epochs"]):
        if plain:
            loader.sampler.set_epoch(epoch)
        model.train()
        for batch in loader:
            batch = {name: tensor.to(get_device()) for name, tensor in batch.items()}
            labels = batch.pop("labels")
            loss = cross_entropy(model(**batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not plain:
                session.log(loss=loss)

        metrics = {"accuracy": evaluate(network, held_out), "weights": total(network)}
        state = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        if not plain:
            session.evaluated(accuracy=metrics["accuracy"])
            state["session"] = session.state_dict()
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                torch.save(state, Path(folder, "state.pt"))
            ray.train.report(metrics, Checkpoint.from_directory(folder) if rank == 0 else None)


@torch.no_grad()
def evaluate(model: Classifier, data: Sentences) -> float:
    """The share that is classified rightly."""
    model.eval()
    hits = []
    for batch in DataLoader(data, 50, collate_fn=collate):
        batch = {name: tensor.to(get_device()) for name, tensor in batch.items()}
        labels = batch.pop("labels")
        hits.append(model(**batch).argmax(-1) == labels)
    return float(torch.cat(hits).float().mean())


def total(model: Classifier) -> float:
    return float(sum(parameter.detach().abs().sum() for parameter in model.parameters()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--storage", help="for checkpoints; on several nodes a shared one")
    options = parser.parse_args()
    result = TorchTrainer(
        train,
        train_loop_config={"plain": options.plain, "epochs": options.epochs},
        torch_config=None if options.plain else PacelineConfig(),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(
            name=os.environ.get("PACELINE_RUN"),  # by which `paceline resume` finds the checkpoint
            storage_path=options.storage,
            failure_config=FailureConfig(max_failures=2),
        ),
    ).fit()
    accuracy, weights = result.metrics["accuracy"], result.metrics["weights"]
    print(f"held-out accuracy {accuracy:.4f}, sum of weights {weights:.4f}")


if __name__ == "__main__":
    main()
