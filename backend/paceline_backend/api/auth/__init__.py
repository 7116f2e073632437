"""Authentication and authorisation of every request, before a route runs.

`Authentication` is ASGI middleware: it identifies the caller with `CredentialCheck`, and checks the
rule of the route in `api.rules`. `Login` serves the login page for browsers.
`ProxyIdentity` accepts the user name that a trusted proxy sends.
"""

from fastapi import Security
from fastapi.security import APIKeyCookie, HTTPBearer

from paceline_backend.api.auth.credentials import COOKIE, CredentialCheck
from paceline_backend.api.auth.guard import Authentication
from paceline_backend.api.auth.proxies import ProxyIdentity

# Declared only for the OpenAPI document, because the guard checks credentials before a route runs.
CREDENTIALS = [
    Security(
        HTTPBearer(auto_error=False, description="token that `paceline token create` has created")
    ),
    Security(
        APIKeyCookie(
            name=COOKIE, auto_error=False, description="cookie that /login sets in a browser"
        )
    ),
]

__all__ = ["COOKIE", "CREDENTIALS", "Authentication", "CredentialCheck", "ProxyIdentity"]
