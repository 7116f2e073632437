"""Liveness and readiness."""

from __future__ import annotations

import logging
from typing import Any

import redis
from fastapi import APIRouter, Request, Response

from paceline.wire.bus import connect
from paceline_backend.api import models
from paceline_backend.api.runs import settings_of, store_of
from paceline_backend.server import heartbeat
from paceline_backend.store import Store, StoreError, meta

log = logging.getLogger(__name__)
router = APIRouter()

_AWAY = "does not answer"  # strangers may ask: the log says why


@router.get("/healthz")
def healthz() -> models.Health:
    """This process answers."""
    return models.Health()


@router.get("/readyz", responses={503: {"model": models.Readiness}})
def readyz(request: Request, response: Response) -> models.Readiness:
    """Whether database, bus and worker can be reached; 503 says which cannot."""
    bus, worker = _bus_and_worker(settings_of(request).bus)
    ready = models.Readiness(database=_database(store_of(request)), bus=bus, worker=worker)
    if {ready.database, ready.bus, ready.worker} != {"ok"}:
        response.status_code = 503
    return ready


def _database(store: Store) -> str:
    try:
        with store.read() as connection:
            meta.probe(connection)
    except StoreError as error:
        log.warning("not ready: %s", error)
        return _AWAY
    return "ok"


def _bus_and_worker(url: str) -> tuple[str, str]:
    try:
        with connect(url) as client:
            workers: list[Any] = heartbeat.beats(client)
    except redis.RedisError as error:
        log.warning("not ready: the bus does not answer: %s", error)
        return _AWAY, "unknown while the bus is away"
    return "ok", "ok" if workers else "no worker has beaten in the last 10 s"
