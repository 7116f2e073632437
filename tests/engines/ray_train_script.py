"""Trains on a Ray of its own, by Ray Train alone and with Paceline; ranks leave what came of it.

python ray_train_script.py DIRECTORY RAY_DIRECTORY KIND: "cases" has no control plane, "run" is the
driver of a run, whose second worker fails once.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import paceline
import text
from paceline.ray import PacelineConfig
from support.framework_cases import refused

BATCH = 8
COUNT = 160
EPOCHS = 6
FAILS_IN = 2  # epoch
UNEVEN = [5, 12]  # limits: without a control plane, they leave each rank another size


def cases(config: dict[str, Any]) -> None:
    results = [train(plain=True), train(), train(limits=UNEVEN), refusals(), plain_example()]
    keep(config["directory"], results)


def plain_example() -> dict[str, float]:
    """What the example reports of Ray Train alone, after an epoch."""
    import with_ray

    reported: list[dict[str, float]] = []
    take = mock.Mock(side_effect=lambda metrics, _: reported.append(metrics))
    with mock.patch.object(ray.train, "report", take):
        with_ray.train({"plain": True, "epochs": 1})
    return reported[-1]


def train(plain: bool = False, folder: str = "", **options: Any) -> dict[str, Any]:
    """The loss of all samples after each epoch, and how many samples each step had.

    Args:
        plain: Ray Train alone.
        folder: the second worker fails once, and all go on from what the first one reported.
        **options: of the session.
    """
    torch.manual_seed(3)
    data, network = text.Sentences(COUNT), text.Classifier()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    if plain:
        model = prepare_model(network)
        given = DataLoader(data, BATCH, shuffle=True, collate_fn=text.collate)
        loader = prepare_data_loader(given)
    else:
        context = ray.train.get_context()
        size = BATCH * context.get_world_size()
        session = paceline.Session(data, global_batch=size, **options)
        loader = session.loader(collate_fn=text.collate)
        model = session.wrap(prepare_model(network, parallel_strategy=None))
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as kept:
            saved = torch.load(Path(kept, "state.pt"), weights_only=False)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        session.load_state_dict(saved["session"])
    result: dict[str, Any] = {"losses": [], "counts": []}
    for epoch in range(EPOCHS) if plain else session.epochs(EPOCHS):
        if plain:
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            labels = batch.pop("labels")
            result["counts"].append(len(labels))
            loss = cross_entropy(model(**batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if not plain:
                session.log(loss=loss)
            if folder and checkpoint is None and epoch == FAILS_IN:
                fails_on_the_second_worker()
        result["losses"].append(loss_of_all(network, data))
        if folder:
            state = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
            report({**state, "session": session.state_dict()})
    return result


def fails_on_the_second_worker() -> None:
    if ray.train.get_context().get_world_rank() == 1:
        raise RuntimeError("this worker fails once")


def loss_of_all(network: torch.nn.Module, data: text.Sentences) -> float:
    batch = text.collate([data[k] for k in range(len(data))])
    labels = batch.pop("labels")
    with torch.no_grad():
        return float(cross_entropy(network(**batch), labels))


def report(state: dict[str, Any]) -> None:
    """Reports a checkpoint, on the first worker."""
    first = ray.train.get_context().get_world_rank() == 0
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder, "state.pt"))
        ray.train.report({}, Checkpoint.from_directory(folder) if first else None)


def refusals() -> list[str]:
    """What is refused, each in its own words."""
    said: list[str] = []
    session = paceline.Session(text.Sentences(COUNT), global_batch=BATCH)
    with refused(said):
        session.wrap(prepare_model(text.Classifier()))
    with refused(said):
        prepare_model(session.wrap(text.Classifier()))
    with refused(said):
        prepare_data_loader(session.loader(collate_fn=text.collate))
    return said


def keep(directory: str, results: list[Any]) -> None:
    rank = ray.train.get_context().get_world_rank()
    Path(directory, f"{rank}.json").write_text(json.dumps(results))


def run(config: dict[str, Any]) -> None:
    known = {name: text for name, text in os.environ.items() if name.startswith("PACELINE_")}
    keep(config["directory"], [train(folder=config["directory"]), known])


def fit(loop: Any, config: PacelineConfig, directory: str, failures: int) -> None:
    TorchTrainer(
        loop,
        train_loop_config={"directory": directory},
        torch_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=f"{directory}/storage", failure_config=FailureConfig(failures)
        ),
    ).fit()


def main() -> None:
    directory, of_ray, kind = sys.argv[1:]
    config = PacelineConfig()
    for name in [name for name in os.environ if name.startswith("PACELINE_")]:
        del os.environ[name]  # Ray's nodes were started by somebody else
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=kind == "run",
        object_store_memory=80_000_000,
        _temp_dir=of_ray,
    )
    if kind == "run":
        fit(run, config, directory, failures=1)
        return
    fit(cases, config, directory, failures=0)
    import with_ray

    sys.argv = ["example", "--epochs=1", f"--storage={directory}/storage"]
    with Path(directory, "example").open("w") as printed, contextlib.redirect_stdout(printed):
        with_ray.main()


if __name__ == "__main__":
    main()
