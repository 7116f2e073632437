"""How much of a request the server reads, and how often a client may try to log in."""

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

MOST_WRONG = 10  # logins of a client address,
WRONG_S = 60.0  # in so many seconds
_MOST_ADDRESSES = 4096  # that are remembered: about 4 MB


class BodyLimit:
    """ASGI middleware that answers 413 to a body of more than `limit` bytes, without reading it.

    Not FastAPI's `max_body_size`: if no route reads the body, its answer is no problem document,
    and Dash turns the error that it raises into a 500.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what is small enough."""
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
            # What the application makes of the exception is left out, in favour of the refusal.
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
    """Remembers the wrong logins of each client address, and how long the address must wait.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()  # the last one wrong is newest

    def wait_s(self, address: str) -> int:
        """Seconds until the address may try again; 0: now."""
        times = self._wrong.get(network_of(address), deque())
        if len(times) < MOST_WRONG:
            return 0
        return max(0, math.ceil(times[0] + WRONG_S - self._clock()))

    def wrong(self, address: str) -> None:
        """Counts a wrong login."""
        network = network_of(address)
        self._wrong.setdefault(network, deque(maxlen=MOST_WRONG)).append(self._clock())
        self._wrong.move_to_end(network)
        if len(self._wrong) > _MOST_ADDRESSES:
            self._wrong.popitem(last=False)

    def right(self, address: str) -> None:
        """Takes the newest wrong login back: it was counted before it was checked."""
        if times := self._wrong.get(network_of(address)):
            times.pop()


def network_of(address: str) -> str:
    """What a client cannot leave at will: of IPv6 each has 2⁶⁴ addresses."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # such as the path of a socket
        return address[:64]
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((int(parsed), 64), strict=False))
