"""Limits on the size of request bodies and on the rate of wrong logins."""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline_backend.api.errors import problem_response

_TOO_LARGE = HTTPStatus.REQUEST_ENTITY_TOO_LARGE

MOST_WRONG = 10
WRONG_S = 60.0  # seconds
# Maximum number of remembered networks, about 4 MB.
_MOST_ADDRESSES = 4096


class BodyLimit:
    """ASGI middleware that answers 413 to a body of more than `limit` bytes, without reading it.

    FastAPI's `max_body_size` does not suffice: if no route reads the body, its response is no
    problem document, and Dash turns the error that it raises into a 500.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on unless its body is too large."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif int(Headers(scope=scope).get("content-length", 0)) > self.limit:
            await self._refusal()(scope, receive, send)
        else:
            await self._counted(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0
        started = False

        async def counting() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.limit:
                raise HTTPException(_TOO_LARGE)
            return message

        async def sending(message: Message) -> None:
            nonlocal started
            # Once the body is too large, drop the application's response: the client gets a 413.
            if started or size <= self.limit:
                started = True
                await send(message)

        try:
            await self.app(scope, counting, sending)
        except HTTPException:
            if size <= self.limit:
                raise
        if size > self.limit and not started:
            await self._refusal()(scope, receive, send)

    def _refusal(self) -> Response:
        return problem_response(
            _TOO_LARGE,
            f"the body has more than {self.limit:,} bytes; "
            "paceline server --max-body-bytes sets this limit",
        )


class LoginThrottle:
    """Rate limit for wrong logins: `MOST_WRONG` per client network in `WRONG_S` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Network → times of its wrong logins. The network with the newest one comes last.
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_s(self, address: str) -> int:
        """Return the seconds until the address may try again; 0: now."""
        times = self._wrong.get(network_of(address), deque())
        if len(times) < MOST_WRONG:
            return 0
        return max(0, math.ceil(times[0] + WRONG_S - self._clock()))

    def wrong(self, address: str) -> None:
        """Count a wrong login."""
        network = network_of(address)
        self._wrong.setdefault(network, deque(maxlen=MOST_WRONG)).append(self._clock())
        self._wrong.move_to_end(network)
        if len(self._wrong) > _MOST_ADDRESSES:
            self._wrong.popitem(last=False)

    def right(self, address: str) -> None:
        """Take the newest wrong login back. Each login is counted as wrong before it is checked."""
        if times := self._wrong.get(network_of(address)):
            times.pop()


def network_of(address: str) -> str:
    """Return the network of an address: IPv4 the address itself, IPv6 its /64 network.

    A client can choose freely among the 2⁶⁴ addresses of its IPv6 network.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        # The client's address may also be the path of a socket.
        return address[:64]
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((int(parsed), 64), strict=False))
