"""Wake-up of idle workers after a request that may have changed something."""

from __future__ import annotations

import redis
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline_backend.requests import streams

_READS = frozenset({"GET", "HEAD", "OPTIONS"})


class WakeWorkers:
    """ASGI middleware that adds an entry to `CHANGES` after each request that is not a read.

    It runs behind the guard, so only requests with a token wake workers.
    """

    def __init__(self, app: ASGIApp, bus: redis.Redis) -> None:
        self.app = app
        self.bus = bus

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and wake the workers when it has been answered."""
        try:
            await self.app(scope, receive, send)
        finally:
            # A request that failed may have committed something before.
            if scope["type"] == "http" and scope["method"] not in _READS:
                await run_in_threadpool(streams.wake, self.bus)
