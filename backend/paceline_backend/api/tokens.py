"""REST: tokens, and links that log a browser in."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from paceline.wire import defects, is_node
from paceline_backend import requests
from paceline_backend.api.errors import ProblemError, documented
from paceline_backend.api.identity import Scope, identity_of
from paceline_backend.api.preconditions import requester_of
from paceline_backend.api.rules import ADMIN, OPERATOR
from paceline_backend.api.state import settings_of, store_of
from paceline_backend.store import Connection, audit, nodes, tokens
from paceline_backend.store.audit import RESERVED, Requester

router = APIRouter()

_AWAY = HTTPStatus.SERVICE_UNAVAILABLE
_INVALID = HTTPStatus.UNPROCESSABLE_ENTITY
_LONGEST_LIFETIME_S = 100 * 366 * 24 * 3600.0


def _name(value: str) -> str:
    if reason := defects.of_text(value, "it"):
        raise ValueError(reason)
    if not value.isprintable():
        raise ValueError("contains characters that cannot be printed")
    if value in RESERVED:
        raise ValueError(
            f"{value!r} is a name of the server itself in the audit log: give another name"
        )
    return value


_Name = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(_name)]


class TokenCreate(BaseModel):
    """Request to create a token."""

    model_config = ConfigDict(extra="forbid")

    name: _Name = Field(examples=["nightly"])
    scope: Scope = Field(examples=["operator"])
    expires_s: float | None = Field(
        None,
        gt=0,
        le=_LONGEST_LIFETIME_S,
        description="lifetime of the token in seconds; null: unlimited",
    )
    node: str | None = Field(
        None,
        max_length=200,
        description="only node that may use the token, if its scope is agent; null: any node",
    )

    @model_validator(mode="after")
    def _of_an_agent(self) -> TokenCreate:
        if self.node is not None and (self.scope != "agent" or not is_node(self.node)):
            raise ValueError("node: give a valid node name, and the scope agent")
        return self


class Token(BaseModel):
    """A token or a logged-in browser, without its secret."""

    id: str = Field(examples=["9f31c0de"])
    kind: str = Field(examples=["token"])
    name: str
    scope: Scope
    created_at: float
    created_by: str
    expires_at: float | None
    revoked_at: float | None
    used_at: float | None = Field(
        description="Unix time of the last use, accurate to one minute; null: never used"
    )
    node: str | None = Field(
        description="only node that may use the token, if its scope is agent; null: any node"
    )
    run: str | None = Field(
        description="only run whose nodes may use the token, if its scope is agent; null: any run",
        examples=[None],
    )


class NewToken(Token):
    """A token that the request has just created, with its secret."""

    token: str = Field(
        description="text of the token with its secret; only this response shows it",
        examples=["pl_9f31c0de_…"],
    )


class LoginLink(BaseModel):
    """A link that logs a browser in, once."""

    path: str = Field(examples=["/login?code=pl_9f31c0de_…"])
    expires_at: float


@router.get(
    "/tokens",
    response_model=list[Token],
    responses=documented(_AWAY),
    dependencies=[Depends(ADMIN)],
)
def list_tokens(request: Request) -> Any:
    """List all tokens, and the browsers that are logged in, newest first."""
    with store_of(request).read() as connection:
        return tokens.listed(connection)


@router.post(
    "/tokens",
    status_code=HTTPStatus.CREATED,
    response_model=NewToken,
    responses=documented(HTTPStatus.BAD_REQUEST, _INVALID, _AWAY),
    dependencies=[Depends(ADMIN)],
)
def create_token(request: Request, body: TokenCreate) -> Any:
    """Create a token. Only this response contains the token's secret."""
    with store_of(request).write() as connection:
        made = issue(connection, body, requester_of(request))
        return {**(tokens.get(connection, made.id) or {}), "token": str(made)}


def issue(connection: Connection, new: TokenCreate, by: Requester) -> tokens.Secret:
    """Store a new token, and record in the audit log who created it."""
    expires_at = None if new.expires_s is None else time.time() + new.expires_s
    details = {"scope": new.scope, "expires_at": expires_at, "node": new.node}
    audit.record(connection, by, "token.create", target=new.name, details=details)
    return tokens.create(
        connection, new.name, new.scope, by.name, expires_at=expires_at, node=new.node
    )


@router.delete(
    "/tokens/{token}",
    response_model=Token,
    responses=documented(HTTPStatus.NOT_FOUND, _INVALID, _AWAY),
    dependencies=[Depends(ADMIN)],
)
def revoke_token(request: Request, token: str) -> Any:
    """Revoke a token, and log out the browsers and the nodes that it admitted."""
    with store_of(request).write() as connection:
        tokens.revoke(connection, token)
        revoked = tokens.get(connection, token)
        if revoked is None:
            raise ProblemError(HTTPStatus.NOT_FOUND, f"no token has the id {token}")
        by, name = requester_of(request), str(revoked["name"])
        audit.record(connection, by, "token.revoke", target=name, details={"id": token})
        ended = nodes.of_token(connection, token)
    requests.sessions.end(settings_of(request).bus, ended)
    return revoked


@router.post(
    "/login-links",
    status_code=HTTPStatus.CREATED,
    response_model=LoginLink,
    responses=documented(_AWAY),
    dependencies=[Depends(OPERATOR)],
)
def create_login_link(request: Request) -> Any:
    """Create a link that logs one browser in, within ten minutes, with the caller's rights.

    A user whom a proxy has authenticated gets no link, because each link belongs to a token.
    """
    who = identity_of(request)
    if not who.token:
        raise ProblemError(
            HTTPStatus.FORBIDDEN,
            f"{who.name} is authenticated by a proxy and has no token, so no login link can be "
            "created: open the pages through the proxy, or send a token (`paceline token create`)",
        )
    expires_at = time.time() + tokens.LINK_S
    with store_of(request).write() as connection:
        made = tokens.link(connection, who.token, who.name, who.scope)
        details = {"id": made.id, "expires_at": expires_at}
        audit.record(connection, requester_of(request), "link.create", details=details)
    return {"path": f"/login?code={made}", "expires_at": expires_at}
