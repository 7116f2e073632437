"""Builds the Hello of a simulated run, which has no leader to send it."""

from __future__ import annotations

from typing import Any

from paceline.wire import Hello
from paceline_backend.policies.base import Floats


def hello_of(
    sizes: Floats,
    world: int,
    global_batch: int,
    *,
    seed: int = 0,
    epochs: int | None = None,
    loss_mean: str = "samples",
    drop_last: bool = False,
    **fields: Any,
) -> Hello:
    """Return the Hello that a leader would send at virtual time 0.

    `sizes` are those of the data set, [N]. `epochs` None: their number is unknown. `loss_mean` is
    "samples", "size" or "ranks". `fields` are further fields of `Hello` that have defaults.
    """
    return Hello(
        attempt=0,
        world=world,
        global_batch=global_batch,
        seed=seed,
        sizes=sizes.astype("<f8").tobytes(),
        loss_mean=loss_mean,
        drop_last=drop_last,
        epochs=epochs,
        lookahead=0,
        started_at=0.0,
        paceline="simulated",
        torch="none",
        device="simulated",
        **fields,
    )
