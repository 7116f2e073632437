"""REST: the policy of a run, who switched it and why, and what each switch changed.

`requests.switch` makes the switch, which takes effect with the next segment. The response to a
switch contains warnings about the new policy if they are known in time. Warnings never prevent
a switch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass

from paceline_backend import requests
from paceline_backend.api.errors import RUN_REFUSALS, documented
from paceline_backend.api.models import ChangeRequest, PolicyName
from paceline_backend.api.preconditions import CHANGE_REFUSALS, Expected, etag, requester_of
from paceline_backend.api.rules import OPERATOR, VIEWER
from paceline_backend.api.state import settings_of, store_of
from paceline_backend.insight import effects, quality
from paceline_backend.insight.effects import SwitchEffect
from paceline_backend.insight.quality import MetricChange
from paceline_backend.insight.whatif import cautions
from paceline_backend.store import Store, StoreError, audit, runs, switches

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS)
logger = logging.getLogger(__name__)

# Maximum time for which the response to a switch is delayed until warnings are known.
WARNINGS_S = 0.5  # seconds
_REFUSALS = documented(HTTPStatus.BAD_REQUEST, HTTPStatus.CONFLICT)


class SwitchInfo(BaseModel):
    """A request for a policy, and the step from which the policy plans.

    Version 0 is the policy at the run's start.
    """

    version: int = Field(examples=[1])
    policy: str = Field(examples=["chronica"])
    parameters: dict[str, Any] = Field(examples=[{}])
    requested_at: float = Field(examples=[1767225700.0])
    requested_by: str = Field(
        description="name of the token that requested the switch, or the name that its holder "
        "gave, or `auto`",
        examples=["ada"],
    )
    why: str = Field(
        description="reason for the switch that the requester gave", examples=["rank 3 is slow"]
    )
    effective_step: int | None = Field(
        description="first step that the policy planned; null: it has planned none yet",
        examples=[64],
    )
    effective_at: float | None = Field(examples=[1767225700.8])


class PolicySwitch(ChangeRequest):
    """Request to switch the policy of a run."""

    policy: PolicyName = Field(examples=["chronica"])
    parameters: dict[str, Any] = Field(default={}, examples=[{}])


class RunPolicy(BaseModel):
    """Policy that plans a run now, and the requested policy that follows it."""

    in_force: SwitchInfo = Field(description="policy that planned the newest segment")
    requested: SwitchInfo | None = Field(
        description="policy that plans from the next segment on; null: no switch is pending"
    )
    revision: int = Field(
        description="revision of the run, for the `If-Match` header of a request to change the run",
        examples=[3],
    )


class RequestedSwitch(SwitchInfo):
    """Response to a switch request."""

    revision: int = Field(description="revision of the run after the switch", examples=[4])
    warnings: list[str] | None = Field(
        description="warnings about the policy, warnings of harm first; null: not known within "
        "half a second, so request `GET /runs/{run}/policy/warnings`",
        examples=[[]],
    )


class SwitchWarnings(BaseModel):
    """Warnings before a switch."""

    warnings: list[str] = Field(
        description="warnings about the policy, warnings of harm first; empty: none", examples=[[]]
    )


@dataclass(frozen=True)
class ReportedEffect(SwitchEffect):
    """Effect of a switch: change of the time for the same load.

    Steps in which a policy still learns are left out.
    """

    words: str = Field(examples=["Steps take 56 % less time for the same load (53 to 58 %)."])
    metrics: list[MetricChange] = Field(
        description="metrics of evaluations before and after the switch, if one of the policies "
        "changes the training; they may differ merely because the training continued"
    )
    metrics_words: str = Field(
        description="`metrics` as sentences; empty: no metrics", examples=[""]
    )


@router.get("/policy", response_model=RunPolicy, dependencies=[Depends(VIEWER)])
def get_policy(request: Request, response: Response, run: str) -> Any:
    """Return the run's policy. A request to switch it sends the response's `ETag` as `If-Match`."""
    store = store_of(request)
    with store.read() as connection:
        rows = switches.rows_of(connection, run)
        revision = audit.revision_of(connection, run)
    response.headers["ETag"] = etag(revision)
    return {**_policy(rows), "revision": revision}


def _policy(rows: list[dict[str, Any]]) -> dict[str, Any]:
    begun = [row for row in rows if row["effective_step"] is not None]
    in_force = begun[-1] if begun else rows[0]
    newest = rows[-1]
    under_way = newest["version"] > in_force["version"]
    return {"in_force": in_force, "requested": newest if under_way else None}


@router.post(
    "/policy",
    status_code=HTTPStatus.ACCEPTED,
    response_model=RequestedSwitch,
    responses={**CHANGE_REFUSALS, **_REFUSALS},
    dependencies=[Depends(OPERATOR)],
)
async def switch_policy(
    request: Request, response: Response, run: str, expected: Expected, body: PolicySwitch
) -> Any:
    """Request another policy, which plans from the next segment on, whatever the warnings are."""
    store = store_of(request)
    made = await run_in_threadpool(_switched, request, run, expected, body)
    response.headers["ETag"] = etag(made["revision"])
    return {**made, "warnings": await _in_time(store, run, body)}


def _switched(
    request: Request, run: str, expected: int | None, body: PolicySwitch
) -> dict[str, Any]:
    by = requester_of(request, body.by, body.why, body.operator)
    store, bus = store_of(request), settings_of(request).bus
    change = audit.RequestedChange(run, by, expected)
    made = requests.switch(store, bus, change, body.policy, body.parameters)
    # `requests.switch` returns None only for requests of `auto`.
    assert made is not None
    return made


async def _in_time(store: Store, run: str, body: PolicySwitch) -> list[str] | None:
    """Return warnings; None: they are not known in time, as the first computation takes seconds."""
    trial = asyncio.create_task(
        run_in_threadpool(_warnings, store, run, body.policy, body.parameters)
    )
    done, _ = await asyncio.wait([trial], timeout=WARNINGS_S)
    if not done:
        # The result is not used, so the callback only logs an error.
        trial.add_done_callback(_forgotten)
        return None
    try:
        return trial.result()
    except StoreError as error:
        # The switch itself has succeeded, so the request must not fail.
        logger.warning("run %s: cannot compute warnings about %s: %s", run, body.policy, error)
        return None


def _forgotten(trial: asyncio.Task[list[str]]) -> None:
    if not trial.cancelled() and (error := trial.exception()) is not None:
        logger.info(
            "warnings about a policy could not be computed, and the response was already sent: %s",
            error,
        )


def _warnings(store: Store, run: str, policy: str, parameters: Mapping[str, Any]) -> list[str]:
    try:
        return cautions.of_run(store, run, policy, parameters)
    except StoreError:
        raise
    except Exception:
        # A third-party preset failed, or no model fits the records.
        logger.warning("run %s: cannot compute warnings about %s", run, policy, exc_info=True)
        return []


@router.get("/policy/warnings", dependencies=[Depends(VIEWER)])
def switch_warnings(
    request: Request,
    run: str,
    policy: Annotated[str, Query(max_length=200, description="name of a preset")],
    parameters: Annotated[
        str, Query(max_length=4_000, description="parameters of the preset, as a JSON object")
    ] = "{}",
) -> SwitchWarnings:
    """Return warnings about a switch to this policy. The first response may take seconds."""
    try:
        given = msgspec.json.decode(parameters, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        message = f"give a JSON object: {error}"
        raise requests.InvalidRequestError("parameters", message) from error
    store = store_of(request)
    known = runs.get(store, run)
    world = known["world"] or known["nproc"] * known["nodes_max"]
    requests.check_policy(policy, given, world, known["token_budget"])
    return SwitchWarnings(warnings=_warnings(store, run, policy, given))


@router.get("/effects", response_model=list[ReportedEffect], dependencies=[Depends(VIEWER)])
def list_effects(request: Request, run: str) -> Any:
    """List the effect of each switch that has taken effect, oldest first."""
    with store_of(request).read() as connection:
        made = effects.of_run(connection, run)
        measured = quality.after_switches(connection, runs.key_of(connection, run))
    return [_reported(each, measured.get(each.version, [])) for each in made]


def _reported(effect: effects.SwitchEffect, metrics: list[quality.MetricChange]) -> ReportedEffect:
    return ReportedEffect(
        **vars(effect),
        words=effects.words_of(effect),
        metrics=metrics,
        metrics_words=quality.words(metrics),
    )


@router.get("/switches", response_model=list[SwitchInfo], dependencies=[Depends(VIEWER)])
def list_switches(request: Request, run: str) -> Any:
    """List every policy that was requested, with the step from which it plans."""
    return switches.rows(store_of(request), run)
