"""Error responses: each is a problem document (RFC 9457)."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

import redis
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from paceline_backend.api.headers import security_headers
from paceline_backend.requests import ConflictError, InvalidRequestError
from paceline_backend.store import StoreRefusedError, StoreUnavailableError
from paceline_backend.store.audit import RevisionError
from paceline_backend.store.nodes.cordons import UnknownNodeError
from paceline_backend.store.runs import CursorError, RunEndedError, UnknownRunError

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
# Maximum number of field errors in a response, because a body of 1 MiB can cause half a million.
MOST_ERRORS = 20
# Maximum length of a text from the request that an error message quotes.
_LONGEST_QUOTE = 200  # characters


class ProblemError(Exception):
    """An error that the client gets as a problem document.

    `detail` names the fault and the fix, and `extra` has further members of the document.
    """

    def __init__(self, status: HTTPStatus, detail: str, **extra: Any) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.extra = extra


class FieldError(BaseModel):
    """An error in one field of a request."""

    field: str
    message: str


class ProblemDocument(BaseModel):
    """Problem document (RFC 9457).

    If the input is invalid, `errors` lists the faults; if a policy's name is misspelt, `suggestion`
    has a similar name. With status 412, `revision` is the current revision of the run, and `who`,
    `at` (Unix time) and `action` describe its last change.
    """

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    errors: list[FieldError] | None = None
    suggestion: str | None = None
    revision: int | None = None
    who: str | None = None
    at: float | None = None
    action: str | None = None


PROBLEM = ProblemDocument.__name__


def problem_response(status: HTTPStatus, detail: str, **extra: Any) -> JSONResponse:
    """Return a problem document as a response, for code that cannot raise `ProblemError`."""
    body = {
        "type": "about:blank",
        "title": status.phrase,
        "status": status.value,
        "detail": detail,
        **extra,
    }
    return JSONResponse(body, status.value, media_type=MEDIA_TYPE)


def forbidden(wanted: str, role: str) -> tuple[HTTPStatus, str]:
    """Return status and message for a known caller whose role does not suffice."""
    scope = wanted.partition(" ")[0]
    return HTTPStatus.FORBIDDEN, (
        f"this requires the role {wanted}, but yours is {role}: an admin creates another token "
        f"with `paceline token create NAME --scope {scope}`"
    )


def documented(*statuses: HTTPStatus) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route, which document these error statuses in OpenAPI."""
    schema = {"schema": {"$ref": f"#/components/schemas/{PROBLEM}"}}
    return {
        status.value: {"description": status.phrase, "content": {MEDIA_TYPE: schema}}
        for status in statuses
    }


# Errors of a route below `/runs/{run}`.
RUN_REFUSALS = documented(
    HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE
)


def install(app: FastAPI) -> None:
    """Install handlers on `app` that turn all errors into problem documents."""

    @app.exception_handler(ProblemError)
    async def problem(_: Request, error: ProblemError) -> JSONResponse:
        return problem_response(error.status, error.detail, **error.extra)

    @app.exception_handler(UnknownRunError)
    async def unknown_run(_: Request, error: UnknownRunError) -> JSONResponse:
        return problem_response(HTTPStatus.NOT_FOUND, str(error))

    @app.exception_handler(UnknownNodeError)
    async def unknown_node(_: Request, error: UnknownNodeError) -> JSONResponse:
        return problem_response(HTTPStatus.NOT_FOUND, str(error))

    @app.exception_handler(RunEndedError)
    async def run_ended(_: Request, error: RunEndedError) -> JSONResponse:
        return problem_response(HTTPStatus.CONFLICT, str(error))

    @app.exception_handler(ConflictError)
    async def conflict(_: Request, error: ConflictError) -> JSONResponse:
        return problem_response(HTTPStatus.CONFLICT, str(error))

    @app.exception_handler(RevisionError)
    async def changed_since(_: Request, error: RevisionError) -> JSONResponse:
        change = error.change or {}
        members = {"who": error.who, **{name: change.get(name) for name in ("at", "action")}}
        return problem_response(
            HTTPStatus.PRECONDITION_FAILED, str(error), revision=error.revision, **members
        )

    @app.exception_handler(InvalidRequestError)
    async def invalid_request(_: Request, error: InvalidRequestError) -> JSONResponse:
        extra = {"suggestion": error.suggestion} if error.suggestion else {}
        errors = [{"field": error.field, "message": error.message}]
        status = HTTPStatus.UNPROCESSABLE_ENTITY
        return problem_response(status, str(error), errors=errors, **extra)

    @app.exception_handler(CursorError)
    async def cursor(_: Request, error: CursorError) -> JSONResponse:
        errors = [{"field": "cursor", "message": str(error)}]
        return problem_response(HTTPStatus.UNPROCESSABLE_ENTITY, str(error), errors=errors)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        detail = f"{request.method} {request.url.path}: {status.description or status.phrase}"
        response = problem_response(status, detail)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        errors = [_field_error(item) for item in error.errors()[:MOST_ERRORS]]
        detail = "; ".join(f"{item['field']}: {item['message']}" for item in errors)
        return problem_response(HTTPStatus.UNPROCESSABLE_ENTITY, detail, errors=errors)

    @app.exception_handler(redis.RedisError)
    async def bus(_: Request, error: redis.RedisError) -> JSONResponse:
        return problem_response(
            HTTPStatus.SERVICE_UNAVAILABLE, f"the bus does not answer; try again: {error}"
        )

    @app.exception_handler(StoreUnavailableError)
    async def database(request: Request, error: StoreUnavailableError) -> JSONResponse:
        log.error("%s %s: %s", request.method, request.url.path, error)
        return problem_response(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}; try again")

    @app.exception_handler(StoreRefusedError)
    async def refused(request: Request, error: StoreRefusedError) -> JSONResponse:
        log.warning("%s %s: %s", request.method, request.url.path, error)
        detail = "the database rejected a value of this request; see the server's log"
        return problem_response(HTTPStatus.UNPROCESSABLE_ENTITY, detail)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:
        # Starlette raises the error again after this response, so the traceback gets into the log.
        response = problem_response(
            HTTPStatus.INTERNAL_SERVER_ERROR,
            f"{type(error).__name__}: internal error of the server; see the server's log",
        )
        # This response bypasses the middleware that sets the headers of all other responses.
        response.headers.update(security_headers(request.scope))
        return response


def _field_error(item: Any) -> dict[str, str]:
    place = [str(part) for part in item["loc"] if part != "[key]"]
    # The first item is "body", "query" or "path".
    field = ".".join(place[1:]) or place[0]
    message = item["msg"].removeprefix("Value error, ")
    given = item.get("input")
    if isinstance(given, str | int | float) and item["type"] != "value_error":
        message += f" (got {short(repr(given))})"
    return {"field": short(field), "message": message}


def short(words: str) -> str:
    """Shorten a text from the request, so that an error message can quote it."""
    return words if len(words) <= _LONGEST_QUOTE else words[:_LONGEST_QUOTE] + "…"
