"""Query parameters: those that several resources share, and the refusal of unknown ones.

If a misspelt parameter were ignored, the server would answer a different question: `?stat=running`
would list all runs. `create_app` runs `known_parameters` before every route.

Routes declare shared parameters by their types: `Steps` for a range of steps, `Points` for the size
of a chart, `Ranks`, `Since`, `Until`, and `Page` for a page of a list. `moment` declares any other
parameter that is a Unix time.
"""

from __future__ import annotations

import difflib
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Query, Request, params
from fastapi.dependencies.utils import get_flat_params
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paceline_backend.api.errors import MOST_ERRORS, FieldError, ProblemError, short
from paceline_backend.store import reads

# Greatest integer that a column of the database can store.
BIGGEST = 2**63 - 1

# Maximum absolute value of a Unix time in a request.
_LATEST = 1e12  # seconds

Points = Annotated[
    int,
    Query(
        ge=2,
        le=5000,
        description="maximum number of points; if the range has more steps, a point combines "
        "several steps",
    ),
]
Since = Annotated[
    float | None,
    Query(allow_inf_nan=False, description="only steps that ended at this Unix time or later"),
]
Until = Annotated[
    float | None,
    Query(allow_inf_nan=False, description="only steps that ended before this Unix time"),
]
Ranks = Annotated[
    str | None,
    Query(
        # Limited, because the database accepts only a limited number of ranks in a query.
        max_length=50_000,
        pattern=r"^\d{1,9}(,\d{1,9})*$",
        description="numbers of the ranks to return, separated by commas; default: all ranks",
        examples=["0,3"],
    ),
]


def moment(description: str) -> Any:
    """Declare a query parameter that is a Unix time."""
    return Query(ge=-_LATEST, le=_LATEST, allow_inf_nan=False, description=description)


class StepRange(BaseModel):
    """Query parameters that select steps of a run."""

    first: Annotated[
        int | None,
        Query(alias="from", ge=0, le=BIGGEST, description="first step of the range, included"),
    ] = None
    to: Annotated[
        int | None, Query(ge=0, le=BIGGEST, description="last step of the range, included")
    ] = None

    @property
    def span(self) -> reads.Range:
        """Return the pair of first and last step, as functions of `store` expect it."""
        return self.first, self.to


Steps = Annotated[StepRange, Query()]


def ranks_of(given: str | None) -> list[int] | None:
    """Parse a list of ranks; return None, which means all ranks, if no list is given."""
    return None if given is None else [int(rank) for rank in given.split(",")]


class PageQuery(BaseModel):
    """Query parameters that select a page of a list."""

    limit: Annotated[int, Query(ge=1, le=500)] = 50
    cursor: Annotated[
        str | None, Query(max_length=100, description="`next_cursor` of the previous page")
    ] = None


Page = Annotated[PageQuery, Query()]


async def known_parameters(request: Request) -> None:
    """Refuse query parameters that the route does not have."""
    if not request.query_params:
        return
    known = _names(request.scope["route"])
    unknown = [name for name in request.query_params if name not in known]
    if not unknown:
        return
    place = f"{request.method} {request.scope['path']}"
    errors = [
        FieldError(field=short(name), message=_message(name, place, known)).model_dump()
        for name in unknown[:MOST_ERRORS]
    ]
    detail = "; ".join(f"{each['field']}: {each['message']}" for each in errors)
    raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, detail, errors=errors)


def _message(name: str, place: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(short(name), known, n=1)
    end = (
        f"did you mean {close[0]}?" if close else f"known parameters: {', '.join(known) or 'none'}"
    )
    return f"no such query parameter of {short(place)}: {end}"


def _names(route: APIRoute) -> tuple[str, ...]:
    fields = get_flat_params(route.dependant)
    return tuple(field.alias for field in fields if _in_query(field.field_info))


def _in_query(info: FieldInfo) -> bool:
    # FastAPI returns the fields of a query model as plain pydantic fields, which do not show where
    # the parameter comes from. Routes use models only for query parameters, so a plain pydantic
    # field is always a query parameter.
    return isinstance(info, params.Query) or not isinstance(info, params.Param)
