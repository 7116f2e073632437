"""The connection of `paceline agent` and `paceline node` to the bus."""

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
    from paceline.node.session import BusSession

T = TypeVar("T")

_log = logging.getLogger(__name__)


def linked(session: BusSession) -> Link:
    """Connect to the bus; raise an InputError if the session's URL is invalid."""
    from paceline.node.link import Link

    try:
        return Link(session)
    except ValueError as error:
        raise InputError(f"bus {place(session.bus)}: {error}") from error


def place(url: str) -> str:
    """Return a URL without its user and password."""
    return urlsplit(url)._replace(netloc=urlsplit(url).netloc.rpartition("@")[2]).geturl()


def wait_for_session(
    client: Client, node: str, bus: str | None = None, patience_s: float = math.inf
) -> BusSession:
    """Request a node's session on the bus; for retries and errors see `patiently`.

    `bus` is the URL of the bus as this machine reaches it; None: the URL that the server returns.
    """
    from paceline.node import session

    return patiently(lambda: session.of_node(client, node, bus), patience_s)


def patiently(ask: Callable[[], T], patience_s: float) -> T:
    """Return the result of `ask`; while no server answers, retry for `patience_s` seconds.

    A PacelineError means that the server rejects the request, or does not answer in time.
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
                _log.warning("%s; retrying until the server answers", error)
            time.sleep(1.0)


def session_finder(client: Client, node: str, bus: str | None) -> Callable[[], BusSession | None]:
    """Return a function that requests a new session of a node.

    The function returns None if the server does not answer or grants no session.
    """
    from paceline.node import session
    from paceline.node.client import ServerUnreachable

    said = ""

    def find_session() -> BusSession | None:
        nonlocal said
        try:
            return session.of_node(client, node, bus)
        except ServerUnreachable as error:
            _log.debug("%s", error)
        # The operator must act, for example because the token was revoked: a retry does not help.
        except PacelineError as error:
            if said != (said := str(error)):
                _log.warning("the server grants this node no session: %s", error)
        return None

    return find_session


def log_to_stderr() -> None:
    """Write Paceline's logs to standard error."""
    logger = logging.getLogger("paceline")
    logs.to_stderr(logger, "%(asctime)s %(levelname)s %(message)s")
    logger.setLevel(os.environ.get("PACELINE_LOG", "INFO"))
