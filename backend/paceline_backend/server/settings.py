"""What a control plane process needs to know."""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import PacelineError
from paceline.wire.bus import is_loopback
from paceline_backend.server.origins import Origins
from paceline_backend.server.prices import Price

PROXY_ROLES = ("viewer", "operator", "admin")
MAX_STREAMS = 100  # pages of an operator: each has one event stream
MAX_BODY_BYTES = 2**20  # the largest bodies are scenarios and policies of 10,000 ranks


@dataclass(frozen=True)
class Proxies:
    """Whose word about a client is taken: HTTP proxies in front of the server.

    Raises:
        PacelineError: what is no address, or no role, or a header from nobody.
    """

    trusted: tuple[str, ...] = ()  # addresses and networks; from all others no such header counts
    header: str | None = None  # in which they name the user whom they have authenticated
    roles: Mapping[str, str] = field(default_factory=dict)  # by user; others are viewers

    def __post_init__(self) -> None:
        for address in self.trusted:
            try:
                ipaddress.ip_network(address)
            except ValueError as error:
                raise PacelineError(f"--trusted-proxy {address}: {error}") from error
        for user, role in self.roles.items():
            if role not in PROXY_ROLES:
                roles = ", ".join(PROXY_ROLES)
                raise PacelineError(f"--proxy-role {user}={role}: the roles are {roles}")
        if self.header is not None and not self.trusted:
            raise PacelineError(
                "--trust-proxy-header: name the proxies' addresses with --trusted-proxy; "
                "otherwise every client could say who it is"
            )

    def trusts(self, address: str) -> bool:
        """Whether this is a trusted proxy's address."""
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:  # such as the path of a socket
            return False
        return any(parsed in ipaddress.ip_network(network) for network in self.trusted)

    @classmethod
    def of(cls, trusted: str | None, header: str | None, roles: str | None) -> Proxies:
        """As the command line and the environment say it: `a,b`, `X-User`, `user=role,…`.

        Raises:
            PacelineError: as the class.
        """
        by_user: dict[str, str] = {}
        for pair in _parts(roles):
            user, equals, role = pair.rpartition("=")
            if not equals or not user:
                raise PacelineError(f"--proxy-role {pair}: give USER=ROLE")
            by_user[user] = role
        return cls(tuple(_parts(trusted)), header or None, by_user)

    def options(self) -> dict[str, str]:
        """As a server's child process gets it, by its environment."""
        return {
            "PACELINE_TRUSTED_PROXY": ",".join(self.trusted),
            "PACELINE_TRUST_PROXY_HEADER": self.header or "",
            "PACELINE_PROXY_ROLE": ",".join(f"{u}={role}" for u, role in self.roles.items()),
        }


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


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
    # By configuration; the database has further ones.
    token: str | None = None  # an admin's
    agent_token: str | None = None
    viewer_token: str | None = None
    # Without `token` the server makes one, for its own user on this machine. Else somebody makes
    # the first one by `paceline token create --database`.
    makes_token: bool = True
    max_body_bytes: int = MAX_BODY_BYTES  # of a request; larger ones are refused
    tls_cert: Path | None = None  # PEM, with the chain; None: plain HTTP
    tls_key: Path | None = None  # PEM; None: it is in `tls_cert`
    proxies: Proxies = Proxies()
    # The embedded bus listens on `host`, and nodes find it where they have found this server.
    trust_network: bool = False
    max_streams: int = MAX_STREAMS  # event streams of a client; further ones are refused
    path_prefix: str = ""  # below which a reverse proxy serves this server, such as `/paceline`
    webhook_origins: Origins = field(default_factory=Origins)  # where webhooks may be
    hour_price: Price | None = None  # of a worker; None: nothing costs money
    # What stays of runs that are over; None: no limit.
    keep_days: float | None = None
    keep_runs: int | None = None
    keep_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.tls_key is not None and self.tls_cert is None:
            raise PacelineError("--tls-key needs --tls-cert")
        if self.tls_cert is not None:
            try:
                ssl.create_default_context().load_cert_chain(self.tls_cert, self.tls_key)
            except (OSError, ssl.SSLError) as error:
                reason = error.strerror or error
                raise PacelineError(
                    f"--tls-cert {self.tls_cert}, --tls-key {self.tls_key}: {reason}"
                ) from error
        if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", self.path_prefix):
            raise PacelineError(
                f"--path-prefix {self.path_prefix}: give a path such as /paceline, "
                "without a slash at its end"
            )
        given = [token for token in (self.token, self.agent_token, self.viewer_token) if token]
        if len(set(given)) < len(given):
            raise PacelineError(
                "PACELINE_TOKEN, PACELINE_AGENT_TOKEN and PACELINE_VIEWER_TOKEN must differ: "
                "the role is known by the token"
            )
        if not self.token and self.makes_token and not is_loopback(self.host):
            raise PacelineError(
                f"listening on {self.host} lets other machines start programs here: "
                "set PACELINE_TOKEN (or --token-file), or listen on 127.0.0.1"
            )

    @property
    def tokens(self) -> dict[str, str]:
        """The configured tokens, as the environment of parts; the file was read already."""
        return {
            "PACELINE_TOKEN": self.token or "",
            "PACELINE_TOKEN_FILE": "",
            "PACELINE_AGENT_TOKEN": self.agent_token or "",
            "PACELINE_VIEWER_TOKEN": self.viewer_token or "",
        }

    @property
    def limits(self) -> dict[str, str]:
        """What stays of runs that are over, as the worker's environment."""
        names = ("keep_days", "keep_runs", "keep_bytes")
        given = {name: getattr(self, name) for name in names}
        return {f"PACELINE_{k.upper()}": str(v) for k, v in given.items() if v is not None}

    @property
    def url(self) -> str:
        """Where a browser on this machine finds us."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        scheme = "http" if self.tls_cert is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"
