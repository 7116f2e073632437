"""Assumptions of a forecast for an observed run, whose script divides its batches itself.

Such a run reports the number of samples of each rank and their time, but no sizes. All samples
therefore count alike, batches are divided as plain DDP does, and differences between batches are
noise to each preset. The forecast shows only the effect of the ranks' speeds.
"""

from __future__ import annotations

import numpy as np

from paceline.core.cost import Features
from paceline.wire import Hello
from paceline_backend.store import Connection, attempts

# The script divides its batches like this preset.
PLAIN = "bsp"
ASSUMES = (
    "all samples count the same, because an observed script reports no sizes: if sizes differ, a "
    "managed run can save more; if the time does not depend on the samples, less"
)


def newest(connection: Connection, run: int, hello: Hello) -> int:
    """Return the newest complete step of an attempt without segments; -1 if there is none."""
    spans = attempts.spans(connection, run, hello.attempt)
    row = attempts.newest_complete(connection, run, spans)
    return -1 if row is None else int(row.step)


def counted(of: Features) -> Features:
    """Return the batches with samples of size 1."""
    load = of.samples.astype(np.float64)
    return Features(of.samples, load, load, np.minimum(load, 1.0))
