"""A connection to the bus; an outage of the bus is a result, not an exception."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis

from paceline import wire
from paceline.core.outage import Outage
from paceline.wire.bus import connect, publish

_RETRY_S = 1.0
_log = logging.getLogger(__name__)

T = TypeVar("T")


class Link:
    """A connection to the bus; a context manager, for one thread.

    While the bus is away, it is tried at most once a second.

    Args:
        url: of the bus.
    """

    def __init__(self, url: str) -> None:
        self._use(url)

    @property
    def up(self) -> bool:
        """Whether the bus took the last call."""
        return not self._outage.active

    @property
    def place(self) -> str:
        """Host and port, for messages: the URL may hold a password."""
        return urlsplit(self.url).netloc.rpartition("@")[2] or self.url

    def attempt(self, call: Callable[[redis.Redis], T]) -> T | None:
        """The result of `call`, or None while the bus is away. `call` must not return None."""
        if self._outage.paused:
            return None
        try:
            result = call(self._client)
        except redis.RedisError as error:
            self._outage.failed(error)
            return None
        self._outage.over()
        return result

    def tell(self, message: wire.RunState | wire.NodeState, run: str = "") -> bool:
        """Publishes a message on TELEMETRY; returns whether the bus took it."""
        sent = self.attempt(lambda bus: publish(bus, wire.TELEMETRY, message, run))
        return sent is not None

    def move(self, url: str) -> None:
        """Moves the connection to a bus at another address."""
        self.close()
        self._use(url)

    def _use(self, url: str) -> None:
        self.url = url
        self._client = connect(url)
        self._outage = Outage(
            _log,
            f"the bus {self.place} is away",
            f"the bus {self.place} is back",
            first_s=_RETRY_S,
            most_s=_RETRY_S,
        )

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Commands:
    """The commands to a node from now on, each returned once, also across outages of the bus.

    Several processes of a node may read all commands: the agent and each `paceline run`.
    """

    def __init__(self, link: Link, node: str) -> None:
        self._link = link
        self._stream = wire.commands(node)
        self._last: bytes | None = None

    @property
    def started(self) -> bool:
        """Whether the bus has answered once. Commands from before this answer are ignored."""
        return self._last is not None

    def read(self, block_s: float) -> list[tuple[str, wire.Launch | wire.Kill]]:
        """New commands with their run ids; waits for the first. Empty while the bus is away.

        Args:
            block_s: longest wait, below the connection's timeout of 2 s.
        """
        if self._last is None:
            newest: Any = self._link.attempt(lambda bus: bus.xrevrange(self._stream, count=1))
            if newest is not None:
                self._last = newest[0][0] if newest else b"0-0"
            return []
        last = self._last
        block_ms = max(1, int(block_s * 1e3))

        def read(bus: redis.Redis) -> list[tuple[bytes, dict[bytes, bytes]]]:
            answer: Any = bus.xread({self._stream: last}, count=16, block=block_ms)
            return list(answer[0][1]) if answer else []

        commands: list[tuple[str, wire.Launch | wire.Kill]] = []
        for entry, fields in self._link.attempt(read) or []:
            self._last = entry
            try:
                run, message = wire.decode(fields)
            except wire.WireError as error:
                _log.error("a command was not understood: %s", error)
                continue
            if isinstance(message, wire.Launch | wire.Kill):
                commands.append((run, message))
        return commands
