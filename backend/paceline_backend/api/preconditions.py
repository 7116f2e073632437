"""Parameters of changes: the requester, and the revision that the caller has seen (`If-Match`).

A route that changes a run declares a parameter of type `Expected`: the revision that the caller has
seen. `requester_of` returns the sender of the request; a route without a body declares a parameter
of type `QueryRequester` instead. The route passes revision and requester to functions of
`requests`, or directly to `store.audit`, as a `RequestedChange`. The change fails if another caller
has changed the run in the meantime, so no operator overwrites a change unknowingly.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, Header, Query, Request

from paceline_backend.api.errors import ProblemError, documented
from paceline_backend.api.identity import identity_of
from paceline_backend.api.models import Name, Why
from paceline_backend.store.audit import Requester

# Errors of a route that changes a run, in addition to `RUN_REFUSALS`.
CHANGE_REFUSALS = documented(HTTPStatus.PRECONDITION_FAILED, HTTPStatus.PRECONDITION_REQUIRED)

# No run ever has this revision, so a malformed `If-Match` matches none.
_NO_REVISION = -1
_ETAG = re.compile(r'"(\d{1,18})"')


def etag(revision: int) -> str:
    """Return the value of the `ETag` header for a revision."""
    return f'"{revision}"'


def requester_of(request: Request, via: str = "", why: str = "", operator: str = "") -> Requester:
    """Return the sender of a request, for the audit log.

    `via` is the name of the calling program. `operator` is the name that the caller gives; it is
    ignored for a personal token, which has a name of its own.
    """
    identity = identity_of(request)
    given = operator.strip() if identity.shared else ""
    return Requester(identity.name, identity.scope, identity.address, via, why, given)


def _from_query(
    request: Request,
    by: Annotated[Name, Query(description="name of the client program, for the audit log")] = "api",
    why: Annotated[Why, Query(description="reason for the change, for the audit log")] = "",
) -> Requester:
    return requester_of(request, by, why)


# Requester of a change without a body, such as DELETE.
QueryRequester = Annotated[Requester, Depends(_from_query)]


def _expected(
    run: str,
    if_match: Annotated[
        str | None,
        Header(
            description="`ETag` of the response of `GET /runs/{run}` that the caller has seen; "
            "`*`: change the run even if it has changed since",
            examples=['"3"'],
        ),
    ] = None,
) -> int | None:
    if if_match is None:
        raise ProblemError(
            HTTPStatus.PRECONDITION_REQUIRED,
            f"If-Match is missing for run {run}: send the ETag of GET /runs/{run} as If-Match, or "
            "`If-Match: *` to change the run regardless of other changes",
        )
    if if_match.strip() == "*":
        return None
    match = _ETAG.fullmatch(if_match.strip())
    return int(match[1]) if match else _NO_REVISION


Expected = Annotated[int | None, Depends(_expected)]
