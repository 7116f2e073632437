"""REST: files that users take from Paceline to share: a run's report, and a trace of its steps."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import HTMLResponse, StreamingResponse
from pydantic import BaseModel, Field

from paceline_backend.api.errors import RUN_REFUSALS, ProblemError
from paceline_backend.api.models import RunCost
from paceline_backend.api.quality import Quality
from paceline_backend.api.queries import Steps
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.state import settings_of, store_of
from paceline_backend.api.telemetry import Chosen, Coverage, Fallbacks, InForce
from paceline_backend.insight import costs, document, quality, trace
from paceline_backend.insight.report import WARMUP_STEPS, FluidLimit, run_report
from paceline_backend.store import runs

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])

_HTML: dict[int | str, dict[str, Any]] = {200: {"content": {"text/html": {}}}}
_TRACE: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "JSON of the trace event format",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}


class PresetReport(BaseModel):
    """Results under a preset, without its first steps; null: no step remains."""

    steps: int = Field(examples=[100])
    step_time_s: float | None = Field(description="mean", examples=[0.26])
    se: float | None = Field(examples=[0.05])
    step_dif: float | None = Field(examples=[900.0])
    waste: float | None = Field(examples=[0.02])
    ett_mape: float | None = Field(examples=[0.02])
    time_over_fluid: float | None = Field(
        description="measured time ÷ fluid limit; 1 is perfect", examples=[1.04]
    )
    speedup: float | None = Field(
        description="speed-up over bsp, per unit of load; null: no steps under bsp", examples=[2.1]
    )
    speedup_limit: float | None = Field(description="speed-up at the fluid limit", examples=[2.2])
    moved: int = Field(
        description="total number of samples that moved to another rank", examples=[512]
    )
    across: int = Field(
        description="of these, samples whose new rank is on another node", examples=[128]
    )


class Report(BaseModel):
    """The run's presets side by side."""

    presets: dict[str, PresetReport]
    warmup: int = Field(description="steps left out after each policy's start", examples=[20])
    coasted: int = Field(
        description="steps left out because no controller planned them", examples=[0]
    )
    overhead_s: float | None = Field(
        description="per step: Σ(b_j/a_j) / Σ(1/a_j) + communication", examples=[0.008]
    )
    fluid: FluidLimit | None
    coverage: Coverage
    synchronisation: list[InForce] = Field(description="for relaxed synchronisers; otherwise empty")
    chosen: list[Chosen] = Field(
        description="for policies that choose synchronisers; otherwise empty"
    )
    fallbacks: list[Fallbacks] = Field(
        description="segments whose figures are those of an all-reduce; otherwise empty"
    )
    quality: Quality
    cost: RunCost | None = Field(description="null: for the same reasons as in `GET /runs/{id}`")


@router.get("/report", response_model=Report, responses=_HTML)
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
