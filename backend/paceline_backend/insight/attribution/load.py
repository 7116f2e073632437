"""From the database to what an attribution rests on."""

from __future__ import annotations

import numpy as np

from paceline.wire import OBSERVED
from paceline_backend.insight.attribution.model import Rows
from paceline_backend.store import Connection, records, switches
from paceline_backend.store.attempts import Placement
from paceline_backend.store.reads import Range

STEPS = 100  # An attribution rests on so many steps unless a range is given.
MOST_ROWS = 200_000  # At most so many rows are read: of a longer range, the newest steps.

_COLUMNS = ("samples", "load", "squares", "longest", "data_s", "compute_s")


def read_rows(
    connection: Connection, run: int, span: Range, placement: Placement | None = None
) -> Rows:
    """What ranks reported of the complete steps of a range, as far as it counts.

    Args:
        connection: to read from.
        run: key of the run.
        span: first and last step; without a first one, `STEPS` of them. Never more than
            `MOST_ROWS` rows: of a longer range, the newest steps.
        placement: of the range's last step: steps before it do not count, since ranks were on other
            nodes. None: it is not known.
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
