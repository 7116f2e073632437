"""Permitted webhook addresses: an origin that the operator allows, at an ordinary address.

The checks protect against server-side request forgery.
"""

from __future__ import annotations

import ipaddress
import socket

from paceline.core.errors import PacelineError
from paceline_backend.server.origins import Origin, Origins, origin_of


class AddressError(PacelineError):
    """Requests to this URL are not permitted."""


def check(url: str, allowed: Origins) -> Origin:
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

    The caller must connect to this address and must not resolve the name again, because its owner
    may have changed it meanwhile (DNS rebinding).

    Raises:
        AddressError: the origin is not allowed, its name is unknown, or its address is link-local,
            multicast, unspecified or reserved.
    """
    origin = check(url, allowed)
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
    """Return why an address is refused, or None."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    parsed = parsed if mapped is None else mapped
    # The operator may list loopback origins. In IPv6 loopback is also reserved, so test it first.
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
