"""REST: a run's report, and a trace of its steps."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, StreamingResponse

from paceline_backend.api import report_models
from paceline_backend.api.errors import RUN_REFUSALS, ProblemError
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.runs import settings_of, store_of
from paceline_backend.api.telemetry import Steps
from paceline_backend.insight import costs, document, quality, trace
from paceline_backend.insight.report import WARMUP_STEPS, run_report
from paceline_backend.store import runs

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])

_HTML: dict[int | str, dict[str, Any]] = {200: {"content": {"text/html": {}}}}
_TRACE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "JSON of the trace event format",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}


@router.get("/report", response_model=report_models.Report, responses=_HTML)
def get_report(
    request: Request,
    run: str,
    warmup: Annotated[
        int, Query(ge=0, le=100_000, description="steps left out after each policy's start")
    ] = WARMUP_STEPS,
    form: Annotated[
        Literal["json", "html"],
        Query(alias="format", description="html: a page with all results, in one file"),
    ] = "json",
) -> Any:
    """Return the results of each preset of the run.

    As HTML, the report also has the verdict, charts, switches and nodes.
    """
    store, price = store_of(request), settings_of(request).hour_price
    if form == "json":
        figures, row = run_report(store, run, warmup), runs.get(store, run)
        cost = costs.of_run(row["figures"], row["backend"], price)
        return {**figures, "quality": quality.of_run(store, run), "cost": cost}
    return HTMLResponse(document.render(document.read(store, run, warmup, price)))


@router.get("/trace", responses=_TRACE)
def get_trace(request: Request, run: str, steps: Steps) -> StreamingResponse:
    """Return a range of steps as a trace for Perfetto; by default the newest 100."""
    first, to = steps.span
    if first is not None and to is not None and first > to:
        errors = [{"field": "to", "message": "is before `from`"}]
        message = f"to: step {to} is before from, step {first}"
        raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, message, errors=errors)
    traced = trace.begin(store_of(request), run, steps.span)
    return StreamingResponse(trace.stream(traced), media_type="application/json")
