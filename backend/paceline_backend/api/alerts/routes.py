"""REST: alerts and alert rules."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from pydantic import BaseModel

from paceline_backend.api.alerts import models
from paceline_backend.api.audit import etag, requester_of
from paceline_backend.api.audit.routes import Page
from paceline_backend.api.errors import ProblemError, documented
from paceline_backend.api.rules import ADMIN, OPERATOR, VIEWER
from paceline_backend.api.runs import store_of
from paceline_backend.insight.alerts import DEFAULTS, rules_with
from paceline_backend.insight.alerts.rules import Rule, Severity
from paceline_backend.store import Connection, audit
from paceline_backend.store.alerts import rows
from paceline_backend.store.alerts import rules as changed_rules
from paceline_backend.store.runs import CursorError

_AWAY = HTTPStatus.SERVICE_UNAVAILABLE
_INVALID = HTTPStatus.UNPROCESSABLE_ENTITY
_MISSING = HTTPStatus.NOT_FOUND
_MALFORMED = HTTPStatus.BAD_REQUEST
_CHANGEABLE = ("enabled", "threshold", "raise_after_s", "resolve_after_s", "severity")

IfMatch = Annotated[
    str | None,
    Header(
        description="`revision` of the rule on which the change is based, in quotes; `*` or "
        "absent: any",
        examples=['"81985529"'],
    ),
]

router = APIRouter(prefix="/alerts", responses=documented(_AWAY))


class AlertQuery(BaseModel):
    """Query parameters that select alerts."""

    state: Annotated[
        Literal["raised", "resolved"] | None, Query(description="`raised` alerts are still active")
    ] = None
    rule: Annotated[str | None, Query(max_length=100, description="only alerts of this rule")] = (
        None
    )
    run: Annotated[str | None, Query(max_length=200, description="only alerts about this run")] = (
        None
    )
    severity: Annotated[Severity | None, Query(description="only alerts of this severity")] = None
    acknowledged: Annotated[
        bool | None,
        Query(description="only alerts that are acknowledged, or only those that are not"),
    ] = None
    since: Annotated[
        float | None, Query(description="only alerts raised at this Unix time or later")
    ] = None


@router.get(
    "",
    response_model=models.AlertPage,
    responses=documented(_INVALID),
    dependencies=[Depends(VIEWER)],
)
def list_alerts(request: Request, which: Annotated[AlertQuery, Query()], page: Page) -> Any:
    """List alerts, newest first, including alerts about deleted runs."""
    wanted = rows.AlertFilter(**which.model_dump())
    try:
        with store_of(request).read() as connection:
            items, following = rows.page(connection, wanted, page.limit, page.cursor)
            counts = rows.counts(connection)
    except CursorError as error:
        errors = [{"field": "cursor", "message": str(error)}]
        raise ProblemError(_INVALID, str(error), errors=errors) from error
    return {"items": items, "counts": counts, "next_cursor": following}


@router.post(
    "/{alert}/acknowledge",
    response_model=models.Alert,
    responses=documented(_MALFORMED, _MISSING, _INVALID, HTTPStatus.CONFLICT),
    dependencies=[Depends(OPERATOR)],
)
def acknowledge_alert(
    request: Request,
    alert: Annotated[int, Path(ge=1, le=2**63 - 1)],
    body: models.Acknowledgement | None = None,
) -> Any:
    """Acknowledge an alert. It stays active, but no longer counts as unacknowledged."""
    body = body or models.Acknowledgement()
    by = requester_of(request, body.by, body.why, body.operator)
    try:
        with store_of(request).write() as connection:
            known = rows.acknowledge(connection, alert, by.known_as, by.why)
            details = {"rule": known["rule"]}
            audit.record(
                connection,
                by,
                "alert.acknowledge",
                run=known["run"],
                target=str(alert),
                details=details,
            )
            return known
    except rows.UnknownAlertError as error:
        raise ProblemError(_MISSING, str(error)) from error
    except rows.AcknowledgedError as error:
        raise ProblemError(HTTPStatus.CONFLICT, str(error)) from error


@router.get("/rules", response_model=list[models.AlertRule], dependencies=[Depends(VIEWER)])
def list_rules(request: Request) -> Any:
    """List the alert rules: when an alert is raised, and when it is resolved."""
    with store_of(request).read() as connection:
        return [_shown(rule) for rule in _rules(connection).values()]


@router.put(
    "/rules/{rule}",
    response_model=models.AlertRule,
    responses=documented(_MALFORMED, _MISSING, _INVALID, HTTPStatus.PRECONDITION_FAILED),
    dependencies=[Depends(ADMIN)],
)
def change_rule(
    request: Request, rule: str, body: models.RuleChange, if_match: IfMatch = None
) -> Any:
    """Change an alert rule. The change applies from the next check on."""
    _check(rule)
    by = requester_of(request, body.by, body.why, body.operator)
    given = body.model_dump(include=set(_CHANGEABLE), exclude_none=True)
    with store_of(request).write() as connection:
        before = _locked(connection, rule, if_match)
        values = {name: getattr(before, name) for name in _CHANGEABLE} | given
        changed_rules.change(connection, rule, by.known_as, values)
        audit.record(connection, by, "alert.rule", target=rule, details=given)
        return _shown(_rules(connection)[rule])


@router.delete(
    "/rules/{rule}",
    response_model=models.AlertRule,
    responses=documented(_MISSING, _INVALID, HTTPStatus.PRECONDITION_FAILED),
    dependencies=[Depends(ADMIN)],
)
def restore_rule(request: Request, rule: str, if_match: IfMatch = None) -> Any:
    """Restore the defaults of an alert rule."""
    _check(rule)
    with store_of(request).write() as connection:
        _locked(connection, rule, if_match)
        changed_rules.restore(connection, rule)
        audit.record(connection, requester_of(request), "alert.rule", target=rule)
        return _shown(_rules(connection)[rule])


def _rules(connection: Connection) -> dict[str, Rule]:
    return rules_with(changed_rules.changed(connection))


def _locked(connection: Connection, rule: str, if_match: str | None) -> Rule:
    """Lock a rule until the transaction ends, and return it."""
    changed_rules.lock(connection, rule)
    known = _rules(connection)[rule]
    _check_seen(known, if_match)
    return known


def _shown(rule: Rule) -> dict[str, Any]:
    return {**vars(rule), "revision": rule.revision}


def _check_seen(rule: Rule, if_match: str | None) -> None:
    if if_match is None or if_match.strip() in ("*", etag(rule.revision)):
        return
    who = (
        f"{rule.changed_by} has changed"
        if rule.changed_by
        else "an admin has restored the defaults of"
    )
    raise ProblemError(
        HTTPStatus.PRECONDITION_FAILED,
        f"{who} {rule.name} in the meantime: read GET /alerts/rules again",
        rule=_shown(rule),
        revision=rule.revision,
        who=rule.changed_by,
        at=rule.changed_at,
    )


def _check(rule: str) -> None:
    if rule not in DEFAULTS:
        names = ", ".join(DEFAULTS)
        raise ProblemError(_MISSING, f"no alert rule {rule!r}; the rules are {names}")
