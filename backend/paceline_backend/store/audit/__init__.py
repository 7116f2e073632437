"""Audit log: a row for each change that a user or program requested.

A row is written in the transaction of its change, so that neither exists without the other. A
change of a run also increments the run's revision. A client sends the revision that it has read; if
another client was faster, the change fails with `RevisionError`, which names that client.

    with store.write() as connection:
        record_change(connection, RequestedChange(run, requester, expected=3), "run.policy")
        ...
    with store.write() as connection:
        record(connection, requester, "token.create", target="ci")  # any other change

`requests` and `api` write the log; `api` reads it.
"""

from paceline_backend.store.audit.log import (
    CONTROL_PLANE,
    RESERVED,
    UNKNOWN,
    ChangeFilter,
    Requester,
    newest,
    owners,
    page,
    record,
    stop_asked,
    stop_of,
)
from paceline_backend.store.audit.revisions import (
    RequestedChange,
    RevisionError,
    record_change,
    revision_of,
)

__all__ = [
    "CONTROL_PLANE",
    "RESERVED",
    "UNKNOWN",
    "ChangeFilter",
    "RequestedChange",
    "Requester",
    "RevisionError",
    "newest",
    "owners",
    "page",
    "record",
    "record_change",
    "revision_of",
    "stop_asked",
    "stop_of",
]
