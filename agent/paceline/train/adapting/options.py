"""Checks the options of an adapter, and reads those of the script's DataLoader and model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from paceline.core.errors import PacelineError
from paceline.train.ddp import SingleProcess
from paceline.train.session import Session

# Options that an adapter passes to Session and Session.wrap.
OPTIONS = {"sizes", "seed", "loss_mean", "coast_steps", "limits", "shapes", "batchnorm"}
# Options of a DataLoader that concern how batches are loaded.
_LOADING = [
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
]
_DECIDED = {
    "global_batch": "it follows from the framework's batch size and the number of ranks",
    "token_budget": "the framework decides how many samples a batch has",
    "drop_last": "use the framework's own drop_last",
    "micro_batches": "a framework's loop runs one iteration for each batch",
    "uneven_steps": "a framework's loop runs the same number of steps on all ranks",
}


def checked(options: Mapping[str, Any], name: str) -> tuple[dict[str, Any], str | None]:
    """Split an adapter's options into those for `Session` and the `batchnorm` of `Session.wrap`.

    Raises:
        TypeError: an option is unknown, or the framework decides it.
    """
    for option in options:
        if option not in OPTIONS:
            why = _DECIDED.get(option, f"known options: {', '.join(sorted(OPTIONS))}")
            raise TypeError(f"{name} does not take {option!r}: {why}")
    rest = {option: value for option, value in options.items() if option != "batchnorm"}
    return rest, options.get("batchnorm")


def wrapped(
    session: Session, model: nn.Module, batchnorm: str | None, options: Mapping[str, Any]
) -> nn.Module:
    """Wrap a model for a framework's loop; with a single process, return the model itself.

    To unwrap a model, frameworks only recognise DistributedDataParallel, by its class.
    """
    made = session.wrap(model, batchnorm=batchnorm, **options)
    return model if isinstance(made, SingleProcess) else made


def ranks_seed(seed: int) -> int:
    """Return rank 0's seed on all ranks, since frameworks may seed each rank differently."""
    if not dist.is_initialized():
        return seed
    box = [seed]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def is_shuffled(loader: object) -> bool:
    """Return whether a loader is a DataLoader with ``shuffle=True``."""
    return isinstance(loader, DataLoader) and isinstance(
        getattr(loader.batch_sampler, "sampler", loader.sampler), RandomSampler
    )


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options of a script's DataLoader that `Session.loader` takes.

    Raise a ValueError if no plan can replace its sampling.
    """
    sampler = loader.sampler
    if type(loader.batch_sampler) is not torch.utils.data.BatchSampler or not isinstance(
        sampler, RandomSampler
    ):
        raise ValueError(
            "the training DataLoader has a custom sampler, but Paceline plans which samples a "
            "batch has: create it with batch_size=… and shuffle=True"
        )
    if sampler.replacement or sampler.num_samples != len(loader.dataset):  # type: ignore[arg-type]
        raise ValueError(
            "the training DataLoader's RandomSampler has replacement or num_samples, but Paceline "
            "uses each sample once per epoch: create the DataLoader with shuffle=True"
        )
    return loading_of(loader)


def loading_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options with which a DataLoader loads its batches."""
    return {name: getattr(loader, name) for name in _LOADING}


def refuse(problem: str, mend: str) -> None:
    """Raise a PacelineError for a setting of a framework."""
    raise PacelineError(f"{problem}: {mend}")
