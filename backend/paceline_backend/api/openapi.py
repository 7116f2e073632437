"""Completion of the OpenAPI document that FastAPI generates.

FastAPI lacks three facts. Middleware reads `Idempotency-Key`, so no route declares this header.
Routes declare `If-Match` as optional so that they can answer 428 without it, although some require
it. And all errors have the same schema, which FastAPI would repeat for each status of each route.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

from paceline_backend.api.errors import PROBLEM, ProblemDocument, documented
from paceline_backend.api.idempotency import HEADER, LONGEST

_REFERENCES = "#/components/schemas/{model}"
_KEY = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "string", "minLength": 1, "maxLength": LONGEST, "title": HEADER},
    "description": "a text that is unique among your requests: for a day, a repeated request with "
    "it gets the first response and changes nothing",
}


def complete(app: FastAPI) -> None:
    """Make `app.openapi()` return the completed document."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(plain())
        return plain()

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    problem = ProblemDocument.model_json_schema(ref_template=_REFERENCES)
    schemas.update(problem.pop("$defs"))
    schemas[PROBLEM] = problem
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", ()):
                if parameter["name"].lower() == "if-match":
                    required = str(HTTPStatus.PRECONDITION_REQUIRED.value)
                    parameter["required"] = required in operation["responses"]
            if method == "post" and path.startswith("/api/v1/"):
                operation.setdefault("parameters", []).append(_KEY)
                for status, answer in documented(HTTPStatus.CONFLICT).items():
                    operation["responses"].setdefault(str(status), answer)
