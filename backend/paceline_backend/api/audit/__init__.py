"""REST: the audit log, and protection against lost updates (`If-Match`).

A route that changes a run declares a parameter of type `Expected`: the revision that the caller has
seen. `requester_of` returns who sends the request; a route without a body declares a parameter of
type `QueryRequester` instead. The route passes both to functions of `requests`, or directly to
`store.audit`, as a `RequestedChange`.
"""

from paceline_backend.api.audit.precondition import (
    CHANGE_REFUSALS,
    Expected,
    QueryRequester,
    etag,
    requester_of,
)

__all__ = ["CHANGE_REFUSALS", "Expected", "QueryRequester", "etag", "requester_of"]
