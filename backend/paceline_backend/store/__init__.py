"""History in SQLite or Postgres."""

from paceline_backend.store.database import (
    Store,
    StoreError,
    StoreRefusedError,
    StoreUnavailableError,
)

__all__ = ["Store", "StoreError", "StoreRefusedError", "StoreUnavailableError"]
