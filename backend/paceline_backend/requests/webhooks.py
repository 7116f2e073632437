"""Webhooks: permitted addresses, bodies, signatures, and the request itself.

The operator must allow a webhook's origin, and its address must not be link-local, multicast,
unspecified or reserved. These checks protect against server-side request forgery. Signatures follow
Standard Webhooks (https://www.standardwebhooks.com), for which receivers have libraries. Each
request has the headers `webhook-id`, `webhook-timestamp` and `webhook-signature`; the last one is
`v1,` followed by the Base64 of HMAC-SHA256 over "id.timestamp.body". `control.alerts.Sender` calls
`post`, and so does the route that tests a webhook::

    sent = post(url, body_of("raised", alert, at), "msg_7", key, allowed)
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import orjson

from paceline.core.errors import PacelineError
from paceline.core.version import __version__
from paceline_backend.server.origins import Origin, Origins, origin_of


class AddressError(PacelineError):
    """Requests to this URL are not permitted."""


def allowed_origin(url: str, allowed: Origins) -> Origin:
    """Return the origin of a webhook's URL.

    Raises:
        AddressError: the origin is not allowed, or the text is not a URL.
    """
    try:
        covered, origin = allowed.covers(url), origin_of(url)
    except PacelineError as error:
        raise AddressError(str(error)) from error
    if not covered:
        shown = f"{origin.scheme}://{origin.host}:{origin.port}"
        raise AddressError(
            f"{shown} is not allowed: an operator can allow it with `paceline server --webhook-to "
            f"{shown}`"
        )
    return origin


def address_of(url: str, allowed: Origins) -> tuple[Origin, str]:
    """Return the origin of a webhook's URL, and the address to connect to.

    The caller must connect to this address and must not resolve the name again, because the owner
    of the name may have changed the address meanwhile (DNS rebinding).

    Raises:
        AddressError: the origin is not allowed, its name is unknown, or its address is link-local,
            multicast, unspecified or reserved.
    """
    origin = allowed_origin(url, allowed)
    try:
        known = socket.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressError(f"{origin.host}: the name cannot be resolved: {error}") from error
    addresses = [str(info[4][0]) for info in known]
    for address in addresses:
        if reason := _refused(address):
            raise AddressError(f"{origin.host} is {address}, which is {reason}")
    return origin, addresses[0]


def _refused(address: str) -> str | None:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    parsed = parsed if mapped is None else mapped
    # The operator may allow loopback addresses. In IPv6, these also count as reserved, so test for
    # loopback first.
    if parsed.is_loopback:
        return None
    # Cloud providers serve credentials of machines at link-local addresses.
    if parsed.is_link_local:
        return "link-local"
    if parsed.is_multicast:
        return "multicast"
    if parsed.is_unspecified:
        return "unspecified"
    return "reserved" if parsed.is_reserved else None


# Maximum time in seconds from connecting to the headers of the answer.
WEBHOOK_TIMEOUT_S = 5.0
_DONE = range(200, 300)
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


@dataclass(frozen=True)
class Sent:
    """Result of an attempt to deliver a webhook's request.

    Args:
        status: HTTP status of the answer, or None without an answer.
        error: reason why the delivery failed, or None; never contains text of the answer.
    """

    status: int | None
    error: str | None


def body_of(event: str, alert: Mapping[str, Any] | None, at: float) -> bytes:
    """Return the JSON body of a webhook request.

    Args:
        event: ``raised``, ``resolved`` or ``test``.
        alert: the alert as GET /alerts returns it, or None in a test.
        at: Unix time of the event.
    """
    return orjson.dumps({"type": f"alert.{event}", "timestamp": at, "data": alert})


def delivery_id(key: int) -> str:
    """Return the `webhook-id` of a delivery, which is the same in all tries."""
    return f"msg_{key}"


def secret_text(key: bytes) -> str:
    """Return a webhook's secret in the format that its receiver uses."""
    return f"whsec_{base64.b64encode(key).decode()}"


def signature(key: bytes, name: str, timestamp: int, body: bytes) -> str:
    """Return the `webhook-signature` of a request.

    `name` is the `webhook-id`, `timestamp` the `webhook-timestamp` (Unix time in seconds), and
    `body` has the exact bytes of the request's body.
    """
    signed = f"{name}.{timestamp}.".encode() + body
    return f"v1,{base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()}"


def post(
    url: str,
    body: bytes,
    name: str,
    key: bytes,
    allowed: Origins,
    timeout_s: float = WEBHOOK_TIMEOUT_S,
) -> Sent:
    """Send a signed body once.

    Redirects are not followed, proxies of the environment are not used, and only the status of the
    answer is read. `name` is the `webhook-id`.
    """
    try:
        origin, address = address_of(url, allowed)
    except AddressError as error:
        return Sent(None, str(error))
    timestamp = int(time.time())
    headers = {
        "Host": urlsplit(url).netloc,
        "Content-Type": "application/json",
        "User-Agent": f"paceline/{__version__}",
        "webhook-id": name,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(key, name, timestamp, body),
    }
    # Connect to the checked address. The host name is used only to verify the certificate.
    there = {"sni_hostname": origin.host}
    direct = _at(url, address, origin.port)
    try:
        status = asyncio.run(_status(direct, body, headers, there, timeout_s))
    except TimeoutError:
        return Sent(None, f"{origin.host} port {origin.port}: no answer within {timeout_s:g} s")
    except (httpx.HTTPError, ValueError) as error:
        return Sent(None, f"{origin.host} port {origin.port}: {type(error).__name__}: {error}")
    if status in _DONE:
        return Sent(status, None)
    return Sent(status, f"{origin.host} answered {status} {_PHRASES.get(status, '')}".rstrip())


async def _status(
    url: str, body: bytes, headers: dict[str, str], there: dict[str, str], timeout_s: float
) -> int:
    # httpx's own timeouts apply to each read, so a receiver that sends byte after byte would never
    # reach them.
    async with (
        asyncio.timeout(timeout_s),
        httpx.AsyncClient(trust_env=False, follow_redirects=False, timeout=None) as client,
        client.stream("POST", url, content=body, headers=headers, extensions=there) as answer,
    ):
        return answer.status_code


def _at(url: str, address: str, port: int) -> str:
    parts = urlsplit(url)
    host = f"[{address}]" if ":" in address else address
    return urlunsplit(parts._replace(netloc=f"{host}:{port}"))
