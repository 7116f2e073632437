"""Origins of webhooks that the operator allows with `--webhook-to`.

Functions raise `PacelineError` for a text that is no valid origin or URL.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from paceline.core.errors import PacelineError

_PORTS = {"https": 443, "http": 80}


@dataclass(frozen=True)
class Origin:
    """Scheme, host and port. The host `*.example.com` covers all names below example.com."""

    scheme: str
    host: str
    port: int

    def covers(self, other: Origin) -> bool:
        """Return whether this origin equals `other` or, with a `*` in its host, matches `other`."""
        if (self.scheme, self.port) != (other.scheme, other.port):
            return False
        if self.host.startswith("*."):
            return other.host.endswith(self.host[1:]) and other.host != self.host[2:]
        return self.host == other.host


class Origins:
    """A list of origins, such as `https://*.example.com` or `http://10.0.0.7:9093`."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._texts = tuple(texts)
        self._origins = [_origin_only(text) for text in self._texts]

    def covers(self, url: str) -> bool:
        """Return whether a URL is at one of the origins.

        Raises:
            PacelineError: the URL is not `http` or `https`, or has a user, password or fragment.
        """
        origin = origin_of(url)
        return any(allowed.covers(origin) for allowed in self._origins)

    @property
    def text(self) -> str:
        """Return the origins in the format of `--webhook-to`."""
        return ",".join(self._texts)

    def __bool__(self) -> bool:
        return bool(self._origins)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origins) and self._texts == other._texts

    def __hash__(self) -> int:
        return hash(self._texts)

    @classmethod
    def of(cls, text: str | None) -> Origins:
        """Parse `--webhook-to` or its environment variable: `https://a,http://b:9093`."""
        return cls(part.strip() for part in (text or "").split(",") if part.strip())


def origin_of(url: str) -> Origin:
    """Return the origin of a URL; raises the errors of `Origins.covers`."""
    parts = _split(url)
    if parts.username is not None or parts.password is not None or parts.fragment:
        raise PacelineError(f"{_shown(url)}: leave out user, password and fragment")
    if parts.scheme not in _PORTS or not parts.hostname:
        raise PacelineError(f"{_shown(url)}: give a URL such as https://hooks.example.com/path")
    return Origin(parts.scheme, parts.hostname.rstrip("."), parts.port or _PORTS[parts.scheme])


def _origin_only(text: str) -> Origin:
    try:
        origin = origin_of(text)
    except PacelineError as error:
        raise PacelineError(f"--webhook-to {error}") from error
    if _split(text).path not in ("", "/") or _split(text).query:
        raise PacelineError(f"--webhook-to {_shown(text)}: give scheme, host and port, but no path")
    if "*" in origin.host[1:] or (origin.host.startswith("*") and origin.host[1:2] != "."):
        message = f"--webhook-to {_shown(text)}: a star may only be the first label, as in *.a.com"
        raise PacelineError(message)
    return origin


def _split(url: str) -> SplitResult:
    if not url.isascii() or any(char.isspace() or not char.isprintable() for char in url):
        raise PacelineError("a URL must have only ASCII characters, and no spaces")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise PacelineError(f"{_shown(url)}: {error}") from error
    return parts


def _shown(url: str) -> str:
    """Return a URL up to its host. The paths of webhooks are often secrets."""
    scheme, separator, rest = url.partition("://")
    host = rest.split("/", 1)[0].rsplit("@", 1)[-1]
    return f"{scheme}{separator}{host}"[:200]
