"""REST: whether a run hangs, and which ranks wait for which."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field

from paceline.wire import Phase
from paceline_backend.api.errors import RUN_REFUSALS
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.runs import store_of
from paceline_backend.insight import hangs
from paceline_backend.store import runs

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])


class RankPhase(BaseModel):
    """What a rank has been doing for ten seconds or longer."""

    rank: int = Field(examples=[2])
    step: int = Field(description="that it is in, or its last; -1: none yet", examples=[120])
    phase: Phase = Field(
        description="plan: waits for the plan; data: waits for its batch; compute: in the loop's "
        "body; sync: in the reduction of the gradients; checkpoint: saves one; "
        "script: outside of the loop, or not yet in it",
        examples=["data"],
    )
    since_s: float = Field(description="how long, when it was heard last", examples=[96.0])


class RunHang(BaseModel):
    """What keeps a run from ending its next step."""

    hung: bool = Field(description="ranks wait for what does not come")
    since_s: float = Field(description="0: ranks go on", examples=[95.0])
    expected_s: float | None = Field(
        description="the newest steps' median time; null: no step has ended", examples=[0.4]
    )
    step: int | None = Field(
        description="newest that all ranks have told of: each tells when it begins the next",
        examples=[119],
    )
    phases: list[RankPhase] = Field(description="of ranks that do something for long")
    waiting: list[int] = Field(description="ranks", examples=[[0, 1, 3]])
    holding: list[int] = Field(description="ranks for which they wait", examples=[[2]])
    silent: list[int] = Field(description="those of them that say nothing", examples=[[]])
    words: str = Field(
        description="empty: ranks go on",
        examples=[
            "No step has ended for 95 s; a step takes 0.4 s. Ranks 0, 1 and 3 are in the reduction "
            "of the gradients. They wait for rank 2, which is waiting for its batch."
        ],
    )


@router.get("/hang", response_model=RunHang)
def get_hang(
    request: Request,
    run: str,
    after_s: Annotated[
        float, Query(ge=0, le=86_400, description="so long nothing has happened at least")
    ] = hangs.LEAST_S,
) -> Any:
    """Whether the run hangs: no step for this long, and for 10 times a step's time; who waits."""
    with store_of(request).read() as connection:
        hang = hangs.look(connection, runs.key_of(connection, run), after_s)
    fields = ("rank", "step", "phase", "since_s")
    phases = [{name: getattr(phase, name) for name in fields} for phase in hang.phases]
    return {**vars(hang), "phases": phases}
