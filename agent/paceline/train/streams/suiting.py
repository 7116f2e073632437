"""Refuses options that a session of a stream does not support."""

from __future__ import annotations

from typing import Any

from paceline.core.amounts.shapes import Shapes
from paceline.core.errors import PacelineError
from paceline.core.streaming.ledger import LEAST_BATCHES
from paceline.data import Sharded, Stream
from paceline.train.streams.reader import Reader


def refuse_arguments(
    stream: Stream,
    global_batch: int,
    sizes: Any,
    shapes: Shapes,
    switches: dict[str, bool],
) -> None:
    """Refuse arguments of `Session` that a stream does not support. The ValueError names one."""
    if sizes != "auto":
        raise ValueError("sizes: a stream has its own; give paceline.data.Stream(size=…) alone")
    if shapes != Shapes():
        raise ValueError("shapes: not with a stream; leave it out")
    for name, value in switches.items():
        if value:
            raise ValueError(f"{name}: not with a stream; leave it out")
    if stream.buffer < LEAST_BATCHES * global_batch:
        raise ValueError(
            f"Stream(buffer={stream.buffer}): at least {LEAST_BATCHES} times global_batch, so "
            f"{LEAST_BATCHES * global_batch}, or there is no choice for balanced steps"
        )


def refuse_call(reader: Reader | None, call: str) -> None:
    """Raise a PacelineError for a method of a session whose data is a stream."""
    if reader is not None:
        raise PacelineError(f"{call}: not with a stream, {_WHY[call]}")


_WHY = {
    "profile": "whose samples have no index; give Session(limits=…)",
    "checkpoint": "which cannot be begun in the middle of an epoch; save session.state_dict() "
    "with your own after each epoch",
}


def kind_of(dataset: Any) -> str:
    """Describe a session's kind of data, which must be the same on all ranks."""
    if isinstance(dataset, Stream):
        return f"{dataset.kind}, buffer={dataset.buffer}, shuffle={dataset.shuffle}"
    return "Sharded" if isinstance(dataset, Sharded) else "plain"
