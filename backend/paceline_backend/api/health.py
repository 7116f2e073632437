"""Liveness and readiness."""

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

_AWAY = "does not answer"  # or takes nothing; strangers may ask: the log says why


@router.get("/healthz")
def healthz() -> models.Health:
    """This process answers."""
    return models.Health()


@router.get("/readyz", responses={503: {"model": models.Readiness}})
def readyz(request: Request, response: Response) -> models.Readiness:
    """Whether the database and the bus take writes and a worker works; 503 says which does not."""
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
        client.set(PROBE, b"", ex=60)  # a bus whose disk is full answers, but takes nothing
        workers: list[Any] = heartbeat.beats(client)
    except redis.RedisError as error:
        log.warning("not ready: the bus does not answer: %s", error)
        return _AWAY, "unknown while the bus is away"
    return "ok", "ok" if workers else "no worker has beaten in the last 10 s"
