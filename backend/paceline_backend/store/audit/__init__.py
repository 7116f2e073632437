"""Who changed what: a row for each change that somebody asked for.

A row is written in the transaction of its change, so that neither exists without the other. A
change of a run also counts the run's revision: who changes a run says which revision it has seen,
and is told who was faster.

    with store.write() as connection:
        record_change(connection, run, requester, "run.policy", expected=3)  # a run's change
        ...
    with store.write() as connection:
        record(connection, requester, "token.create", target="ci")  # any other change

`requests` and `api` write, `api` reads.
"""

from paceline_backend.store.audit.log import (
    CONTROL_PLANE,
    RESERVED,
    UNKNOWN,
    Requester,
    newest,
    owners,
    page,
    record,
    stop_asked,
    stop_of,
)
from paceline_backend.store.audit.revisions import RevisionError, record_change, revision_of

__all__ = [
    "CONTROL_PLANE",
    "RESERVED",
    "UNKNOWN",
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
