"""REST: evidence about a run: which ranks slow it down, and what its ranks wait for.

The verdict names the causes of lost time and their costs. The attribution states which share of the
ranks' waiting time is due to each cause, and repeats the verdict's first cause. The attribution
therefore uses the verdict that `judged` returns, and ends at the last step of the verdict. Results
that take long to compute are cached for some seconds. The timeline shows the phases of ranks within
a few steps. If the run hangs, `hang` names the ranks that make no progress, and `stacks` shows the
code that each rank is executing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool

from paceline.policies.base import Floats, Ints
from paceline.wire import ENDED
from paceline.wire.asking import Dumps, DumpStacks, ReadStacks, Stacks, StackTrace
from paceline_backend.api.asking import AskedNode, LogHolder, ask, holders, missing, refusal
from paceline_backend.api.errors import RUN_REFUSALS, ProblemError, documented
from paceline_backend.api.queries import Points, Steps
from paceline_backend.api.rules import OPERATOR, VIEWER
from paceline_backend.api.state import reused_of, settings_of, store_of
from paceline_backend.insight import hangs, replacements
from paceline_backend.insight import verdict as verdicts
from paceline_backend.insight.attribution import CAUSES, Attribution, attribute, read_rows
from paceline_backend.insight.costs import SIMULATED
from paceline_backend.insight.verdict import SlowNode, TimeLoss, Verdict, slow_node, throttled
from paceline_backend.insight.whatif.answer import Saving
from paceline_backend.requests import ConflictError, InvalidRequestError
from paceline_backend.requests.asking import Asker
from paceline_backend.store import Store, attempts, reads, runs
from paceline_backend.store.nodes import states_of_gpus
from paceline_backend.store.reads import Range, bucket_of

# Each route has its own router, so that `create_app` can choose the order of paths in the OpenAPI
# document.
verdict_router = APIRouter(
    prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)]
)
attribution_router = APIRouter(
    prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)]
)
timeline_router = APIRouter(
    prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)]
)
hang_router = APIRouter(
    prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)]
)
# Only operators may request stacks: a stack names files and functions of the script, and a signal
# interrupts each rank to make it write its stack.
stacks_router = APIRouter(
    prefix="/runs/{run}",
    responses={
        **RUN_REFUSALS,
        **documented(HTTPStatus.CONFLICT, HTTPStatus.GATEWAY_TIMEOUT),
    },
    dependencies=[Depends(OPERATOR)],
)


class Cause(BaseModel):
    """A cause of lost time."""

    kind: str = Field(
        description="kind of the cause: node, transient, periodic, input, data, network, between "
        "(time between steps) or planning",
        examples=["node"],
    )
    ranks: list[int] = Field(
        description="ranks that are responsible for the lost time; empty: no particular ranks",
        examples=[[3]],
    )
    who: str = Field(
        description="the responsible ranks in words; empty: no particular ranks",
        examples=["Rank 3"],
    )
    nodes: list[str] = Field(
        description="nodes of the responsible ranks; empty: unknown", examples=[["vm-3"]]
    )
    since: int | None = Field(
        description="first step of the cause; null: the cause may have begun before the verdict's "
        "range of steps",
        examples=[1204],
    )
    until: int | None = Field(description="last step of the cause; null: the cause is still active")
    factor: float | None = Field(
        description="slowdown: time of the responsible ranks in the affected steps ÷ their time "
        "without the cause; null: not applicable",
        examples=[2.7],
    )
    trend: tuple[float, float] | None = Field(
        description="slowdown factor when it began to grow, and slowdown factor now; null: the "
        "factor does not grow"
    )
    period: int | None = Field(
        description="number of steps from one occurrence of the cause to the next; null: not "
        "periodic"
    )
    times: int = Field(
        description="number of occurrences of the cause; 1: continuous, or it occurred once",
        examples=[1],
    )
    hidden: bool = Field(
        description="true: the plan gives the slow ranks smaller batches, which compensates for "
        "the cause"
    )
    cost_s: float = Field(
        description="seconds that the cause costs: the measured wall time of the verdict's steps "
        "minus the wall time that they would have taken without the cause",
        examples=[41.0],
    )
    share: float = Field(
        description="share of the verdict's wall time that the cause costs", examples=[0.26]
    )
    worker_hours: float = Field(
        description="hours that the cause costs, times the number of ranks", examples=[0.09]
    )
    words: str = Field(examples=["Rank 3 computes 2.7 × slower since step 1,204."])
    what: str = Field(
        description="the cause as a clause, without its cost",
        examples=["rank 3 on vm-3 computes 2.7 × slower since step 1,204"],
    )
    to_do: str = Field(
        description="recommended action, as a clause", examples=["look at its machine"]
    )


class RunVerdict(BaseModel):
    """Reasons why a run takes longer than it could."""

    model_config = ConfigDict(populate_by_name=True)

    from_: int | None = Field(
        alias="from",
        description="first step that the verdict covers; null: no steps",
        examples=[1000],
    )
    to: int | None = Field(
        description="last step that the verdict covers; null: no steps", examples=[1499]
    )
    steps: int = Field(
        description="number of steps that the verdict uses: those in which at least two ranks had "
        "samples",
        examples=[500],
    )
    wall_s: float = Field(
        description="wall time in seconds of the steps that the verdict uses", examples=[158.0]
    )
    waste: float = Field(
        description="mean share of the wall time that a rank spends waiting for slower ranks",
        examples=[0.24],
    )
    noise: float = Field(
        description="random variation of a rank's compute time: its standard deviation ÷ its usual "
        "value, as the median over the ranks",
        examples=[0.02],
    )
    cost_s: float = Field(
        description="seconds of wall time that all causes cost together", examples=[41.0]
    )
    causes: list[Cause] = Field(
        description="significant causes: first the active ones, then the past ones, each by cost"
    )
    words: str = Field(examples=["Rank 3 computes 2.7 × slower since step 1,204."])
    level: str = Field(
        description="severity in the newest steps: healthy, watch (a warning), held-up (slowed "
        "down), or unknown (too few steps)",
        examples=["held-up"],
    )
    what: str = Field(
        description="clause that describes the run in its newest steps, for example its first "
        "cause; empty: too few steps",
        examples=["rank 3 on vm-3 computes 2.7 × slower since step 1,204"],
    )
    was: str = Field(
        description="`what` in the past tense, for a run that has ended",
        examples=["rank 3 on vm-3 computed 2.7 × slower since step 1,204"],
    )
    lost_now: float = Field(
        description="share of the newest steps' wall time that active causes cost, without causes "
        "that the plan compensates for",
        examples=[0.26],
    )
    waste_now: float = Field(
        description="mean share of the newest steps' wall time that a rank spends waiting for "
        "slower ranks",
        examples=[0.24],
    )
    step_time_s: float | None = Field(
        description="mean wall time in seconds of the newest 50 steps; null: too few steps",
        examples=[0.609],
    )
    limit_s: float | None = Field(
        description="mean step time in seconds of the newest 50 steps if their load could be "
        "divided so finely that all ranks finish together (fluid limit); null: unknown",
        examples=[0.446],
    )


class Price(BaseModel):
    """Price of one worker-hour."""

    amount: float = Field(examples=[2.5])
    currency: str = Field(examples=["EUR"])


class PricedVerdict(RunVerdict):
    """A run's verdict, with the price of a worker-hour."""

    price: Price | None = Field(
        description="price of a worker-hour, from `paceline server --hour-price`; null: no price "
        "is set, or the run is simulated"
    )


@verdict_router.get("/verdict", response_model=PricedVerdict)
def get_verdict(request: Request, run: str, steps: Steps) -> Any:
    """Return the causes of lost time and their costs, by default in the newest 500 steps."""
    with store_of(request).read() as connection:
        key = runs.key_of(connection, run)
        simulated = runs.terms(connection, [run])[run].backend == SIMULATED
    _, verdict, _ = judged(request, key, steps.span)
    price = settings_of(request).hour_price
    shown = None if price is None or simulated else vars(price)
    return {**verdicts.facts_of(verdict), "price": shown}


def judged(
    request: Request, run: int, span: Range
) -> tuple[verdicts.ObservedSteps, verdicts.Verdict, attempts.Placement | None]:
    """Return the observed steps in a range, the verdict on them, and the ranks' placement.

    `run` is the key of the run. The placement is the one in the last step of the range. The result
    is cached, so it may be some seconds old.
    """

    def judge() -> tuple[verdicts.ObservedSteps, verdicts.Verdict, attempts.Placement | None]:
        with store_of(request).read() as connection:
            placement = attempts.placement(connection, run, span[1])
            seen = verdicts.read_observed(connection, run, span, placement)
        # `judge` computes for a while, so the database connection is returned before the call.
        return seen, verdicts.judge(seen), placement

    return reused_of(request).get(("verdict", run, span), judge)


class Shares(BaseModel):
    """Share of each cause in the straggler problem (SP) of all steps.

    The shares add up to 1. All are 0 if no rank waited.
    """

    data: float = Field(description="share of SP due to uneven loads of batches", examples=[0.1])
    node: float = Field(
        description="share of SP due to lasting differences in the ranks' speed", examples=[0.8]
    )
    transient: float = Field(
        description="share of SP due to temporary slowness and noise", examples=[0.1]
    )
    input: float = Field(description="share of SP due to slow data loading", examples=[0.0])


class AttributedWorker(BaseModel):
    """Waiting that a rank causes. `data`, `node`, `transient` and `input` add up to `caused`."""

    rank: int = Field(examples=[3])
    on_node: str | None = Field(description="node of the rank; null: unknown", examples=["n2"])
    cause: str = Field(
        description="kind of the verdict's first cause for which the rank is responsible; none: "
        "there is no such cause",
        examples=["node"],
    )
    factor: float | None = Field(
        description="the rank's time ÷ the median rank's time, at equal load; null: too few steps",
        examples=[2.1],
    )
    slow_steps: list[tuple[int, int]] = Field(
        description="first and last step of each span in which the rank was temporarily slow",
        examples=[[]],
    )
    caused: float = Field(
        description="time that all ranks waited for this rank ÷ their total waiting time",
        examples=[0.78],
    )
    data: float = Field(examples=[0.0])
    node: float = Field(examples=[0.75])
    transient: float = Field(examples=[0.03])
    input: float = Field(examples=[0.0])
    hidden: float = Field(
        description="seconds per step that a slow rank saves because its batches are smaller than "
        "the mean batch; 0: the rank saves nothing, or is not slow",
        examples=[0.0],
    )
    words: str = Field(examples=["Rank 3 computes 2.1× slower than the median at equal load."])


class AttributionOverTime(BaseModel):
    """Straggler problem (SP) by cause, in seconds; each point is the mean over `bucket` steps."""

    bucket: int = Field(description="number of steps per point", examples=[1])
    step: list[int] = Field(description="first step of each point", examples=[[0, 1]])
    data: list[float] = Field(examples=[[0.0, 0.01]])
    node: list[float] = Field(examples=[[0.1, 0.1]])
    transient: list[float] = Field(examples=[[0.01, 0.02]])
    input: list[float] = Field(examples=[[0.0, 0.0]])


class RunAttribution(BaseModel):
    """Reasons why the ranks of a run wait for each other."""

    model_config = ConfigDict(populate_by_name=True)

    from_: int | None = Field(
        alias="from",
        description="first step that the attribution covers; null: no steps",
        examples=[0],
    )
    to: int | None = Field(
        description="last step that the attribution covers; null: no steps", examples=[99]
    )
    steps: int = Field(
        description="number of steps that the attribution uses: those in which at least two ranks "
        "had samples",
        examples=[100],
    )
    se: float = Field(
        description="mean straggler effect (SE), from the times at which ranks are ready for the "
        "reduction",
        examples=[0.9],
    )
    sp_s: float = Field(
        description="mean straggler problem (SP) in seconds per step, from the times at which "
        "ranks are ready for the reduction",
        examples=[0.11],
    )
    waste: float = Field(
        description="mean share of a rank's time that it spends waiting for slower ranks",
        examples=[0.4],
    )
    shares: Shares
    cause: str = Field(
        description="kind of the verdict's first cause; none: the verdict has no cause",
        examples=["node"],
    )
    ranks: list[int] = Field(
        description="ranks that are responsible for the verdict's first cause, ascending",
        examples=[[3]],
    )
    node: str | None = Field(
        description="node that runs all slow ranks; null: no rank is slow, slow ranks are on "
        "several nodes, or the run has only one node",
        examples=["n2"],
    )
    factor: float | None = Field(
        description="time of the slow ranks on `node` ÷ time of the ranks on other nodes, at equal "
        "load; null: unknown, or `node` is null",
        examples=[2.1],
    )
    saving: Saving | None = Field(
        description="forecast of the step time if `node` were as fast as the other nodes; null: no "
        "forecast yet, or `node` is null"
    )
    words: str = Field(examples=["Rank 3 computes 2.1× slower than the median at equal load."])
    workers: list[AttributedWorker]
    over_time: AttributionOverTime


@attribution_router.get("/attribution", response_model=RunAttribution)
def get_attribution(request: Request, run: str, steps: Steps, points: Points = 200) -> Any:
    """Return why ranks wait for each other, by default in the newest 100 steps."""
    with store_of(request).read() as connection:
        key = runs.key_of(connection, run)
    asked = ("attribution", key, steps.span, points)
    return reused_of(request).get(asked, lambda: _attributed(request, key, steps.span, points))


def _attributed(request: Request, run: int, span: Range, points: int) -> dict[str, Any]:
    seen, verdict, placement = judged(request, run, span)
    # The cached verdict may be some seconds old, so leave out steps that have completed since then.
    if len(seen.step):
        span = (span[0], int(seen.step[-1]))
    with store_of(request).read() as connection:
        rows = read_rows(connection, run, span, placement)
    # `attribute` computes for a while, so the database connection is returned before the call.
    result = attribute(rows)
    nodes = None if placement is None else placement.nodes
    slow, forecast, gpus = slow_node(verdict), None, []
    if slow is not None and placement is not None:
        with store_of(request).read() as connection:
            forecast = replacements.forecast_of(connection, run, slow.node, placement.since)
            gpus = states_of_gpus(connection, slow.node)
    return _answer(result, verdict, points, nodes, slow, gpus) | {"saving": forecast}


def _answer(
    attribution: Attribution,
    verdict: Verdict,
    points: int,
    nodes: Sequence[str] | None,
    slow: SlowNode | None,
    gpus: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    step = attribution.step
    cause = verdict.causes[0] if verdict.causes else None
    of_node = [] if slow is None else [slow.words, *throttled(gpus)]
    return {
        "from": int(step[0]) if len(step) else None,
        "to": int(step[-1]) if len(step) else None,
        "steps": len(step),
        "se": attribution.se,
        "sp_s": float(attribution.sp_s.mean()) if len(step) else 0.0,
        "waste": attribution.waste,
        "shares": attribution.shares,
        "cause": _kind(cause),
        "ranks": list(cause.ranks) if cause else [],
        "node": None if slow is None else slow.node,
        "factor": None if slow is None else slow.factor,
        "words": " ".join([*of_node, verdicts.words(verdict)]),
        "workers": [
            {
                **vars(worker),
                "on_node": _at(nodes, worker.rank),
                "cause": _kind(verdicts.cause_of(verdict, worker.rank)),
                "words": verdicts.rank_words(verdict, worker.rank, worker.factor),
            }
            for worker in attribution.workers
        ],
        "over_time": _over_time(step, attribution.parts, points),
    }


def _kind(cause: TimeLoss | None) -> str:
    return "none" if cause is None else cause.kind


def _at(nodes: Sequence[str] | None, rank: int) -> str | None:
    return nodes[rank] if nodes is not None and rank < len(nodes) else None


def _over_time(step: Ints, parts: Any, points: int) -> dict[str, Any]:
    if not len(step):
        return {"bucket": 1, "step": [], **{name: [] for name in CAUSES}}
    bucket = bucket_of(int(step[0]), int(step[-1]), points)
    starts = np.flatnonzero(np.diff(step // bucket, prepend=-1))
    counts = np.diff(np.append(starts, len(step)))
    means: dict[str, Floats] = {
        name: np.add.reduceat(parts[name], starts) / counts for name in CAUSES
    }
    return {
        "bucket": bucket,
        "step": step[starts].tolist(),
        **{name: values.tolist() for name, values in means.items()},
    }


# Number of newest steps in a timeline if the request gives no range.
_PROFILED_STEPS = 3
_MOST_PROFILED_STEPS = 50
_MOST_PROFILED_RANKS = 64

Column = list[float | None]


class RunTimeline(BaseModel):
    """Phases of ranks, as columns ``column[rank][step]`` with ranks in the order of `ranks`.

    A value is null if there is no record of the rank's step.
    """

    model_config = ConfigDict(populate_by_name=True)

    from_: int = Field(alias="from", description="first step of the timeline", examples=[118])
    to: int = Field(description="last step of the timeline", examples=[120])
    ranks: list[int] = Field(examples=[[0]])
    step: list[int] = Field(examples=[[118, 119, 120]])
    began_at: list[Column] = Field(
        description="Unix time at which a rank starts to wait for its data loader, by the clock of "
        "the rank's node"
    )
    data_s: list[Column]
    compute_s: list[Column]
    wait_s: list[Column] = Field(description="seconds that a rank waits for slower ranks")
    reduce_s: list[Column] = Field(
        description="seconds of the gradient reduction, without waiting for slower ranks"
    )
    rest_s: list[Column] = Field(
        description="seconds of the rest of the step, in the optimiser and the script"
    )


@timeline_router.get("/timeline", response_model=RunTimeline)
def get_timeline(
    request: Request,
    run: str,
    ranks: Annotated[
        str,
        Query(
            max_length=640,
            pattern=r"^\d{1,9}(,\d{1,9})*$",
            description="ranks to show, at most 64, separated by commas",
            examples=["0,3"],
        ),
    ],
    steps: Steps,
) -> Any:
    """Return the phases of ranks in at most 50 steps, by default the newest 3."""
    chosen = list(dict.fromkeys(map(int, ranks.split(","))))
    if len(chosen) > _MOST_PROFILED_RANKS:
        raise InvalidRequestError("ranks", f"name at most {_MOST_PROFILED_RANKS} ranks")
    with store_of(request).read() as connection:
        key = runs.key_of(connection, run)
        span = reads.newest_steps(connection, key, _PROFILED_STEPS) or (0, 0)
        first, to = steps.span
        span = (span[0] if first is None else first, span[1] if to is None else to)
        if not 0 <= span[1] - span[0] < _MOST_PROFILED_STEPS:
            words = f"give a range of 1 to {_MOST_PROFILED_STEPS} steps, such as from=100&to=102"
            raise InvalidRequestError("to", words)
        return reads.timeline(connection, key, *span, chosen)


@hang_router.get("/hang")
def get_hang(
    request: Request,
    run: str,
    after_s: Annotated[
        float,
        Query(ge=0, le=86_400, description="seconds without progress that count as a hang"),
    ] = hangs.SHORTEST_HANG_S,
) -> hangs.Hang:
    """Return whether the run hangs, and which ranks wait.

    A run hangs if some ranks wait, and no rank has made progress for `after_s` and for 10 times the
    median step time. It also hangs, although no rank waits, if all ranks stay in the body of the
    training loop for 10 times the longer of these two times.
    """
    with store_of(request).read() as connection:
        return hangs.look(connection, runs.key_of(connection, run), after_s)


# Maximum time for ranks to write their stacks. A rank that can write needs a fraction of a second.
STACKS_WAIT_S = 3.0  # seconds

_STACKS_POLL_S = 0.15  # seconds between two polls


class RankStack(BaseModel):
    """Python stacks of one rank."""

    rank: int = Field(examples=[2])
    node: str = Field(examples=["node-1"])
    text: str = Field(
        description="the Python stacks of all threads, innermost frame first, the main thread last",
        examples=['Current thread 0x00007f2c8a7fe740 (most recent call first):\n  File "…'],
    )
    frame: str = Field(
        description="innermost frame of the user's code, preferably of the main thread; empty: "
        "none",
        examples=["train.py:14 in __getitem__"],
    )
    problem: str | None = Field(
        description="why the rank has given no stacks; null: it has given them", examples=[None]
    )


class RunStacks(BaseModel):
    """Python stacks of the ranks of a run."""

    run: str = Field(examples=["3f9a1c07be52"])
    nodes: list[AskedNode]
    stacks: list[RankStack] = Field(description="Python stacks of the ranks, sorted by rank")


@stacks_router.get("/stacks", response_model=RunStacks)
async def get_stacks(
    request: Request,
    run: str,
    rank: Annotated[
        int | None,
        Query(ge=0, lt=10**9, description="rank whose stacks are wanted; default: all ranks"),
    ] = None,
) -> Any:
    """Return the current Python stacks of a run's ranks, at most 64 ranks per node.

    The agents send each rank a signal whose handler `paceline.Session` has installed. The handler
    runs even while the rank hangs, in Python or in C.
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
    until = time.monotonic() + STACKS_WAIT_S
    while since and time.monotonic() < until:
        await asyncio.sleep(_STACKS_POLL_S)
        [answer] = await ask(store, asker, [holder], run, ReadStacks(dumps.attempt, since))
        if not isinstance(answer, Stacks):
            break
        ended = {stack.rank for stack in answer.stacks if stack == stacks[stack.rank]}
        stacks.update({stack.rank: stack for stack in answer.stacks})
        # A rank whose text has not grown since the previous poll has written all of it.
        since = [(r, offset) for r, offset in since if r not in ended or not stacks[r].text]
    return [_shown(holder.node, stack) for stack in stacks.values()]


def _shown(node: str, stack: StackTrace) -> dict[str, Any]:
    silent = f"the rank wrote no stacks within {STACKS_WAIT_S:g} s" if not stack.text else None
    return {
        "rank": stack.rank,
        "node": node,
        "text": stack.text,
        "frame": stack.frame,
        "problem": stack.why or silent,
    }
