"""Who asks, and whether they may: the part in front of all routes.

`Authentication` is ASGI middleware. It asks `CredentialCheck` who brings a request, and `api.rules`
whether they may; `Login` is its page for browsers. `ProxyIdentity` takes a trusted proxy's word.
"""

from fastapi import Security
from fastapi.security import APIKeyCookie, HTTPBearer

from paceline_backend.api.auth.credentials import COOKIE, CredentialCheck
from paceline_backend.api.auth.guard import Authentication
from paceline_backend.api.auth.proxies import ProxyIdentity

# For OpenAPI only: the guard has checked them before a route is asked.
CREDENTIALS = [
    Security(HTTPBearer(auto_error=False, description="a token: `paceline token create`")),
    Security(
        APIKeyCookie(name=COOKIE, auto_error=False, description="set by /login, for browsers")
    ),
]

__all__ = ["COOKIE", "CREDENTIALS", "Authentication", "CredentialCheck", "ProxyIdentity"]
