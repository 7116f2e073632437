"""Refuses options that a session of a stream does not support."""

from __future__ import annotations

from typing import Any

from paceline.core.amounts.shapes import Shapes
from paceline.core.errors import PacelineError
from paceline.core.streaming.ledger import LEAST_BATCHES
from paceline.data import Sharded, Stream
from paceline.train.streams.reader import StreamReader


def refuse_arguments(
    stream: Stream,
    global_batch: int,
    sizes: Any,
    shapes: Shapes,
    switches: dict[str, bool],
) -> None:
    """Refuse arguments of `Session` that a stream does not support. The ValueError names one."""
    if sizes != "auto":
        raise ValueError(
            "sizes: not supported with a stream; give paceline.data.Stream(size=…) instead"
        )
    if shapes != Shapes():
        raise ValueError("shapes: not supported with a stream; leave it out")
    for name, value in switches.items():
        if value:
            raise ValueError(f"{name}: not supported with a stream; leave it out")
    if stream.buffer < LEAST_BATCHES * global_batch:
        raise ValueError(
            f"Stream(buffer={stream.buffer}): must be at least {LEAST_BATCHES} times global_batch, "
            f"{LEAST_BATCHES * global_batch}, to leave a choice for balanced steps"
        )


def refuse_call(reader: StreamReader | None, call: str) -> None:
    """Raise a PacelineError for a method of a session whose data is a stream."""
    if reader is not None:
        raise PacelineError(f"{call}: not supported with a stream, {_WHY[call]}")


_WHY = {
    "profile": "whose samples have no index; give Session(limits=…)",
    "checkpoint": "which cannot be resumed in the middle of an epoch; save session.state_dict() "
    "with your own state after each epoch",
}


def kind_of(dataset: Any) -> str:
    """Describe a session's kind of data, which must be the same on all ranks."""
    if isinstance(dataset, Stream):
        return f"{dataset.kind}, buffer={dataset.buffer}, shuffle={dataset.shuffle}"
    return "Sharded" if isinstance(dataset, Sharded) else "plain"
