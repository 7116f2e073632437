"""REST: whether a run hangs, and which ranks wait for which."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request

from paceline_backend.api.errors import RUN_REFUSALS
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.runs import store_of
from paceline_backend.insight import hangs
from paceline_backend.store import runs

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])


@router.get("/hang")
def get_hang(
    request: Request,
    run: str,
    after_s: Annotated[
        float, Query(ge=0, le=86_400, description="minimum time without progress, seconds")
    ] = hangs.LEAST_S,
) -> hangs.Hang:
    """Return whether the run hangs, and which ranks wait.

    A run hangs if no step has completed for `after_s`, and for 10 times the duration of a step.
    """
    with store_of(request).read() as connection:
        return hangs.look(connection, runs.key_of(connection, run), after_s)
