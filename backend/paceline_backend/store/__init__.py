"""History in SQLite or Postgres: the only package with SQL.

`Store` is one database. `Store.open` creates its tables, and `Store.read` and `Store.write` open
transactions. The modules hold the queries by subject: runs, nodes, switches, leases, segments,
records of ranks' steps, rounds, forecasts. `telemetry` writes what ingest reads from the bus and
validates it first. `refusals` decides which messages are never stored.

Conventions of all modules: `connection` is an open transaction. An integer `run` is the key of a
row in `runs`; a string `run` is the run's public id. A `Range` of steps includes its last step, and
None as a bound leaves that side open. Arguments and results are plain numbers, dictionaries and
messages of `paceline.wire`. Inside `Store.read` and `Store.write`, every database error becomes a
`StoreError`, so functions do not list that error.

Every other package of the control plane calls this one, except `policies` and `simulator`:

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
