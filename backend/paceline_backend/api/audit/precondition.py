"""`If-Match`: a change says which revision of the run it is meant for."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, Header, Request

from paceline_backend.api.errors import ProblemError, documented
from paceline_backend.api.identity import identity_of
from paceline_backend.store.audit import Requester

# What a route that changes a run answers, besides a run's other refusals.
CHANGE_REFUSALS = documented(HTTPStatus.PRECONDITION_FAILED, HTTPStatus.PRECONDITION_REQUIRED)

_NO_REVISION = -1  # that no run ever has
_ETAG = re.compile(r'"(\d{1,18})"')


def etag(revision: int) -> str:
    """The header `ETag` of a run with this revision."""
    return f'"{revision}"'


def requester_of(request: Request, via: str = "", why: str = "", operator: str = "") -> Requester:
    """Who asks, for the audit log.

    Args:
        request: what is asked.
        via: the program that asks, as it calls itself.
        why: the reason that was given.
        operator: the name that who asks gave; a token of one person has its own.
    """
    identity = identity_of(request)
    given = operator.strip() if identity.shared else ""
    return Requester(identity.name, identity.scope, identity.address, via, why, given)


def _expected(
    run: str,
    if_match: Annotated[
        str | None,
        Header(
            description="the `ETag` of `GET /runs/{run}` that the change is meant for; `*`: any",
            examples=['"3"'],
        ),
    ] = None,
) -> int | None:
    """The revision that a change is meant for; None: any.

    Raises:
        ProblemError: the request does not say.
    """
    if if_match is None:
        raise ProblemError(
            HTTPStatus.PRECONDITION_REQUIRED,
            f"say which revision of run {run} you have seen: send the ETag of GET /runs/{run} as "
            "If-Match, or `If-Match: *` to change it whatever others have done",
        )
    if if_match.strip() == "*":
        return None
    match = _ETAG.fullmatch(if_match.strip())
    return int(match[1]) if match else _NO_REVISION


Expected = Annotated[int | None, Depends(_expected)]
