"""Rejection of unknown query parameters.

If a misspelt parameter were ignored, the server would answer a different question: `?stat=running`
would list all runs. `create_app` runs `known_parameters` before every route.
"""

from __future__ import annotations

import difflib
from http import HTTPStatus

from fastapi import Request, params
from fastapi.dependencies.utils import get_flat_params
from fastapi.routing import APIRoute
from pydantic.fields import FieldInfo

from paceline_backend.api.errors import FieldError, ProblemError, short

# Maximum number of errors in a response.
_MOST_ERRORS = 20


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
        for name in unknown[:_MOST_ERRORS]
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
    """Return whether a parameter is of the query, by itself or as a field of a query model."""
    # FastAPI returns the fields of a query model as pydantic has them, which do not say where they
    # are from. No route has a model of another kind of parameters.
    return isinstance(info, params.Query) or not isinstance(info, params.Param)
