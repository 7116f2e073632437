"""History in SQLite or Postgres."""
