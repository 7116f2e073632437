"""REST: the Python stacks of a run's ranks.

Only operators may request stacks: they name files and functions of the script, and each rank gets a
signal to write them.
"""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from paceline.wire import ENDED
from paceline.wire.asking import Dumps, DumpStacks, ReadStacks, Stacks, StackTrace
from paceline_backend.api.errors import RUN_REFUSALS, ProblemError, documented
from paceline_backend.api.logs.asking import ask, missing, refusal
from paceline_backend.api.logs.holders import LogHolder, holders
from paceline_backend.api.logs.models import AskedNode
from paceline_backend.api.rules import OPERATOR
from paceline_backend.api.runs import store_of
from paceline_backend.requests import ConflictError
from paceline_backend.requests.asking import Asker
from paceline_backend.store import Store, runs

# Deadline for ranks. A rank that is able to write its stacks takes a fraction of a second.
WRITING_S = 3.0  # seconds

_PAUSE_S = 0.15  # seconds between two polls

router = APIRouter(
    prefix="/runs/{run}",
    responses={
        **RUN_REFUSALS,
        **documented(HTTPStatus.CONFLICT, HTTPStatus.GATEWAY_TIMEOUT),
    },
    dependencies=[Depends(OPERATOR)],
)


class RankStack(BaseModel):
    """Python stacks of one rank."""

    rank: int = Field(examples=[2])
    node: str = Field(examples=["node-1"])
    text: str = Field(
        description="the Python stacks of all threads, innermost frame first, the main thread last",
        examples=['Current thread 0x00007f2c8a7fe740 (most recent call first):\n  File "…'],
    )
    frame: str = Field(
        description="innermost frame of the user's code, preferably of the main thread",
        examples=["train.py:14 in __getitem__"],
    )
    problem: str | None = Field(description="why there are no stacks", examples=[None])


class RunStacks(BaseModel):
    """Python stacks of the ranks of a run."""

    run: str = Field(examples=["3f9a1c07be52"])
    nodes: list[AskedNode]
    stacks: list[RankStack] = Field(description="sorted by rank")


@router.get("/stacks", response_model=RunStacks)
async def get_stacks(
    request: Request,
    run: str,
    rank: Annotated[
        int | None, Query(ge=0, lt=10**9, description="only this rank; default: all ranks")
    ] = None,
) -> Any:
    """Return the current Python stacks of a run's ranks, at most 64 ranks per node.

    The agents send each rank a signal whose handler `paceline.Session` has installed. This works
    even while the rank hangs, in Python or in C.
    """
    store, asker = store_of(request), request.app.state.asker
    row = await run_in_threadpool(runs.get, store, run)
    if row["state"] in ENDED:
        raise ConflictError(f"run {run} has ended: its ranks no longer have stacks")
    if row["driver"]:
        raise ConflictError(
            f"run {run}: its script starts the ranks itself, so agents cannot read their stacks; "
            "for Ray workers, run `ray stack` on their machine"
        )
    known = await run_in_threadpool(holders, store, run, rank)
    answers = await ask(store, asker, known, run, DumpStacks(rank))
    asked = [
        (holder, answer)
        for holder, answer in zip(known, answers, strict=True)
        if isinstance(answer, Dumps)
    ]
    if not asked and any(isinstance(answer, Exception) for answer in answers):
        raise refusal(answers)
    if not asked:
        words = missing(known, answers) or f"run {run} has no ranks: no node has started it"
        raise ProblemError(HTTPStatus.NOT_FOUND, words)
    parts = await asyncio.gather(*(_written(store, asker, run, *pair) for pair in asked))
    problems = [
        {"node": holder.node, "problem": str(answer) if isinstance(answer, Exception) else None}
        for holder, answer in zip(known, answers, strict=True)
    ]
    stacks = sorted((stack for part in parts for stack in part), key=lambda stack: stack["rank"])
    return {"run": run, "nodes": problems, "stacks": stacks}


async def _written(
    store: Store, asker: Asker, run: str, holder: LogHolder, dumps: Dumps
) -> list[dict[str, Any]]:
    stacks = {dump.rank: StackTrace(dump.rank, "", "", dump.why) for dump in dumps.ranks}
    since = [(dump.rank, dump.offset) for dump in dumps.ranks if not dump.why]
    until = time.monotonic() + WRITING_S
    while since and time.monotonic() < until:
        await asyncio.sleep(_PAUSE_S)
        [answer] = await ask(store, asker, [holder], run, ReadStacks(dumps.attempt, since))
        if not isinstance(answer, Stacks):
            break
        ended = {stack.rank for stack in answer.stacks if stack == stacks[stack.rank]}
        stacks.update({stack.rank: stack for stack in answer.stacks})
        # A rank whose text has not grown since the previous poll has written all of it.
        since = [(r, offset) for r, offset in since if r not in ended or not stacks[r].text]
    return [_shown(holder.node, stack) for stack in stacks.values()]


def _shown(node: str, stack: StackTrace) -> dict[str, Any]:
    silent = f"the rank wrote no stacks within {WRITING_S:g} s" if not stack.text else None
    return {
        "rank": stack.rank,
        "node": node,
        "text": stack.text,
        "frame": stack.frame,
        "problem": stack.why or silent,
    }
