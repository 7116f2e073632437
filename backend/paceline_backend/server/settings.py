"""Settings of a control plane process, from the command line and the environment.

Invalid settings, such as a public address without a token, raise `PacelineError`.
"""

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
# Maximum number of event streams per client. Each page that an operator opens has one stream.
MAX_STREAMS = 100
# Maximum size of a request body. The largest are scenarios and policies for 10,000 ranks.
MAX_BODY_BYTES = 2**20


@dataclass(frozen=True)
class Proxies:
    """HTTP proxies in front of the server whose headers are trusted.

    Headers are accepted only from the addresses and networks in `trusted`. `header` is the header
    in which these proxies name the user whom they have authenticated. `roles` maps users to roles;
    other users are viewers.
    """

    trusted: tuple[str, ...] = ()
    header: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)

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
                "otherwise any client could claim to be any user"
            )

    def trusts(self, address: str) -> bool:
        """Return whether this is the address of a trusted proxy."""
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            # The client's address may also be the path of a socket.
            return False
        return any(parsed in ipaddress.ip_network(network) for network in self.trusted)

    @classmethod
    def of(cls, trusted: str | None, header: str | None, roles: str | None) -> Proxies:
        """Parse the values of options or environment variables: `a,b`, `X-User`, `user=role,…`."""
        by_user: dict[str, str] = {}
        for pair in _parts(roles):
            user, equals, role = pair.rpartition("=")
            if not equals or not user:
                raise PacelineError(f"--proxy-role {pair}: give USER=ROLE")
            by_user[user] = role
        return cls(tuple(_parts(trusted)), header or None, by_user)


def _parts(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


@dataclass(frozen=True)
class Settings:
    """Settings of a control plane process."""

    # SQLAlchemy URL.
    database: str
    # redis URL, which agents must be able to reach.
    bus: str
    host: str = "127.0.0.1"
    port: int = 8000
    # Tokens from the configuration; other tokens are in the database. `token` is an admin's token.
    token: str | None = None
    agent_token: str | None = None
    viewer_token: str | None = None
    # True: if the server has no `token`, it creates one for its own user on this machine. False: an
    # operator creates the first token with `paceline token create --database`.
    makes_token: bool = True
    # Maximum size of a request body; larger requests are refused.
    max_body_bytes: int = MAX_BODY_BYTES
    # PEM file with the certificate chain; None: plain HTTP.
    tls_cert: Path | None = None
    # PEM file; None: the key is in `tls_cert`.
    tls_key: Path | None = None
    proxies: Proxies = Proxies()
    # True: the embedded bus listens on `host`, and nodes connect to it at the host of this server's
    # URL.
    trust_network: bool = False
    # Maximum number of event streams per client.
    max_streams: int = MAX_STREAMS
    # Path below which a reverse proxy serves this server, such as `/paceline`.
    path_prefix: str = ""
    # Origins to which alerts may be sent.
    webhook_origins: Origins = field(default_factory=Origins)
    # Price of a worker-hour; None: costs are not shown.
    hour_price: Price | None = None
    # Limits of the ended runs that are kept: days since the end, number of runs, and bytes in the
    # database; None: no limit.
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
                f"--path-prefix {self.path_prefix}: give a path such as /paceline, without a "
                "trailing slash"
            )
        given = [token for token in (self.token, self.agent_token, self.viewer_token) if token]
        if len(set(given)) < len(given):
            raise PacelineError(
                "PACELINE_TOKEN, PACELINE_AGENT_TOKEN and PACELINE_VIEWER_TOKEN must differ: the "
                "token determines the role"
            )
        if not self.token and self.makes_token and not is_loopback(self.host):
            raise PacelineError(
                f"listening on {self.host} lets other machines start programs here: "
                "set PACELINE_TOKEN (or --token-file), or listen on 127.0.0.1"
            )

    @property
    def url(self) -> str:
        """URL of this server for a browser on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        scheme = "http" if self.tls_cert is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"
