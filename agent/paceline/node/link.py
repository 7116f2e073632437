"""A connection to the bus. An outage of the bus raises no errors.

During an outage, `Link.attempt` returns None, `Link.report` returns False, and `Commands.read`
returns an empty list.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis

from paceline import wire
from paceline.core.outage import Outage, Refusals
from paceline.node.session import BusSession
from paceline.wire.bus import connect, publish

_RETRY_S = 1.0
_log = logging.getLogger(__name__)

Command = wire.Launch | wire.Kill | wire.EndRanks | wire.JoinRendezvous | wire.Ask | wire.CheckNode
T = TypeVar("T")


class Link:
    """A connection to the bus; a context manager. Not thread-safe.

    During an outage of the bus, the link retries at most once a second.
    """

    def __init__(self, session: BusSession) -> None:
        self._use(session)

    @property
    def url(self) -> str:
        """URL of the bus; it may hold a password."""
        return self.session.bus

    @property
    def up(self) -> bool:
        """True unless the last call failed."""
        return not self._outage.active

    @property
    def place(self) -> str:
        """Host and port of the bus, for log messages, because the URL may hold a password."""
        return urlsplit(self.url).netloc.rpartition("@")[2] or self.url

    def attempt(self, call: Callable[[redis.Redis], T]) -> T | None:
        """Return the result of `call`, or None during an outage; `call` must not return None."""
        if self._outage.paused:
            return None
        try:
            result = call(self._client)
        except redis.RedisError as error:
            self._outage.failed(error)
            return None
        self._outage.succeeded()
        return result

    def address(self) -> str | None:
        """Return this machine's own address in its connection to the bus.

        Other nodes can usually reach this machine at that address. Return None during an outage of
        the bus.
        """
        return self.attempt(_local_address)

    def report(self, message: wire.RunState | wire.NodeState, run: str = "") -> bool:
        """Publish a message; return True if the bus accepted it."""
        sent = self.attempt(lambda bus: publish(bus, self.session.reports, message, run))
        return sent is not None

    def move(self, session: BusSession) -> None:
        """Move the connection to another bus, or to another user of the same bus."""
        self.close()
        self._use(session)

    def _use(self, session: BusSession) -> None:
        self.session = session
        self._client = connect(session.bus)
        self._outage = Outage(
            _log,
            f"the bus {self.place} is unreachable",
            f"the bus {self.place} is reachable again",
            first_s=_RETRY_S,
            most_s=_RETRY_S,
        )

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def __enter__(self) -> Link:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _local_address(bus: redis.Redis) -> str:
    connection: Any = bus.connection_pool.get_connection()
    try:
        return str(connection._sock.getsockname()[0])
    finally:
        bus.connection_pool.release(connection)


class Commands:
    """A reader that returns each new command of a session once, even if the bus fails in between.

    If the session has a key, entries that the control plane did not write are ignored. Reading a
    command does not remove it from the bus.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._last: bytes | None = None
        self._forged = Refusals(_log, "ignoring a command that the control plane did not write")

    @property
    def started(self) -> bool:
        """True if the bus has answered once. Commands from before the first answer are ignored."""
        return self._last is not None

    def read(self, block_s: float) -> list[tuple[str, Command]]:
        """Return new commands, each with its run's id; if there are none, wait for one.

        The list is empty during an outage of the bus, and if no command arrives within `block_s`
        seconds. `block_s` must be below the connection's timeout of 2 s.
        """
        stream, key = self._link.session.obeys, self._link.session.key
        if self._last is None:
            newest: Any = self._link.attempt(lambda bus: bus.xrevrange(stream, count=1))
            if newest is not None:
                self._last = newest[0][0] if newest else b"0-0"
            return []
        last = self._last
        block_ms = max(1, int(block_s * 1e3))

        def read(bus: redis.Redis) -> list[tuple[bytes, dict[bytes, bytes]]]:
            answer: Any = bus.xread({stream: last}, count=16, block=block_ms)
            return list(answer[0][1]) if answer else []

        commands: list[tuple[str, Command]] = []
        for entry, fields in self._link.attempt(read) or []:
            self._last = entry
            try:
                run, message = wire.decode_signed(fields, stream, key)
            except wire.ForgedError as error:
                self._forged.add(error)
                continue
            except wire.WireError as error:
                _log.error("cannot decode a command: %s", error)
                continue
            if isinstance(message, Command):
                commands.append((run, message))
        return commands
