"""What a forecast rests on where the script divides its batches itself.

Such a run tells how many samples each rank had and how long they took, but no sizes of samples.
So all samples count alike, batches are divided as plain DDP does, and what batches cost differently
is noise to each preset. Then a forecast is of what ranks' speeds alone would give.
"""

from __future__ import annotations

import numpy as np

from paceline.core.cost import Features
from paceline.wire import Hello
from paceline_backend.store import Connection, attempts

PLAIN = "bsp"  # how the script divides its batches
ASSUMES = (
    "every sample counts alike, because an observed script tells no sizes: where sizes differ, a "
    "managed run can save more; where time does not go with samples, less"
)


def newest(connection: Connection, run: int, hello: Hello) -> int:
    """The newest complete step of an attempt without segments; -1: there is none."""
    spans = attempts.spans(connection, run, hello.attempt)
    row = attempts.newest_complete(connection, run, spans)
    return -1 if row is None else int(row.step)


def counted(of: Features) -> Features:
    """The batches with samples of size 1."""
    load = of.samples.astype(np.float64)
    return Features(of.samples, load, load, np.minimum(load, 1.0))
