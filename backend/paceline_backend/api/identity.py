"""Identity of the caller. The guard determines it once per request, and routes read it here."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import HTTPConnection

from paceline_backend.store.audit import RESERVED
from paceline_backend.store.tokens import Scope

__all__ = ["Identity", "Scope", "identity_of"]


@dataclass(frozen=True)
class Identity:
    """The caller of a request: a name for the audit log, and the rights.

    `node` and `run` restrict an agent's token to one node, or to the nodes of one run; None: there
    is no such restriction.
    """

    # Name of a token, or the user whom a trusted proxy names.
    name: str
    scope: Scope
    address: str = ""
    # ID of the token or browser in the request; empty: a trusted proxy has named the user.
    token: str = ""
    node: str | None = None
    run: str | None = None

    @property
    def shared(self) -> bool:
        """Return whether the token is the server's own, which several people may hold."""
        return self.name in RESERVED


def identity_of(request: HTTPConnection) -> Identity:
    """Return the caller, whom `Authentication` has stored in the request.

    Raises:
        LookupError: `Authentication` has not run, so the caller is unknown.
    """
    known = getattr(request.state, "identity", None)
    if isinstance(known, Identity):
        return known
    raise LookupError(
        "the caller is unknown: the application runs without the authentication middleware"
    )
