"""Database reads that prepare the input of an attribution."""

from __future__ import annotations

import numpy as np

from paceline.wire import OBSERVED
from paceline_backend.insight.attribution.model import Rows
from paceline_backend.store import Connection, records, switches
from paceline_backend.store.attempts import Placement
from paceline_backend.store.reads import Range

# An attribution covers this many steps unless the caller gives a range.
STEPS = 100
# At most this many rows are read. Of a longer range these are the newest steps.
MOST_ROWS = 200_000

_COLUMNS = ("samples", "load", "squares", "longest", "data_s", "compute_s")


def read_rows(
    connection: Connection, run: int, span: Range, placement: Placement | None = None
) -> Rows:
    """Return the ranks' reports of the complete steps in a range.

    Without a first step, `span` covers the last `STEPS` steps. Of more than `MOST_ROWS` rows, only
    the newest steps are read. Steps before the given placement of ranks are left out, because ranks
    were on other nodes; None: the placement is unknown.
    """
    read = records.newest_complete(
        connection, run, _COLUMNS, span, count=STEPS, most_rows=MOST_ROWS
    )
    if placement is not None:
        read = read.since(placement.since)
    steps, columns = read.by_step(None if placement is None else len(placement.nodes))
    policy = switches.of_version(connection, run, 0)
    return Rows(
        steps.astype(np.int64),
        **dict(zip(_COLUMNS, columns, strict=True)),
        planned=policy is None or policy.policy != OBSERVED,
    )
