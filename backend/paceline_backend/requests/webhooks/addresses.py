"""Where a webhook may be: at an origin that the operator allows, at an address of a usual kind."""

from __future__ import annotations

import ipaddress
import socket

from paceline.core.errors import PacelineError
from paceline_backend.server.origins import Origin, Origins, origin_of


class AddressError(PacelineError):
    """Nothing may be sent there."""


def check(url: str, allowed: Origins) -> Origin:
    """The origin of a webhook's URL.

    Raises:
        AddressError: it is not allowed, or no URL.
    """
    try:
        covered, origin = allowed.covers(url), origin_of(url)
    except PacelineError as error:
        raise AddressError(str(error)) from error
    if not covered:
        shown = f"{origin.scheme}://{origin.host}:{origin.port}"
        raise AddressError(
            f"{shown} is not allowed: an operator lists it with `paceline server --webhook-to "
            f"{shown}`"
        )
    return origin


def address_of(url: str, allowed: Origins) -> tuple[Origin, str]:
    """The origin of a webhook's URL, and the address to connect to.

    Whoever connects has to use this address, and not look the name up again: its owner may have
    changed it meanwhile.

    Raises:
        AddressError: it is not allowed, its name is unknown, or it is an address of a kind that no
            webhook has.
    """
    origin = check(url, allowed)
    try:
        known = socket.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressError(f"{origin.host}: the name is not known: {error}") from error
    addresses = [str(info[4][0]) for info in known]
    for address in addresses:
        if reason := _refused(address):
            raise AddressError(f"{origin.host} is {address}, which is {reason}")
    return origin, addresses[0]


def _refused(address: str) -> str | None:
    """Why nothing is sent to an address; None: it may be."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None)
    parsed = parsed if mapped is None else mapped
    if parsed.is_loopback:  # reserved, too, in IPv6; it counts where the operator lists it
        return None
    if parsed.is_link_local:  # where clouds tell machines their credentials
        return "link-local"
    if parsed.is_multicast:
        return "multicast"
    if parsed.is_unspecified:
        return "unspecified"
    return "reserved" if parsed.is_reserved else None
