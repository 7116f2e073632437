"""Storage of the control plane in SQLite or Postgres. No other package contains SQL.

`Store` is one database. `Store.open` creates its tables, and `Store.read` and `Store.write` open
transactions. Each module contains the queries about one subject, such as runs, nodes, switches,
leases or segments. `telemetry` validates and stores the messages that ingest reads from the bus.
`refusals` decides which messages are never stored.

Conventions of all modules: `connection` is an open transaction. An integer `run` is the key of a
row in `runs`; a string `run` is the run's public id. A `Range` of steps includes its last step; a
bound of None means no limit. Arguments and results are plain numbers, dictionaries and messages of
`paceline.wire`. Inside `Store.read` and `Store.write`, every database error becomes a `StoreError`,
so docstrings of functions do not list that error.

For example, to print the requested policy of a run:

    with Store.open("sqlite:///paceline.db") as store, store.read() as connection:
        key = runs.key_of(connection, "3f9a1c07be52")
        print(switches.latest(connection, key).policy)
"""

from paceline_backend.store.database import (
    Connection,
    Store,
    StoreError,
    StoreRefusedError,
    StoreUnavailableError,
)

__all__ = ["Connection", "Store", "StoreError", "StoreRefusedError", "StoreUnavailableError"]
