"""Liveness and readiness probes."""

from __future__ import annotations

import logging
from typing import Any

import redis
from fastapi import APIRouter, Depends, Request, Response

from paceline_backend.api import models
from paceline_backend.api.rules import ANYBODY
from paceline_backend.requests.streams import PROBE
from paceline_backend.server import heartbeat
from paceline_backend.store.meta import Probe

log = logging.getLogger(__name__)
router = APIRouter(dependencies=[Depends(ANYBODY)])

# Also reported for a part that answers but accepts no writes. These routes are public, so only the
# log gives the reason.
_AWAY = "does not answer"


@router.get("/healthz")
def healthz() -> models.Health:
    """Return 200 while this process serves requests."""
    return models.Health()


@router.get("/readyz", responses={503: {"model": models.Readiness}})
def readyz(request: Request, response: Response) -> models.Readiness:
    """Return 200 if database and bus accept writes and a worker is alive; else 503."""
    bus, worker = _bus_and_worker(request.app.state.bus)
    ready = models.Readiness(database=_database(request.app.state.probe), bus=bus, worker=worker)
    if {ready.database, ready.bus, ready.worker} != {"ok"}:
        response.status_code = 503
    return ready


def _database(probe: Probe) -> str:
    problem = probe.problem()
    if problem is not None:
        log.warning("not ready: %s", problem)
        return _AWAY
    return "ok"


def _bus_and_worker(client: redis.Redis) -> tuple[str, str]:
    try:
        # A bus whose disk is full still answers, but accepts no writes.
        client.set(PROBE, b"", ex=60)
        workers: list[Any] = heartbeat.beats(client)
    except redis.RedisError as error:
        log.warning("not ready: the bus does not answer: %s", error)
        return _AWAY, "unknown while the bus is away"
    return "ok", "ok" if workers else "no worker has sent a heartbeat in the last 10 s"
