"""What a control plane process needs to know."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from paceline.core.errors import PacelineError

MAX_BODY_BYTES = 2**20  # the largest bodies are scenarios and policies of 10,000 ranks


@dataclass(frozen=True)
class Settings:
    """Where to listen, and which database and bus to use.

    Raises:
        PacelineError: listening beyond this machine without a token.
    """

    database: str  # SQLAlchemy URL
    bus: str  # redis URL, as agents must be able to reach it
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None  # None: whoever reaches the port may do everything
    max_body_bytes: int = MAX_BODY_BYTES  # of a request; larger ones are refused

    def __post_init__(self) -> None:
        if not self.token and not is_loopback(self.host):
            raise PacelineError(
                f"listening on {self.host} lets other machines start programs here: "
                "set --token (or PACELINE_TOKEN), or listen on 127.0.0.1"
            )

    @property
    def url(self) -> str:
        """Where a browser on this machine finds us."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
