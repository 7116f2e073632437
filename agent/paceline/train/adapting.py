"""What the adapters to frameworks share: `paceline.accelerate`, `.transformers` and `.lightning`.

A framework has a loop of its own, and counts its epochs and steps itself. `DrivenLoader` is the
loader that such a loop reads.
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

# The options of Session and Session.wrap that an adapter hands on.
OPTIONS = {"sizes", "seed", "loss_mean", "coast_steps", "limits", "batchnorm"}
# The options of a DataLoader that say how batches are loaded.
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
    "global_batch": "the framework's batch size times the number of ranks decides it",
    "drop_last": "the framework's own drop_last decides it",
    "micro_batches": "a framework's loop makes one turn for each batch",
    "uneven_steps": "a framework's loop makes equally many steps on all ranks",
}


class DrivenLoader:
    """A session's loader for the loop of a framework.

    Frameworks count epochs themselves. So where a session goes on from the very end of an epoch,
    the next pass is the next epoch: `Session.loader` would give an empty pass first.

    Args:
        session: whose loader it is.
        place: puts a batch onto the device.
        options: of `Session.loader`.
    """

    def __init__(
        self, session: Session, place: Callable[[Any], Any], options: Mapping[str, Any]
    ) -> None:
        self.session = session
        self.dataset = session._dataset
        self._place = place
        self._loader = session.loader(**options)
        self._passing: Generator[Any] | None = None
        self.begins: Callable[[], None] | None = None  # called once, before the first batch

    def __len__(self) -> int:
        """Steps in a whole epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self.begins is not None:
            begins, self.begins = self.begins, None
            begins()
        if self._passing is not None:  # the framework left it early, and may still hold it
            self._passing.close()
        passing = self._passing = self._loader.__iter__()
        for batch in passing:
            yield self._place(batch)

    @property
    def running(self) -> bool:
        """Whether the framework's loop is in a step."""
        return self.session._loop.current.running is not None

    @property
    def in_last_step(self) -> bool:
        """Whether the loop is in an epoch's last step."""
        return self.running and self.session._loop.running().step.epoch_end

    def finish(self) -> None:
        """Ends the epoch if the loop is in its last step.

        A framework that counts steps asks for no batch after the last one, so the loader would not
        know that the loop's body has ended.
        """
        if self.in_last_step and self._passing is not None:
            next(self._passing, None)
            self._passing = None

    def waiting(self) -> AbstractContextManager[None]:
        """Around a collective of the framework's: waiting in it does not count as computing."""
        return self.session._loop.running().meeting() if self.running else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """The session's."""
        return self.session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the state was taken; if that was an epoch's end, with the next epoch."""
        self.session.load_state_dict(state)
        if self.session._loop.at_epoch_end:
            for _ in self._loader:
                raise AssertionError("an epoch that is over has no batch")


def checked(options: Mapping[str, Any], name: str) -> tuple[dict[str, Any], str | None]:
    """An adapter's options for `Session`, and the `batchnorm` of `Session.wrap`.

    Args:
        options: as the script gave them.
        name: of the adapter's argument.

    Raises:
        TypeError: an option is unknown, or the framework decides it.
    """
    for option in options:
        if option not in OPTIONS:
            why = _DECIDED.get(option, f"give some of {', '.join(sorted(OPTIONS))}")
            raise TypeError(f"{name} has {option!r}: {why}")
    rest = {option: value for option, value in options.items() if option != "batchnorm"}
    return rest, options.get("batchnorm")


def wrapped(
    session: Session, model: nn.Module, batchnorm: str | None, options: Mapping[str, Any]
) -> nn.Module:
    """The model as a framework trains it: in a single process, itself.

    Frameworks take DistributedDataParallel off a model by its class, and know of no other wrapper.
    """
    made = session.wrap(model, batchnorm=batchnorm, **options)
    return model if isinstance(made, SingleProcess) else made


def ranks_seed(seed: int) -> int:
    """Rank 0's seed, on all ranks: frameworks may seed each rank's random numbers differently."""
    if not dist.is_initialized():
        return seed
    box = [seed]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def is_shuffled(loader: object) -> bool:
    """Whether it is a DataLoader with ``shuffle=True``."""
    return isinstance(loader, DataLoader) and isinstance(
        getattr(loader.batch_sampler, "sampler", loader.sampler), RandomSampler
    )


def options_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """The options of a script's DataLoader that `Session.loader` takes.

    Raises:
        ValueError: it samples in a way that the plan cannot follow.
    """
    sampler = loader.sampler
    if type(loader.batch_sampler) is not torch.utils.data.BatchSampler or not isinstance(
        sampler, RandomSampler
    ):
        raise ValueError(
            "the training DataLoader has a sampler of its own, and Paceline plans which samples a "
            "batch has: make it with batch_size=… and shuffle=True"
        )
    if sampler.replacement or sampler.num_samples != len(loader.dataset):  # type: ignore[arg-type]
        raise ValueError(
            "the training DataLoader's RandomSampler has replacement or num_samples, and Paceline "
            "uses each sample once in an epoch: make the DataLoader with shuffle=True"
        )
    return loading_of(loader)


def loading_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """How a DataLoader loads its batches."""
    return {name: getattr(loader, name) for name in _LOADING}


def refuse(problem: str, mend: str) -> None:
    """Refuses what a framework was set to.

    Raises:
        PacelineError: always.
    """
    raise PacelineError(f"{problem}: {mend}")
