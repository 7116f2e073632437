"""What a session of a stream cannot do, refused by name."""

from __future__ import annotations

from typing import Any

from paceline.core.amounts.shapes import Shapes
from paceline.core.errors import PacelineError
from paceline.core.streaming.ledger import LEAST_BATCHES
from paceline.data.stream import Stream


def refuse_arguments(
    stream: Stream,
    global_batch: int,
    sizes: Any,
    shapes: Shapes,
    switches: dict[str, bool],
) -> None:
    """Refuses what does not go together with a stream.

    Args:
        stream: the data.
        global_batch: samples of a step.
        sizes: of `Session`.
        shapes: of `Session`.
        switches: further arguments of `Session`, by name.

    Raises:
        ValueError: the message names the argument.
    """
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


def refuse_call(call: str) -> PacelineError:
    """The error of a session's method that needs a data set with an index."""
    return PacelineError(f"{call}: not with a stream, whose samples have no length and no index")
