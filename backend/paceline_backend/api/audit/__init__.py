"""REST: who changed what, and that nobody overwrites a change that they have not seen.

A route that changes a run takes `Expected` as a parameter and hands it to the store. Who asks is
`requester_of`. Both go to the functions of `requests`, or to `store.audit` directly.
"""

from paceline_backend.api.audit.precondition import CHANGE_REFUSALS, Expected, etag, requester_of

__all__ = ["CHANGE_REFUSALS", "Expected", "etag", "requester_of"]
