"""Query parameters that select runs, as a `RunFilter`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Depends, Query
from pydantic import BaseModel

from paceline.wire import State
from paceline_backend.requests import InvalidRequestError
from paceline_backend.store.history import FigureBounds, RunFilter

# Unix time beyond the range of any calendar.
_LATEST = 1e12  # seconds
Part = Annotated[str | None, Query(max_length=200, description="substring")]
Exact = Annotated[str | None, Query(max_length=200, description="exact match")]
Moment = Annotated[
    float | None, Query(ge=-_LATEST, le=_LATEST, allow_inf_nan=False, description="Unix time")
]
Figure = Annotated[
    float | None,
    Query(allow_inf_nan=False, description="limit for the mean over all complete steps of the run"),
]


class RunQuery(BaseModel):
    """Query parameters that select runs. A run must satisfy all conditions.

    `since` and `until` select by the time of creation, `active_since` and `active_until` by the
    time of training. The upper ends are excluded.
    """

    state: Annotated[list[State], Query(description="any of these states")] = []
    policy: Exact = None
    used: Annotated[
        str | None, Query(max_length=200, description="a policy that was in force at some time")
    ] = None
    parameter: Annotated[
        list[str],
        Query(
            max_length=20,
            description="parameter of the policy in force, as requested: `name=value`",
            examples=[["window=32"]],
        ),
    ] = []
    name: Part = None
    text: Annotated[
        str | None,
        Query(
            max_length=200,
            description="substring of name, script, note, policy, device, a tag or a node, or "
            "prefix of the id",
        ),
    ] = None
    node: Exact = None
    device: Part = None
    backend: Exact = None
    tag: Annotated[list[str], Query(max_length=20, description="all of these tags")] = []
    since: Moment = None
    until: Moment = None
    active_since: Moment = None
    active_until: Moment = None
    step_s_min: Figure = None
    step_s_max: Figure = None
    se_min: Figure = None
    se_max: Figure = None
    waste_min: Figure = None
    waste_max: Figure = None


def _filter(query: Annotated[RunQuery, Query()]) -> RunFilter:
    return RunFilter(
        states=query.state,
        policy=query.policy,
        used=query.used,
        parameters=_parameters(query.parameter),
        name=query.name,
        text=query.text,
        node=query.node,
        device=query.device,
        backend=query.backend,
        tags=query.tag,
        since=query.since,
        until=query.until,
        active_since=query.active_since,
        active_until=query.active_until,
        step_s=FigureBounds(query.step_s_min, query.step_s_max),
        se=FigureBounds(query.se_min, query.se_max),
        waste=FigureBounds(query.waste_min, query.waste_max),
    )


Filter = Annotated[RunFilter, Depends(_filter)]


def _parameters(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse ``name=value`` pairs. A value that is not valid JSON is a string."""
    parameters = {}
    for pair in pairs:
        match = re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]{0,99})=(.{0,200})", pair)
        if match is None or "\0" in pair:
            message = "give name=value, such as window=32"
            raise InvalidRequestError("parameter", message)
        parameters[match[1]] = _value(match[2])
    return parameters


def _value(text: str) -> str | bool | float:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, bool | str):
        return value
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        number = math.nan
    return number if math.isfinite(number) else text
