"""How `paceline agent` and `paceline node` come to the bus."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from paceline.core import logs
from paceline.core.errors import InputError, PacelineError

if TYPE_CHECKING:
    from paceline.node.client import Client
    from paceline.node.link import Link
    from paceline.node.session import Session

T = TypeVar("T")

_log = logging.getLogger(__name__)


def linked(session: Session) -> Link:
    """A connection to the bus.

    Raises:
        InputError: the session's URL is none.
    """
    from paceline.node.link import Link

    try:
        return Link(session)
    except ValueError as error:
        raise InputError(f"bus {place(session.bus)}: {error}") from error


def place(url: str) -> str:
    """A URL without its password."""
    return urlsplit(url)._replace(netloc=urlsplit(url).netloc.rpartition("@")[2]).geturl()


def wait_for_session(
    client: Client, node: str, bus: str | None = None, patience_s: float = math.inf
) -> Session:
    """A node's session; waits for a server that starts later.

    Args:
        client: of the server.
        node: its name.
        bus: URL of the bus as this machine reaches it; None: what the server says.
        patience_s: how long it waits.

    Raises:
        PacelineError: the server refuses, or does not answer for so long.
    """
    from paceline.node import session

    return patiently(lambda: session.of_node(client, node, bus), patience_s)


def patiently(ask: Callable[[], T], patience_s: float) -> T:
    """What a server answers that may start later.

    Args:
        ask: asks the server.
        patience_s: how long to go on.

    Raises:
        PacelineError: the server refuses, or does not answer for so long.
    """
    from paceline.node.client import ServerUnreachable

    said, end = "", time.monotonic() + patience_s
    while True:
        try:
            return ask()
        except ServerUnreachable as error:
            if time.monotonic() > end:
                raise
            if said != (said := str(error)):
                _log.warning("%s; waiting for it", error)
            time.sleep(1.0)


def session_finder(client: Client, node: str, bus: str | None) -> Callable[[], Session | None]:
    """A function that asks the server for another session; None: it gives none now."""
    from paceline.node import session
    from paceline.node.client import ServerUnreachable

    said = ""

    def find_session() -> Session | None:
        nonlocal said
        try:
            return session.of_node(client, node, bus)
        except ServerUnreachable as error:
            _log.debug("%s", error)
        except PacelineError as error:  # such as a revoked token: waiting does not help
            if said != (said := str(error)):
                _log.warning("the server gives no session for this node: %s", error)
        return None

    return find_session


def log_to_stderr() -> None:
    """Writes what Paceline logs to standard error."""
    logger = logging.getLogger("paceline")
    logs.to_stderr(logger, "%(asctime)s %(levelname)s %(message)s")
    logger.setLevel(os.environ.get("PACELINE_LOG", "INFO"))
