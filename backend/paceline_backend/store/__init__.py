"""History in SQLite or Postgres: the only package with SQL.

`Store` is one database: `Store.open` migrates it, `read` and `write` give transactions, and every
database error becomes a `StoreError`. The modules hold the queries by subject: runs, nodes,
switches, leases, segments, records (ranks' steps), rounds, forecasts. `telemetry` writes what the
bus brings, and has a module for each table.
Values in and out are plain: numbers, dictionaries, messages of `paceline.wire`. `refusals`
says which messages are never stored.

Called by every other package of the control plane but `policies` and `simulator`:

    with Store.open("sqlite:///paceline.db") as store, store.read() as connection:
        key = runs.key_of(connection, "3f9a1c07be52")
        print(switches.latest(connection, key).policy)
"""

from paceline_backend.store.alerts import tables as _alerts  # noqa: F401  part of the schema
from paceline_backend.store.database import (
    Connection,
    Store,
    StoreError,
    StoreRefusedError,
    StoreUnavailableError,
)
from paceline_backend.store.fleet import tables as _fleet  # noqa: F401  part of the schema
from paceline_backend.store.quality import tables as _quality  # noqa: F401  part of the schema
from paceline_backend.store.rollups import tables as _tables  # noqa: F401  part of the schema

__all__ = ["Connection", "Store", "StoreError", "StoreRefusedError", "StoreUnavailableError"]
