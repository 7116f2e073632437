"""Writes and reads a checkpoint's files, with torch.distributed.checkpoint, on all ranks at once.

Import it only when needed: torch.distributed.checkpoint takes a second to import.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from paceline.core.errors import PacelineError
from paceline.train.checkpoint.contents import State, of_rank


def write(directory: Path, state: State, group: dist.ProcessGroup | None) -> None:
    """Write the ranks' states into a directory; return once all of them are on the disk.

    Raises:
        PacelineError: a rank failed; the message names it. All ranks raise this error.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with _failures_named():
        writer = FileSystemWriter(directory)
        save(state, storage_writer=writer, planner=planner, process_group=group)


def read(
    directory: Path,
    rank: int,
    group: dist.ProcessGroup | None,
    layout: Mapping[str, torch.Tensor] | None = None,
) -> State:
    """Read a checkpoint's entries, except for those that only other ranks need.

    If `layout` splits an entry over ranks (see `Contents.layout`), a rank reads only its part.

    Raises:
        PacelineError: a rank failed; the message names it.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    reader = FileSystemReader(directory)
    with _failures_named():
        state = _template(reader, rank, layout or {})
        load(state, storage_reader=reader, planner=planner, process_group=group)
    return state


def _template(reader: FileSystemReader, rank: int, layout: Mapping[str, torch.Tensor]) -> State:
    return {
        key: _empty(entry, layout.get(_place(key)))
        if isinstance(entry, TensorStorageMetadata)
        else None
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if of_rank(key, rank)
    }


def _place(key: str) -> str:
    """Return the layout key that describes how an entry is split over ranks."""
    return key.rpartition("/")[0] if key.startswith("optimizer/") else key


def _empty(entry: TensorStorageMetadata, like: torch.Tensor | None) -> torch.Tensor:
    dtype = entry.properties.dtype
    # An entry such as an optimiser's number of steps is not split like its parameter.
    if like is None or like.shape != entry.size:
        return torch.empty(entry.size, dtype=dtype)
    return torch.empty_like(like, dtype=dtype, requires_grad=False)


@contextmanager
def _failures_named() -> Iterator[None]:
    """Convert failures to a PacelineError; suppress PyTorch's warning for a single process."""
    try:
        # The filter stays installed, because warning filters are global: removing it could undo a
        # change by another thread.
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
    except CheckpointException as error:
        if not error.failures:
            raise PacelineError(str(error)) from error
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        raise PacelineError(f"rank {rank}: {type(cause).__name__}: {cause}") from error
    except OSError as error:
        raise PacelineError(f"{type(error).__name__}: {error}") from error
