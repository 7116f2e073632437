"""Connections to the bus."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from urllib.parse import urlsplit, urlunsplit

import redis
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.retry import Retry

from paceline.wire import Message, encode, signed

CA_FILE = "PACELINE_CA_FILE"  # PEM: certificates of who may have signed a server's or a bus's


def connect(url: str, *, timeout_s: float = 2.0, keep: bool = False) -> redis.Redis:
    """A client that fails fast: callers decide what an outage means.

    Threads may share it, if none of them blocks for long.

    Args:
        url: ``redis://host:port/db``, or ``rediss://…`` for TLS. `CA_FILE` may name who signs.
        timeout_s: of connecting and of each call; a blocking read must block for less.
        keep: a bus whose clients take too much memory closes other connections than these. Only
            the control plane's user has the right to ask for that.
    """
    return redis.Redis.from_url(
        url,
        **trust(url),
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 0),
        redis_connect_func=_kept if keep else None,
    )


def _kept(connection: AbstractConnection) -> None:
    """Connect as usual, and ask the bus not to close this connection to save memory."""
    connection.on_connect()  # type: ignore[no-untyped-call]
    connection.send_command("CLIENT", "NO-EVICT", "ON")  # type: ignore[no-untyped-call]
    with contextlib.suppress(redis.ResponseError):  # Redis 6, or a user without the right
        connection.read_response()


def trust(url: str) -> dict[str, str]:
    """The options of a client that name who may have signed the bus's certificate."""
    ca_file = os.environ.get(CA_FILE)
    return {"ssl_ca_certs": ca_file} if ca_file and url.startswith("rediss:") else {}


def publish(
    client: redis.Redis,
    stream: str,
    message: Message,
    run: str = "",
    maxlen: int | None = None,
    key: bytes | None = None,
) -> bytes:
    """Appends one message; returns its entry id.

    Args:
        client: of the bus.
        stream: to append to.
        message: what to say.
        run: public run id; empty of a node's message.
        maxlen: about how many entries the stream keeps; None: all.
        key: of the run or node that reads the stream: the entry gets a MAC; None: no MAC.

    Raises:
        redis.RedisError: the bus did not take it.
    """
    entry = encode(message, run)
    if key is not None:
        entry = signed(entry, stream, key)
    fields: dict[bytes | str, bytes | str] = dict(entry.items())
    return bytes(client.xadd(stream, fields, maxlen=maxlen, approximate=True))  # type: ignore[arg-type]


def without_password(url: str) -> str:
    """The address alone: without user, password and options, which may hold them, too."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def as_user(url: str, user: str, password: str) -> str:
    """The URL of the same bus for another user."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user}:{password}@{place}"))


def at_address(url: str, address: str) -> str:
    """The URL of a bus by another address of it: with the user and password of `url`."""
    who, separator, _ = urlsplit(url).netloc.rpartition("@")
    parts = urlsplit(address)
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{who}{separator}{place}"))


def at_host(url: str, host: str) -> str:
    """The URL of a bus by another name or address of its machine."""
    parts = urlsplit(url)
    who, separator, _ = parts.netloc.rpartition("@")
    port = "" if parts.port is None else f":{parts.port}"
    name = f"[{host}]" if ":" in host else host
    return urlunsplit(parts._replace(netloc=f"{who}{separator}{name}{port}"))


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
