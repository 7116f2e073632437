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
        description="which may be gone; null: it is about the control plane",
        examples=["3f9a1c07be52"],
    )
    value: float = Field(description="the last one beyond the threshold", examples=[0.41])
    threshold: float = Field(description="of the rule by then", examples=[0.1])
    words: str = Field(examples=["Rank 3 computes 2.7 × slower since step 1,204."])
    since: float = Field(description="Unix time; the condition holds since", examples=[1767225000])
    raised_at: float = Field(examples=[1767225600])
    gone_at: float | None = Field(
        description="the condition is gone since; null: it holds", examples=[None]
    )
    resolved_at: float | None = Field(description="null: it goes on", examples=[None])
    acknowledged_at: float | None = Field(examples=[1767225660])
    acknowledged_by: str | None = Field(
        description="a token's name, or the `operator` that the request named", examples=["ada"]
    )
    acknowledged_why: str | None = Field(examples=["its disk is being replaced"])


class AlertCounts(BaseModel):
    """Number of active alerts, independent of the filter of the request."""

    raised: int = Field(examples=[3])
    unacknowledged: int = Field(description="of these", examples=[2])
    critical: int = Field(description="of the unacknowledged ones", examples=[0])


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
    words: str = Field(description="what holds then, as a clause")
    unit: Literal["share", "ratio", "factor", "seconds", "count"] = Field(examples=["share"])
    below: bool = Field(description="it holds below the threshold instead of above")
    enabled: bool = Field(examples=[True])
    threshold: float = Field(examples=[0.1])
    raise_after_s: float = Field(description="it has to hold for so long", examples=[600])
    resolve_after_s: float = Field(description="it has to be gone for so long", examples=[300])
    severity: Severity = Field(examples=["warning"])
    changed_at: float | None = Field(description="null: these are the defaults", examples=[None])
    changed_by: str | None = Field(examples=[None])
    revision: int = Field(
        description="changes with what an admin may change; for the `If-Match` of a change",
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
        description="at an origin that the server allows with `--webhook-to`",
        examples=["https://hooks.example.com/paceline"],
    )
    severity: Severity = Field(
        default="warning", description="the least severity that it is told of"
    )


class Webhook(BaseModel):
    """A webhook: a URL that receives alerts, and the state of its newest delivery."""

    id: str = Field(examples=["9f31c0de5a7b"])
    name: str = Field(examples=["on-call"])
    url: str = Field(examples=["https://hooks.example.com/paceline"])
    severity: Severity = Field(description="the least that it is told of", examples=["warning"])
    created_at: float = Field(examples=[1767225600])
    created_by: str = Field(examples=["ada"])
    tries: int | None = Field(description="of its newest delivery; null: none yet", examples=[1])
    tried_at: float | None = Field(description="when the last try was", examples=[1767225600])
    sent_at: float | None = Field(description="null: it was not taken", examples=[1767225600])
    due_at: float | None = Field(
        description="when the next try is; null: it was taken or given up", examples=[None]
    )
    status: int | None = Field(description="HTTP status of the last try", examples=[200])
    error: str | None = Field(description="why it was not taken", examples=[None])


class CreatedWebhook(Webhook):
    """A webhook that the request has just created, with its secret."""

    secret: str = Field(
        description="for checking signatures; shown only here", examples=["whsec_…"]
    )


class WebhookTest(BaseModel):
    """Result of a test delivery."""

    sent: bool = Field(description="whether it was taken", examples=[True])
    status: int | None = Field(description="HTTP status; null: no answer", examples=[200])
    error: str | None = Field(examples=[None])
