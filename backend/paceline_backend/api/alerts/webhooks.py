"""REST: webhooks, which receive alerts."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, Request

from paceline_backend.api.alerts import models
from paceline_backend.api.audit import requester_of
from paceline_backend.api.errors import ProblemError, documented
from paceline_backend.api.rules import ADMIN
from paceline_backend.api.runs import settings_of, store_of
from paceline_backend.requests import InvalidRequestError
from paceline_backend.requests import webhooks as sending
from paceline_backend.server.keys import Keys
from paceline_backend.store import Store, audit, meta
from paceline_backend.store.alerts import webhooks

_AWAY = HTTPStatus.SERVICE_UNAVAILABLE
_INVALID = HTTPStatus.UNPROCESSABLE_ENTITY
_MISSING = HTTPStatus.NOT_FOUND

router = APIRouter(
    prefix="/alerts/webhooks", responses=documented(_AWAY), dependencies=[Depends(ADMIN)]
)


@router.get("", response_model=list[models.Webhook])
def list_webhooks(request: Request) -> Any:
    """List the webhooks, each with the result of its newest delivery."""
    with store_of(request).read() as connection:
        return webhooks.listed(connection)


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    response_model=models.CreatedWebhook,
    responses=documented(HTTPStatus.BAD_REQUEST, _INVALID),
)
def create_webhook(request: Request, body: models.NewWebhook) -> Any:
    """Create a webhook. The response is the only one that shows its secret."""
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


@router.delete(
    "/{webhook}", response_model=models.Webhook, responses=documented(_MISSING, _INVALID)
)
def delete_webhook(request: Request, webhook: str) -> Any:
    """Delete a webhook. Deliveries that are still due are dropped."""
    try:
        with store_of(request).write() as connection:
            known = webhooks.get(connection, webhook)
            webhooks.delete(connection, webhook)
            by, details = requester_of(request), {"id": webhook}
            audit.record(connection, by, "webhook.delete", target=known["name"], details=details)
            return known
    except webhooks.UnknownWebhookError as error:
        raise ProblemError(_MISSING, str(error)) from error


@router.post(
    "/{webhook}/test",
    response_model=models.WebhookTest,
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
