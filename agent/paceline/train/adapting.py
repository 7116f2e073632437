"""Parts shared by the adapters `paceline.accelerate`, `.transformers` and `.lightning`.

Only adapters may import this module: if a script's process has imported it, `paceline doctor`
assumes that the script uses an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from paceline.core.errors import PacelineError
from paceline.train.ddp import SingleProcess
from paceline.train.session import Session

# Options that an adapter passes to Session and Session.wrap.
OPTIONS = {"sizes", "seed", "loss_mean", "coast_steps", "policy", "limits", "shapes", "batchnorm"}
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


class DrivenLoader:
    """Loader over which a framework's training loop iterates. `place` moves a batch to the device.

    Frameworks count epochs themselves. If a session resumes from a checkpoint that was saved after
    an epoch's last step, the first pass over this loader is therefore the next epoch. The loader of
    `Session.loader` would first give an empty pass for the finished epoch.
    """

    def __init__(
        self, session: Session, place: Callable[[Any], Any], options: Mapping[str, Any]
    ) -> None:
        self.session = session
        self.dataset = session._dataset
        self._place = place
        self._loader = session.loader(**options)
        self._passing: Generator[Any] | None = None
        # Function that is called once, before the first batch.
        self.begins: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self.begins is not None:
            begins, self.begins = self.begins, None
            begins()
        # The framework may have left the previous pass early and still refer to its iterator.
        if self._passing is not None:
            self._passing.close()
        passing = self._passing = self._loader.__iter__()
        for batch in passing:
            yield self._place(batch)

    @property
    def running(self) -> bool:
        """Return whether the framework's loop is in a step."""
        return self.session._loop.current.running is not None

    @property
    def in_last_step(self) -> bool:
        """Return whether the loop is in the last step of an epoch."""
        return self.running and self.session._loop.running().step.epoch_end

    def finish(self) -> None:
        """End the epoch if the loop is in its last step.

        A framework that counts steps does not request a batch after the last one. Without a call of
        `finish` the loader would not notice that the last iteration has ended.
        """
        if self.in_last_step and self._passing is not None:
            next(self._passing, None)
            self._passing = None

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context for a collective of the framework; time in it counts as waiting."""
        return self.session._loop.running().in_collective() if self.running else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Return the session's state."""
        return self.session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; if it was saved after an epoch's last step, begin the next one."""
        self.session.load_state_dict(state)
        if self.session._loop.progress.epoch_is_done:
            for _ in self._loader:
                raise AssertionError("an epoch that is over has no batch")


def checked(options: Mapping[str, Any], name: str) -> tuple[dict[str, Any], str | None]:
    """Return the checked options for `Session`, and `batchnorm` for `Session.wrap`.

    `name` names the adapter in error messages.

    Raises:
        TypeError: an option is unknown, or the framework sets it.
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

    Frameworks unwrap only DistributedDataParallel, so they could not unwrap a `SingleProcess`.
    """
    made = session.wrap(model, batchnorm=batchnorm, **options)
    return model if isinstance(made, SingleProcess) else made


def ranks_seed(seed: int) -> int:
    """Return rank 0's seed on each rank, since frameworks may seed each rank differently."""
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
    """Return those options of a script's DataLoader that `Session.loader` accepts.

    Raise a ValueError if the plan cannot replace the DataLoader's sampler.
    """
    sampler = loader.sampler
    if type(loader.batch_sampler) is not torch.utils.data.BatchSampler or not isinstance(
        sampler, RandomSampler
    ):
        raise ValueError(
            "the training DataLoader has a custom sampler, but Paceline plans which samples a "
            "batch has: create the DataLoader with batch_size=… and shuffle=True"
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


def refuse(problem: str, fix: str) -> None:
    """Raise a PacelineError for an unsupported setting of a framework; the message has the fix."""
    raise PacelineError(f"{problem}: {fix}")
