"""The page that shows the OpenAPI document, and additions to the document that FastAPI generates.

The generated document needs three corrections. Middleware reads the header `Idempotency-Key`, so no
route declares it. Some routes require `If-Match`, but declare it as optional, so that they can
answer 428 to a request without it. All errors have the same schema, which FastAPI would repeat for
each status of each route.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse

from paceline_backend.api.errors import PROBLEM, ProblemDocument, documented
from paceline_backend.api.idempotency import HEADER, LONGEST_KEY
from paceline_backend.api.state import settings_of

router = APIRouter()

ASSETS = "/docs-assets"
_REFERENCES = "#/components/schemas/{model}"
_KEY = {
    "name": HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "string", "minLength": 1, "maxLength": LONGEST_KEY, "title": HEADER},
    "description": "text that is different for each of your requests; for a day, a request that "
    "repeats the text of an earlier request gets its response again, and changes nothing",
}


@router.get("/docs", include_in_schema=False)
def docs(request: Request) -> HTMLResponse:
    """Return the Swagger page, whose links include the path prefix of a proxy."""
    app, prefix = request.app, settings_of(request).path_prefix
    return get_swagger_ui_html(
        openapi_url=f"{prefix}{app.openapi_url}",
        title=f"{app.title}: API",
        oauth2_redirect_url=None,
        swagger_js_url=f"{prefix}{ASSETS}/swagger-ui-bundle.js",
        swagger_css_url=f"{prefix}{ASSETS}/swagger-ui.css",
        swagger_favicon_url=f"{prefix}{ASSETS}/favicon.png",
        swagger_ui_parameters={"validatorUrl": None},
    )


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
