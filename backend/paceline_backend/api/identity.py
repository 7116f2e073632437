"""Who asks: the guard finds it out once for each request, and routes read it here."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import HTTPConnection

from paceline_backend.store.access.tokens import Scope
from paceline_backend.store.audit import RESERVED

__all__ = ["Identity", "Scope", "identity_of"]


@dataclass(frozen=True)
class Identity:
    """Who asks, as the audit log names it, and what that is allowed to do."""

    name: str  # a token's name, or what a trusted proxy says
    scope: Scope
    address: str = ""  # where the request came from
    token: str = ""  # id of the token that it brought; "": none
    node: str | None = None  # the only one that an agent's token is for
    run: str | None = None  # the only one whose nodes an agent's token is for

    @property
    def shared(self) -> bool:
        """Whether this is a token of the server itself, which several people may hold."""
        return self.name in RESERVED


def identity_of(request: HTTPConnection) -> Identity:
    """Who asks; `Authentication` has put it there.

    Raises:
        LookupError: it has not, so nobody may do anything.
    """
    known = getattr(request.state, "identity", None)
    if isinstance(known, Identity):
        return known
    raise LookupError("nobody has said who asks: the application has no guard in front of it")
