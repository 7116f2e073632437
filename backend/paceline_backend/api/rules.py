"""Rules about which roles may use a route. No caller may use a route without a rule.

    @router.post("/runs", dependencies=[Depends(OPERATOR)])

The guard (`auth.Authentication`) evaluates `Rules` before it passes a request on. So the server
does not read the body of a request that the caller may not make. Packages that mount pages put the
rules of their own routes into `app.state.rules`, by the route's path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.routing import RouteContext, iter_route_contexts
from starlette.requests import HTTPConnection
from starlette.routing import Mount, WebSocketRoute, compile_path
from starlette.types import Scope

from paceline_backend.api.errors import ProblemError, forbidden
from paceline_backend.api.identity import Identity, identity_of
from paceline_backend.api.identity import Scope as Role

# Each role includes the rights of the roles before it. The rights of the role `agent`, which is
# separate, are included only in `admin`.
_ASCENDING: tuple[Role, ...] = ("viewer", "operator", "admin")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True)
class Allow:
    """A rule that admits some roles, as a FastAPI dependency.

    If `roles` is None, the route is public.
    """

    roles: frozenset[Role] | None

    async def __call__(self, request: HTTPConnection) -> None:
        """Refuse a caller whose role the rule does not admit.

        If the guard is installed, it has already refused such a caller.
        """
        if self.roles is not None and not self.admits(identity_of(request)):
            raise ProblemError(*forbidden(self.least, identity_of(request).scope))

    def admits(self, identity: Identity) -> bool:
        """Return whether the rule admits this caller."""
        return self.roles is None or identity.scope in self.roles

    @property
    def least(self) -> str:
        """The lowest role that the rule admits, in words."""
        roles = self.roles or frozenset()
        least = next((role for role in _ASCENDING if role in roles), "admin")
        return "agent or admin" if least == "admin" and "agent" in roles else least

    @property
    def changes(self) -> bool:
        """Return whether a route that changes something may have this rule."""
        return self.roles is None or "viewer" not in self.roles


def allow(*least: Role) -> Allow:
    """Return a rule that admits these roles and each role that includes one of them."""
    roles: set[Role] = {"admin", *least}
    for role in least:
        if role in _ASCENDING:
            roles.update(_ASCENDING[_ASCENDING.index(role) :])
    return Allow(frozenset(roles))


ANYBODY = Allow(None)
VIEWER = allow("viewer")
OPERATOR = allow("operator")
ADMIN = allow("admin")


@dataclass(frozen=True)
class Ruled:
    """A route, and its rule; None: it has no rule. `methods` is empty for a WebSocket."""

    path: str
    methods: frozenset[str]
    rule: Allow | None
    pattern: re.Pattern[str]

    def matches(self, scope: Scope) -> bool:
        """Return whether the path matches. The method is not compared."""
        websocket = scope["type"] == "websocket"
        return websocket == (not self.methods) and bool(self.pattern.match(scope["path"]))


class Rules:
    """The rules of an application's routes. Routes may be added until the first request."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._table: list[Ruled] | None = None

    def __call__(self, scope: Scope) -> Allow | None:
        """Return the rule of a request; None: no caller may make the request.

        For an unknown path the rule is `VIEWER`, so that viewers get a 404.
        """
        suitable = [ruled for ruled in self._routes() if ruled.matches(scope)]
        if not suitable:
            return VIEWER if scope["type"] == "http" else None
        method = scope.get("method", "")
        # If no route of the path has the method, the first rule decides who gets a 405.
        exact = (ruled for ruled in suitable if method in ruled.methods)
        return next(exact, suitable[0]).rule

    def methods(self, path: str) -> set[str]:
        """Return the methods that the API's own routes have for a path."""
        suitable = (ruled for ruled in self._routes() if ruled.pattern.match(path))
        own = (ruled for ruled in suitable if ruled.path.startswith("/api/v1"))
        return {method for ruled in own for method in ruled.methods}

    def _routes(self) -> list[Ruled]:
        if self._table is None:
            self._table = table(self._app)
        return self._table


def table(app: FastAPI) -> list[Ruled]:
    """List all routes with their rules, in the order in which they are matched."""
    return [_ruled(app, context) for context in iter_route_contexts(app.routes)]


def _ruled(app: FastAPI, context: RouteContext) -> Ruled:
    path = context.path or ""
    mounted = isinstance(context.original_route, Mount)
    websocket = isinstance(context.original_route, WebSocketRoute)
    methods = SAFE_METHODS if mounted else frozenset(context.methods or SAFE_METHODS)
    pattern, _, _ = compile_path(f"{path}/{{path:path}}" if mounted else path)
    methods = frozenset() if websocket else methods
    return Ruled(path, methods, _rule(app, path, methods, context), pattern)


def _rule(app: FastAPI, path: str, methods: frozenset[str], context: RouteContext) -> Allow | None:
    """Return a route's rule, or None if no caller may use the route.

    The rule is the one in `app.state.rules` for the path, else the intersection of the rules that
    the route depends on. The result is None if there is no such rule. It is also None if the route
    changes something and the intersection includes the role `viewer`.
    """
    declared: dict[str, Allow] = app.state.rules
    if path in declared:
        return declared[path]
    depends: list[Any] = getattr(context, "dependencies", None) or []
    own = [each.dependency for each in depends if isinstance(each.dependency, Allow)]
    if not own:
        return None
    limits = [rule.roles for rule in own if rule.roles is not None]
    rule = Allow(frozenset.intersection(*limits)) if limits else ANYBODY
    # A route that changes something needs a stricter rule than `VIEWER`, even if `VIEWER` is the
    # default rule of its router.
    return rule if methods <= SAFE_METHODS or rule.changes else None
