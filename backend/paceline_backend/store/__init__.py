"""History in SQLite or Postgres."""

from paceline_backend.store.database import (
    Connection,
    Store,
    StoreError,
    StoreRefusedError,
    StoreUnavailableError,
)

__all__ = ["Connection", "Store", "StoreError", "StoreRefusedError", "StoreUnavailableError"]
