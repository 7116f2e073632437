"""REST: alerts, alert rules, and webhooks that receive alerts.

An alert is raised when the condition of its rule has held for some time, and resolved when the
condition has been gone for some time. Operators acknowledge alerts. Admins change rules, and create
and delete webhooks.
"""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from pydantic import BaseModel, Field

from paceline_backend.api.errors import ProblemError, documented
from paceline_backend.api.models import ChangeRequest, In, Name
from paceline_backend.api.preconditions import etag, requester_of
from paceline_backend.api.queries import Page
from paceline_backend.api.rules import ADMIN, OPERATOR, VIEWER
from paceline_backend.api.state import settings_of, store_of
from paceline_backend.insight.alerts import DEFAULTS, rules_with
from paceline_backend.insight.alerts.rules import Rule, Severity
from paceline_backend.requests import InvalidRequestError
from paceline_backend.requests import webhooks as sending
from paceline_backend.server.keys import Keys
from paceline_backend.store import Connection, Store, audit, meta
from paceline_backend.store.alerts import rows, webhooks
from paceline_backend.store.alerts import rules as changed_rules

_AWAY = HTTPStatus.SERVICE_UNAVAILABLE
_INVALID = HTTPStatus.UNPROCESSABLE_ENTITY
_MISSING = HTTPStatus.NOT_FOUND
_MALFORMED = HTTPStatus.BAD_REQUEST
_CHANGEABLE = ("enabled", "threshold", "raise_after_s", "resolve_after_s", "severity")

IfMatch = Annotated[
    str | None,
    Header(
        description="`revision` of the alert rule that the caller has seen, in quotes; `*` or "
        "absent: change the rule whatever its revision is",
        examples=['"81985529"'],
    ),
]

router = APIRouter(prefix="/alerts", responses=documented(_AWAY))
webhooks_router = APIRouter(
    prefix="/alerts/webhooks", responses=documented(_AWAY), dependencies=[Depends(ADMIN)]
)

_Seconds = Annotated[float, Field(ge=0, le=7 * 86_400)]


class Alert(BaseModel):
    """An alert, active or resolved."""

    id: int = Field(examples=[17])
    state: Literal["raised", "resolved"] = Field(examples=["raised"])
    rule: str = Field(examples=["run-held-up"])
    severity: Severity = Field(examples=["warning"])
    run: str | None = Field(
        description="run that the alert is about, even if it was deleted; null: the alert is about "
        "the control plane",
        examples=["3f9a1c07be52"],
    )
    value: float = Field(
        description="last value that was beyond the rule's threshold", examples=[0.41]
    )
    threshold: float = Field(
        description="threshold of the rule when `value` was measured", examples=[0.1]
    )
    words: str = Field(examples=["Rank 3 computes 2.7 × slower since step 1,204."])
    since: float = Field(
        description="Unix time from which the rule's condition held", examples=[1767225000]
    )
    raised_at: float = Field(examples=[1767225600])
    gone_at: float | None = Field(
        description="Unix time at which the rule's condition ended; null: it still holds",
        examples=[None],
    )
    resolved_at: float | None = Field(
        description="Unix time at which the alert was resolved; null: still active",
        examples=[None],
    )
    acknowledged_at: float | None = Field(examples=[1767225660])
    acknowledged_by: str | None = Field(
        description="name of the token that acknowledged the alert, or the `operator` that the "
        "request named; null: not acknowledged",
        examples=["ada"],
    )
    acknowledged_why: str | None = Field(examples=["its disk is being replaced"])


class AlertCounts(BaseModel):
    """Numbers of active alerts. The filter of the request does not affect them."""

    raised: int = Field(description="number of active alerts", examples=[3])
    unacknowledged: int = Field(
        description="number of active alerts that are not acknowledged", examples=[2]
    )
    critical: int = Field(
        description="number of active, critical alerts that are not acknowledged", examples=[0]
    )


class AlertPage(BaseModel):
    """Alerts, newest first."""

    items: list[Alert]
    counts: AlertCounts
    next_cursor: str | None = Field(
        description="`cursor` for the next page; null: this is the last page", examples=["MTIz"]
    )


class Acknowledgement(ChangeRequest):
    """Request to acknowledge an alert, which tells others that somebody takes care of it."""


class AlertRule(BaseModel):
    """Rule that defines when an alert is raised and resolved."""

    name: str = Field(examples=["run-held-up"])
    words: str = Field(
        description="condition of the rule as a clause, such as: the share of their time that "
        "ranks wait for slower ranks is above the threshold"
    )
    unit: Literal["share", "ratio", "factor", "seconds", "count"] = Field(examples=["share"])
    below: bool = Field(
        description="true: the condition holds below the threshold; false: it holds above"
    )
    enabled: bool = Field(examples=[True])
    threshold: float = Field(examples=[0.1])
    raise_after_s: float = Field(
        description="seconds for which the condition must hold before an alert is raised",
        examples=[600],
    )
    resolve_after_s: float = Field(
        description="seconds for which the condition must be gone before the alert is resolved",
        examples=[300],
    )
    severity: Severity = Field(examples=["warning"])
    changed_at: float | None = Field(
        description="Unix time of the last change by an admin; null: the rule has its defaults",
        examples=[None],
    )
    changed_by: str | None = Field(examples=[None])
    revision: int = Field(
        description="number that differs after each change of the rule, for the `If-Match` header "
        "of a request to change the rule",
        examples=[81_985_529],
    )


class RuleChange(ChangeRequest):
    """Request to change an alert rule. Fields that are absent or null keep their values."""

    enabled: bool | None = None
    threshold: Annotated[float | None, Field(ge=0, le=1e9)] = None
    raise_after_s: _Seconds | None = None
    resolve_after_s: _Seconds | None = None
    severity: Severity | None = None


class NewWebhook(In):
    """Request to create a webhook."""

    name: Name = Field(examples=["on-call"])
    url: Annotated[str, Field(min_length=8, max_length=2_000)] = Field(
        description="URL that receives the alerts; the server's option `--webhook-to` must allow "
        "its origin",
        examples=["https://hooks.example.com/paceline"],
    )
    severity: Severity = Field(
        default="warning", description="lowest severity of alerts that are sent to the webhook"
    )


class Webhook(BaseModel):
    """A webhook: a URL that receives alerts, and the state of its newest delivery."""

    id: str = Field(examples=["9f31c0de5a7b"])
    name: str = Field(examples=["on-call"])
    url: str = Field(examples=["https://hooks.example.com/paceline"])
    severity: Severity = Field(
        description="lowest severity of alerts that are sent to the webhook", examples=["warning"]
    )
    created_at: float = Field(examples=[1767225600])
    created_by: str = Field(examples=["ada"])
    tries: int | None = Field(
        description="number of attempts to send the newest delivery; null: no delivery yet",
        examples=[1],
    )
    tried_at: float | None = Field(
        description="Unix time of the last attempt to send the newest delivery; null: no attempt",
        examples=[1767225600],
    )
    sent_at: float | None = Field(
        description="Unix time at which the receiver accepted the newest delivery; null: not "
        "accepted",
        examples=[1767225600],
    )
    due_at: float | None = Field(
        description="Unix time of the next attempt to send the newest delivery; null: it was "
        "accepted or given up",
        examples=[None],
    )
    status: int | None = Field(
        description="HTTP status of the last attempt to send; null: no response", examples=[200]
    )
    error: str | None = Field(
        description="why the last attempt to send failed; null: it did not fail", examples=[None]
    )


class CreatedWebhook(Webhook):
    """A webhook that the request has just created, with its secret."""

    secret: str = Field(
        description="key with which the receiver checks the signatures of deliveries; only this "
        "response shows it",
        examples=["whsec_…"],
    )


class WebhookTest(BaseModel):
    """Result of a test delivery."""

    sent: bool = Field(description="true: the receiver accepted the delivery", examples=[True])
    status: int | None = Field(
        description="HTTP status of the receiver's response; null: no response", examples=[200]
    )
    error: str | None = Field(
        description="why the delivery failed; null: it did not fail", examples=[None]
    )


class AlertQuery(BaseModel):
    """Query parameters that select alerts."""

    state: Annotated[
        Literal["raised", "resolved"] | None,
        Query(description="raised: only active alerts; resolved: only alerts that have ended"),
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
        Query(description="true: only acknowledged alerts; false: only unacknowledged alerts"),
    ] = None
    since: Annotated[
        float | None, Query(description="only alerts raised at this Unix time or later")
    ] = None


@router.get(
    "",
    response_model=AlertPage,
    responses=documented(_INVALID),
    dependencies=[Depends(VIEWER)],
)
def list_alerts(request: Request, which: Annotated[AlertQuery, Query()], page: Page) -> Any:
    """List alerts, newest first, including alerts about deleted runs."""
    wanted = rows.AlertFilter(**which.model_dump())
    with store_of(request).read() as connection:
        items, following = rows.page(connection, wanted, page.limit, page.cursor)
        counts = rows.counts(connection)
    return {"items": items, "counts": counts, "next_cursor": following}


@router.post(
    "/{alert}/acknowledge",
    response_model=Alert,
    responses=documented(_MALFORMED, _MISSING, _INVALID, HTTPStatus.CONFLICT),
    dependencies=[Depends(OPERATOR)],
)
def acknowledge_alert(
    request: Request,
    alert: Annotated[int, Path(ge=1, le=2**63 - 1)],
    body: Acknowledgement | None = None,
) -> Any:
    """Acknowledge an alert. It stays active, but no longer counts as unacknowledged."""
    body = body or Acknowledgement()
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


@router.get("/rules", response_model=list[AlertRule], dependencies=[Depends(VIEWER)])
def list_rules(request: Request) -> Any:
    """List the alert rules, which define when alerts are raised and resolved."""
    with store_of(request).read() as connection:
        return [_shown(rule) for rule in _rules(connection).values()]


@router.put(
    "/rules/{rule}",
    response_model=AlertRule,
    responses=documented(_MALFORMED, _MISSING, _INVALID, HTTPStatus.PRECONDITION_FAILED),
    dependencies=[Depends(ADMIN)],
)
def change_rule(request: Request, rule: str, body: RuleChange, if_match: IfMatch = None) -> Any:
    """Change an alert rule. The change applies from the next check of the condition on."""
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
    response_model=AlertRule,
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


@webhooks_router.get("", response_model=list[Webhook])
def list_webhooks(request: Request) -> Any:
    """List the webhooks, each with the result of its newest delivery."""
    with store_of(request).read() as connection:
        return webhooks.listed(connection)


@webhooks_router.post(
    "",
    status_code=HTTPStatus.CREATED,
    response_model=CreatedWebhook,
    responses=documented(HTTPStatus.BAD_REQUEST, _INVALID),
)
def create_webhook(request: Request, body: NewWebhook) -> Any:
    """Create a webhook. Only this response shows the webhook's secret."""
    try:
        origin = sending.allowed_origin(body.url, settings_of(request).webhook_origins)
    except sending.AddressError as error:
        raise InvalidRequestError("url", str(error)) from error
    store, by = store_of(request), requester_of(request)
    with store.write() as connection:
        made = webhooks.create(connection, body.name, body.url, body.severity, by.name)
        # The path of a webhook's URL is often a secret, so the audit log gets only the host.
        details = {"id": made, "host": origin.host, "severity": body.severity}
        audit.record(connection, by, "webhook.create", target=body.name, details=details)
        return {**webhooks.get(connection, made), "secret": sending.secret_text(_key(store, made))}


@webhooks_router.delete(
    "/{webhook}", response_model=Webhook, responses=documented(_MISSING, _INVALID)
)
def delete_webhook(request: Request, webhook: str) -> Any:
    """Delete a webhook. Its deliveries that are not sent yet are dropped."""
    try:
        with store_of(request).write() as connection:
            known = webhooks.get(connection, webhook)
            webhooks.delete(connection, webhook)
            by, details = requester_of(request), {"id": webhook}
            audit.record(connection, by, "webhook.delete", target=known["name"], details=details)
            return known
    except webhooks.UnknownWebhookError as error:
        raise ProblemError(_MISSING, str(error)) from error


@webhooks_router.post(
    "/{webhook}/test",
    response_model=WebhookTest,
    responses=documented(_MISSING, _INVALID),
)
def test_webhook(request: Request, webhook: str) -> Any:
    """Send one test delivery now, without retries, and return its result."""
    store = store_of(request)
    try:
        with store.write() as connection:
            known = webhooks.get(connection, webhook)
            audit.record(connection, requester_of(request), "webhook.test", target=known["name"])
    except webhooks.UnknownWebhookError as error:
        raise ProblemError(_MISSING, str(error)) from error
    at = time.time()
    body = sending.body_of("test", None, at)
    name = f"test_{webhook}_{at:.3f}"
    allowed = settings_of(request).webhook_origins
    sent = sending.post(known["url"], body, name, _key(store, webhook), allowed)
    return {"sent": sent.error is None, "status": sent.status, "error": sent.error}


def _key(store: Store, webhook: str) -> bytes:
    return Keys(meta.secret(store)).of_webhook(webhook)
