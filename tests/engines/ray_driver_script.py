"""A driver whose training on Ray goes on until somebody ends it.

python ray_driver_script.py FOLDER RAY_FOLDER: FOLDER/hangs has its second worker stand still until
the file is gone.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

import paceline
from paceline.ray import PacelineConfig


class Data(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float(index))


def stand_still(file: Path) -> None:
    while file.exists():
        time.sleep(0.1)


def train(config: dict[str, Any]) -> None:
    folder = Path(config["folder"])
    context = ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    network = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(network.parameters(), 1e-6)
    session = paceline.Session(Data(), global_batch=4 * 2, seed=1)
    loader = session.loader()
    model = session.wrap(prepare_model(network, parallel_strategy=None))
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as kept:
            saved = torch.load(Path(kept, "state.pt"), weights_only=False)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        session.load_state_dict(saved["session"])
    print(f"worker {rank} of {world} begins", flush=True)
    for _ in session.epochs(100_000):
        for inputs in loader:
            if rank == 1:
                stand_still(folder / "hangs")
            optimizer.zero_grad()
            model(inputs).mean().backward()
            optimizer.step()
            time.sleep(0.02)
        with tempfile.TemporaryDirectory() as made:
            if rank == 0:
                state = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "session": session.state_dict()}, Path(made, "state.pt"))
            ray.train.report({}, Checkpoint.from_directory(made) if rank == 0 else None)
    print(f"worker {rank} is through", flush=True)


def start_ray(folder: str) -> None:
    """Ray gives its node 30 s to start, which a busy machine may exceed."""
    for tries_left in reversed(range(6)):
        try:
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                object_store_memory=80_000_000,
                _temp_dir=folder,
            )
            return
        except Exception:
            if not tries_left:
                raise
            ray.shutdown()


def main() -> None:
    folder, of_ray = sys.argv[1:3]
    least, _, most = (sys.argv[3] if len(sys.argv) > 3 else "2").partition(":")
    if "RAY_ADDRESS" not in os.environ:
        start_ray(of_ray)
    workers: Any = (int(least), int(most)) if most else int(least)
    every = {"elastic_resize_monitor_interval_s": 1} if most else {}
    TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        torch_config=PacelineConfig(),
        scaling_config=ScalingConfig(num_workers=workers, **every),
        run_config=RunConfig(
            name=os.environ["PACELINE_RUN"],  # by which Ray Train finds its checkpoint again
            storage_path=f"{folder}/storage",
            failure_config=FailureConfig(2),
        ),
    ).fit()
    print("the driver is through", flush=True)


if __name__ == "__main__":
    main()
