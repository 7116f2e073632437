"""Request and response bodies about alerts. `docs/rest.md` describes the fields."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from paceline_backend.api import models
from paceline_backend.insight.alerts.rules import Severity

_Seconds = Annotated[float, Field(ge=0, le=7 * 86_400)]


class Alert(BaseModel):
    """An alert, active or resolved."""

    id: int = Field(examples=[17])
    state: Literal["raised", "resolved"] = Field(examples=["raised"])
    rule: str = Field(examples=["run-held-up"])
    severity: Severity = Field(examples=["warning"])
    run: str | None = Field(
        description="run, which may have been deleted; null: the alert is about the control plane",
        examples=["3f9a1c07be52"],
    )
    value: float = Field(description="last value beyond the threshold", examples=[0.41])
    threshold: float = Field(description="threshold of the rule at that time", examples=[0.1])
    words: str = Field(examples=["Rank 3 computes 2.7 × slower since step 1,204."])
    since: float = Field(
        description="Unix time at which the condition began", examples=[1767225000]
    )
    raised_at: float = Field(examples=[1767225600])
    gone_at: float | None = Field(
        description="Unix time at which the condition ended; null: it still holds", examples=[None]
    )
    resolved_at: float | None = Field(description="null: still active", examples=[None])
    acknowledged_at: float | None = Field(examples=[1767225660])
    acknowledged_by: str | None = Field(
        description="name of a token, or the `operator` of the request", examples=["ada"]
    )
    acknowledged_why: str | None = Field(examples=["its disk is being replaced"])


class AlertCounts(BaseModel):
    """Number of active alerts, independent of the filter of the request."""

    raised: int = Field(examples=[3])
    unacknowledged: int = Field(description="active alerts that are not acknowledged", examples=[2])
    critical: int = Field(description="critical alerts among the unacknowledged ones", examples=[0])


class AlertPage(BaseModel):
    """Alerts, newest first."""

    items: list[Alert]
    counts: AlertCounts
    next_cursor: str | None = Field(description="null: the last page", examples=["MTIz"])


class Acknowledgement(models.ChangeRequest):
    """Acknowledgement of an alert: who takes care of it, and why no one else needs to."""


class AlertRule(BaseModel):
    """Condition on which an alert is raised and resolved."""

    name: str = Field(examples=["run-held-up"])
    words: str = Field(description="condition of the rule, as a clause")
    unit: Literal["share", "ratio", "factor", "seconds", "count"] = Field(examples=["share"])
    below: bool = Field(description="the condition holds below the threshold instead of above")
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
        description="null: the rule has its default values", examples=[None]
    )
    changed_by: str | None = Field(examples=[None])
    revision: int = Field(
        description="changes when an admin changes the rule; for the `If-Match` header of a change",
        examples=[81_985_529],
    )


class RuleChange(models.ChangeRequest):
    """Change of an alert rule. Fields that are left out keep their values."""

    enabled: bool | None = None
    threshold: Annotated[float | None, Field(ge=0, le=1e9)] = None
    raise_after_s: _Seconds | None = None
    resolve_after_s: _Seconds | None = None
    severity: Severity | None = None


class NewWebhook(models.In):
    """Request to create a webhook."""

    name: models.Name = Field(examples=["on-call"])
    url: Annotated[str, Field(min_length=8, max_length=2_000)] = Field(
        description="URL at an origin that the server allows with `--webhook-to`",
        examples=["https://hooks.example.com/paceline"],
    )
    severity: Severity = Field(
        default="warning", description="lowest severity that is sent to the webhook"
    )


class Webhook(BaseModel):
    """A webhook: a URL that receives alerts, and the state of its newest delivery."""

    id: str = Field(examples=["9f31c0de5a7b"])
    name: str = Field(examples=["on-call"])
    url: str = Field(examples=["https://hooks.example.com/paceline"])
    severity: Severity = Field(
        description="lowest severity that is sent to the webhook", examples=["warning"]
    )
    created_at: float = Field(examples=[1767225600])
    created_by: str = Field(examples=["ada"])
    tries: int | None = Field(
        description="attempts of the newest delivery; null: no delivery yet", examples=[1]
    )
    tried_at: float | None = Field(
        description="Unix time of the last attempt", examples=[1767225600]
    )
    sent_at: float | None = Field(description="null: not delivered", examples=[1767225600])
    due_at: float | None = Field(
        description="Unix time of the next attempt; null: delivered or given up", examples=[None]
    )
    status: int | None = Field(description="HTTP status of the last attempt", examples=[200])
    error: str | None = Field(description="why the last attempt failed", examples=[None])


class CreatedWebhook(Webhook):
    """A webhook that the request has just created, with its secret."""

    secret: str = Field(
        description="for checking signatures; shown only here", examples=["whsec_…"]
    )


class WebhookTest(BaseModel):
    """Result of a test delivery."""

    sent: bool = Field(description="whether the receiver accepted the delivery", examples=[True])
    status: int | None = Field(description="HTTP status; null: no response", examples=[200])
    error: str | None = Field(examples=[None])
