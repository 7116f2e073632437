"""Connections to the bus, and the URLs that name it.

Functions here raise `redis.RedisError` while the bus is unavailable; the caller decides what to do.
"""

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

# Variable with the path of a PEM file of the certificate authorities that are trusted for the
# server and the bus.
CA_FILE = "PACELINE_CA_FILE"


def connect(url: str, *, timeout_s: float = 2.0, keep: bool = False) -> redis.Redis:
    """Return a client that does not retry in an outage.

    Threads may share the client if none of them blocks for long.

    Args:
        url: ``redis://host:port/db``, or ``rediss://…`` for TLS. `CA_FILE` may name the authorities
            to trust.
        timeout_s: the timeout in seconds for connecting and for each call. A blocking read must
            block for less.
        keep: if True, the bus does not close this connection when its clients take too much
            memory. Only the control plane's user may request this.
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
    connection.on_connect()  # type: ignore[no-untyped-call]
    connection.send_command("CLIENT", "NO-EVICT", "ON")  # type: ignore[no-untyped-call]
    # Redis 6 does not have the command, and other users than the control plane's may not call it.
    with contextlib.suppress(redis.ResponseError):
        connection.read_response()


def trust(url: str) -> dict[str, str]:
    """Return the client options that name the authorities trusted to sign the bus's certificate."""
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
    """Append a message to a stream and return its entry id.

    `run` is the public run id, empty for a node's message. The stream keeps about `maxlen` entries;
    None: all entries. `key` is the key of the run or node that reads the stream, for the MAC; None:
    no MAC.
    """
    entry = encode(message, run)
    if key is not None:
        entry = signed(entry, stream, key)
    fields: dict[bytes | str, bytes | str] = dict(entry.items())
    return bytes(client.xadd(stream, fields, maxlen=maxlen, approximate=True))  # type: ignore[arg-type]


def without_password(url: str) -> str:
    """Return the URL without user, password and options, which may hold a password, too."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def as_user(url: str, user: str, password: str) -> str:
    """Return the URL of the same bus for another user."""
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user}:{password}@{place}"))


def at_address(url: str, address: str) -> str:
    """Return `address`, another URL of the same bus, with the user and password of `url`."""
    who, separator, _ = urlsplit(url).netloc.rpartition("@")
    parts = urlsplit(address)
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{who}{separator}{place}"))


def at_host(url: str, host: str) -> str:
    """Return the URL of the same bus with another name or address of its machine."""
    parts = urlsplit(url)
    who, separator, _ = parts.netloc.rpartition("@")
    port = "" if parts.port is None else f":{parts.port}"
    name = f"[{host}]" if ":" in host else host
    return urlunsplit(parts._replace(netloc=f"{who}{separator}{name}{port}"))


def is_loopback(host: str) -> bool:
    """Return True if a host name or address means this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
