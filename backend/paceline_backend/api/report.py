"""REST: a run's report, and a trace of its steps, as files that users can share."""

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
    """Results under a preset, without the steps of the warm-up; null: unknown, or no steps."""

    steps: int = Field(examples=[100])
    step_time_s: float | None = Field(
        description="mean step time in seconds; null: no steps", examples=[0.26]
    )
    se: float | None = Field(examples=[0.05])
    step_dif: float | None = Field(examples=[900.0])
    waste: float | None = Field(examples=[0.02])
    ett_mape: float | None = Field(examples=[0.02])
    time_over_fluid: float | None = Field(
        description="measured time ÷ fluid limit; 1: no plan could be faster; null: unknown",
        examples=[1.04],
    )
    speedup: float | None = Field(
        description="speed-up over the preset bsp: time per unit of load under bsp ÷ time per unit "
        "of load under the preset; null: no steps under bsp",
        examples=[2.1],
    )
    speedup_limit: float | None = Field(
        description="speed-up over the preset bsp that the fluid limit would give; null: unknown",
        examples=[2.2],
    )
    moved: int = Field(
        description="number of samples that moved to another rank under the preset",
        examples=[512],
    )
    across: int = Field(
        description="number of samples that moved to a rank on another node under the preset",
        examples=[128],
    )


class Report(BaseModel):
    """Results of a run, by preset."""

    presets: dict[str, PresetReport]
    warmup: int = Field(
        description="number of steps that are left out after each start of a policy", examples=[20]
    )
    coasted: int = Field(
        description="number of steps that are left out because no policy planned them",
        examples=[0],
    )
    overhead_s: float | None = Field(
        description="overhead of a step in the fluid limit, in seconds: Σ(b_j/a_j) / Σ(1/a_j) + "
        "communication, for a_j seconds per size unit and b_j seconds per step of rank j; null: "
        "unknown",
        examples=[0.008],
    )
    fluid: FluidLimit | None = Field(description="parameters of the fluid limit; null: unknown")
    coverage: Coverage
    synchronisation: list[InForce] = Field(
        description="rounds of relaxed synchronisation, by policy version; empty: no rounds"
    )
    chosen: list[Chosen] = Field(
        description="choices of a synchroniser by policies; empty: no policy of the run chooses "
        "its synchroniser"
    )
    fallbacks: list[Fallbacks] = Field(
        description="segments whose gradients were all-reduced although their policy relaxes "
        "synchronisation, by policy version and reason; empty: none"
    )
    quality: Quality
    cost: RunCost | None = Field(
        description="cost of the run so far; null: no price is set, no step was counted yet, or "
        "the run is simulated"
    )


@router.get("/report", response_model=Report, responses=_HTML)
def get_report(
    request: Request,
    run: str,
    warmup: Annotated[
        int,
        Query(
            ge=0,
            le=100_000,
            description="number of steps to leave out after each start of a policy",
        ),
    ] = WARMUP_STEPS,
    form: Annotated[
        Literal["json", "html"],
        Query(
            alias="format",
            description="format of the report; html: a page in one file, which also has verdict, "
            "charts, switches and nodes",
        ),
    ] = "json",
) -> Any:
    """Return a run's results under each of its presets, as JSON or as an HTML page."""
    store, price = store_of(request), settings_of(request).hour_price
    if form == "json":
        figures, row = run_report(store, run, warmup), runs.get(store, run)
        cost = costs.of_run(row["figures"], row["backend"], price)
        return {**figures, "quality": quality.of_run(store, run), "cost": cost}
    return HTMLResponse(document.render(document.read(store, run, warmup, price)))


@router.get("/trace", responses=_TRACE)
def get_trace(request: Request, run: str, steps: Steps) -> StreamingResponse:
    """Return a range of steps, by default the newest 100, as a trace for Perfetto."""
    first, to = steps.span
    if first is not None and to is not None and first > to:
        errors = [{"field": "to", "message": "is before `from`"}]
        message = f"to: step {to} is before step {first} (from)"
        raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, message, errors=errors)
    traced = trace.begin(store_of(request), run, steps.span)
    return StreamingResponse(trace.stream(traced), media_type="application/json")
