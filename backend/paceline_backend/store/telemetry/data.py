"""Store what ranks report about an epoch whose data lives on nodes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import sqlalchemy as sa

from paceline.wire import DataEpoch
from paceline_backend.store import refusals
from paceline_backend.store.database import insert
from paceline_backend.store.schema import data_epochs
from paceline_backend.store.telemetry.locked import LockedRun


def write(connection: sa.Connection, messages: Sequence[tuple[LockedRun, DataEpoch]]) -> None:
    """Store one row for each attempt, epoch and rank."""
    c = data_epochs.c
    for run, message in messages:
        run.refuse("DataEpoch", refusals.of_data_epoch(message))
        run.check_rank(message.attempt, message.rank)
        row = msgspec.structs.asdict(message) | {"run": run.key}
        keys = [c.run, c.attempt, c.epoch, c.rank]
        upsert = insert(connection, data_epochs).values(row)
        values = {name: upsert.excluded[name] for name in row if c[name] not in set(keys)}
        connection.execute(upsert.on_conflict_do_update(index_elements=keys, set_=values))
