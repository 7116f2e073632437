"""Store the rounds of relaxed synchronisers that ranks report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from paceline.wire import RoundBatch, RoundRecord
from paceline_backend.store import blobs, schema
from paceline_backend.store.database import StoreRefusedError, insert
from paceline_backend.store.telemetry.columns import Columns
from paceline_backend.store.telemetry.locked import LockedRun

_RECORD = Columns(RoundRecord, schema.rounds)


def write(connection: sa.Connection, batches: Sequence[tuple[LockedRun, RoundBatch]]) -> None:
    """Store the rounds that are not stored yet."""
    rows = [_row(run, record) for run, batch in batches for record in batch.records]
    if rows:
        connection.execute(insert(connection, schema.rounds).on_conflict_do_nothing(), rows)


def _row(run: LockedRun, record: RoundRecord) -> dict[str, Any]:
    run.check_rank(record.attempt, record.rank)
    record = _RECORD.checked(record)
    check_staleness(record)
    staleness = blobs.pack(record.staleness)
    return msgspec.structs.asdict(record) | {"run": run.key, "staleness": staleness}


def check_staleness(record: RoundRecord) -> None:
    """Refuse a record whose `staleness` has numbers that are no counts."""
    if not all(0 <= count < 2**31 for count in record.staleness):
        raise StoreRefusedError(f"staleness contains a number that is not a count in {record}")
