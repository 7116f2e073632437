"""Every route × everybody who may ask: the routes are those of the application, Dash's as well."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import httpx
import pytest
from fastapi import Depends, FastAPI

from paceline_backend.api import rules
from paceline_backend.api.identity import Scope
from paceline_backend.store import Store, tokens
from support.web import application, serving

Asker = Literal["none", "expired", "revoked", "viewer", "operator", "agent", "admin"]
ASKERS: tuple[Asker, ...] = get_args(Asker)
KNOWN: tuple[Scope, ...] = ("viewer", "operator", "agent", "admin")

# Who may, written down a second time: a route that is missing here fails.
EVERYBODY = {"/healthz", "/readyz"}
OPERATOR = {
    ("POST", "/api/v1/runs"),
    ("POST", "/api/v1/adoptions"),
    ("POST", "/api/v1/runs/{run}/stop"),
    ("POST", "/api/v1/runs/{run}/policy"),
    ("PUT", "/api/v1/runs/{run}/auto"),
    ("POST", "/api/v1/runs/{run}/resume"),
    ("POST", "/api/v1/runs/{run}/session"),
    ("POST", "/api/v1/runs/{run}/nodes"),
    ("DELETE", "/api/v1/runs/{run}/nodes/{node}"),
    ("PUT", "/api/v1/runs/{run}/tags/{tag}"),
    ("DELETE", "/api/v1/runs/{run}/tags/{tag}"),
    ("PUT", "/api/v1/runs/{run}/note"),
    ("PUT", "/api/v1/runs/{run}/target"),
    ("DELETE", "/api/v1/runs/{run}/target"),
    ("GET", "/api/v1/runs/{run}/stacks"),
    ("GET", "/api/v1/runs/{run}/logs"),
    ("GET", "/api/v1/runs/{run}/logs/{rank}"),
    ("GET", "/api/v1/runs/{run}/logs/{rank}/stream"),
    ("POST", "/api/v1/runs/{run}/nodes/{node}/replace"),
    ("DELETE", "/api/v1/runs/{run}/nodes/{node}/replace"),
    ("PUT", "/api/v1/nodes/{node}/cordon"),
    ("POST", "/api/v1/nodes/{node}/check"),
    ("DELETE", "/api/v1/nodes/{node}/cordon"),
    ("POST", "/api/v1/login-links"),
    ("POST", "/api/v1/alerts/{alert}/acknowledge"),
    ("GET", "/api/v1/audit"),
    ("GET", "/api/v1/rejected"),
}
ADMIN = {
    ("GET", "/api/v1/tokens"),
    ("POST", "/api/v1/tokens"),
    ("DELETE", "/api/v1/tokens/{token}"),
    ("DELETE", "/api/v1/nodes/{node}"),
    ("PUT", "/api/v1/alerts/rules/{rule}"),
    ("DELETE", "/api/v1/alerts/rules/{rule}"),
    ("GET", "/api/v1/alerts/webhooks"),
    ("POST", "/api/v1/alerts/webhooks"),
    ("DELETE", "/api/v1/alerts/webhooks/{webhook}"),
    ("POST", "/api/v1/alerts/webhooks/{webhook}/test"),
    ("DELETE", "/api/v1/rejected/{entry}"),
}
AGENT = {("GET", "/api/v1/version"), ("GET", "/api/v1/me")}
ONLY_AGENT = {
    ("POST", "/api/v1/nodes/{node}/session"),
    ("POST", "/api/v1/runs/{run}/nodes/{node}/join"),
}
LOOKING = ("GET", "HEAD", "OPTIONS")
PAGES = {("POST", "/_dash-update-component")}  # draws a page


class Call(NamedTuple):
    method: str
    path: str  # of the route


def expected(call: Call, asker: Scope) -> bool:
    """Whether the matrix lets a known asker."""
    if call in ADMIN:
        return asker == "admin"
    if call in OPERATOR:
        return asker in ("operator", "admin")
    if call in AGENT:
        return True
    if call in ONLY_AGENT:
        return asker in ("agent", "admin")
    looking = call.method in LOOKING or call in PAGES or call.path in ("/api", "/api/{path:path}")
    assert looking, f"{call} changes something: say here who may do it"
    return asker != "agent"


@pytest.fixture
def app(store: Store, bus_url: str) -> Iterator[FastAPI]:
    with serving(store, bus_url) as client:
        yield application(client)


def calls(app: FastAPI) -> list[Call]:
    return [
        Call(method, ruled.path) for ruled in rules.table(app) for method in sorted(ruled.methods)
    ]


def token(store: Store, asker: Asker) -> dict[str, str]:
    """Headers of somebody who asks."""
    if asker == "none":
        return {}
    scope: Scope = "admin" if asker in ("expired", "revoked") else asker
    expires_at = time.time() - 1 if asker == "expired" else None
    with store.write() as connection:
        made = tokens.create(connection, asker, scope, "a test", expires_at=expires_at)
        if asker == "revoked":
            tokens.revoke(connection, made.id)
    return {"Authorization": f"Bearer {made}"}


def url_of(path: str) -> str:
    """An address that the route has: of a run that is not there, and a file that is not."""
    for name in ("run", "node", "token", "package_name", "alert", "rule", "webhook"):
        path = path.replace(f"{{{name}}}", "none")
    for name in ("path:path", "fingerprinted_path:path"):
        path = path.replace(f"{{{name}}}", "none.js")
    return path if path.startswith("/") else f"/{path}"


def test_every_route_has_a_rule(app: FastAPI) -> None:
    without = [ruled.path for ruled in rules.table(app) if ruled.rule is None]
    assert without == []


def test_a_route_without_a_rule_is_nobodys(store: Store, bus_url: str) -> None:
    with serving(store, bus_url) as client:
        app = application(client)
        app.get("/forgotten")(lambda: "secret")
        app.router.routes.insert(0, app.router.routes.pop())  # before the pages' catch-all
        assert [r.path for r in rules.table(app) if r.rule is None] == ["/forgotten"]
        refused = client.get("/forgotten")
        assert (refused.status_code, "no access rule" in refused.text) == (403, True)


def test_who_may_only_look_gets_no_rule_for_a_change(store: Store, bus_url: str) -> None:
    """A router's default is for reading: a new route that changes something needs its own."""
    with serving(store, bus_url) as client:
        app = application(client)
        app.post("/changes", dependencies=[Depends(rules.VIEWER)])(lambda: "done")
        assert [r.path for r in rules.table(app) if r.rule is None] == ["/changes"]


@pytest.mark.parametrize("asker", ASKERS)
def test_the_matrix(store: Store, bus_url: str, asker: Asker) -> None:
    with serving(store, bus_url) as client:
        headers = token(store, asker)
        del client.headers["Authorization"]
        wrong = []
        for call in calls(application(client)):
            status = answer(client, call, headers)
            if call.path in EVERYBODY:
                good = status in (200, 503)
            elif asker not in KNOWN:
                good = status == 401
            else:
                good = (status not in (401, 403)) == expected(call, asker)
            if not good:
                wrong.append((call, status))
        assert wrong == []


def answer(client: httpx.Client, call: Call, headers: dict[str, str]) -> int:
    return client.request(call.method, url_of(call.path), headers=headers).status_code


def test_no_answer_has_a_secret(store: Store, bus_url: str) -> None:
    """Only who makes a token is told it, and only an admin the bus's password."""
    with serving(store, bus_url) as client:
        made = client.post("/api/v1/tokens", json={"name": "n", "scope": "viewer"}).json()
        secret = made["token"].rpartition("_")[2]
        password = httpx.URL(bus_url).password
        viewer = {"Authorization": f"Bearer {made['token']}"}
        for call in calls(application(client)):
            if call.method == "GET":
                for headers in (viewer, {}):
                    body = client.get(url_of(call.path), headers=headers).text
                    assert secret not in body
                    assert tokens.hashed(secret) not in body
                    if headers or call.path != "/api/v1/version":
                        assert password not in body
