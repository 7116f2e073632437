"""Every route has an access rule: the routes are those of the application, Dash's as well."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import pytest
from fastapi import Depends, FastAPI

from paceline_backend.api import rules
from paceline_backend.store import Store, tokens
from support.web import application, serving

Stranger = Literal["none", "expired", "revoked"]

EVERYBODY = {"/healthz", "/readyz"}


class Call(NamedTuple):
    method: str
    path: str  # of the route


@pytest.fixture
def app(store: Store, bus_url: str) -> Iterator[FastAPI]:
    with serving(store, bus_url) as client:
        yield application(client)


def calls(app: FastAPI) -> list[Call]:
    return [
        Call(method, ruled.path) for ruled in rules.table(app) for method in sorted(ruled.methods)
    ]


def token(store: Store, asker: Stranger) -> dict[str, str]:
    """Headers of somebody who may nothing any more."""
    if asker == "none":
        return {}
    expires_at = time.time() - 1 if asker == "expired" else None
    with store.write() as connection:
        made = tokens.create(connection, asker, "admin", "a test", expires_at=expires_at)
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


@pytest.mark.parametrize("asker", get_args(Stranger))
def test_strangers_reach_nothing(store: Store, bus_url: str, asker: Stranger) -> None:
    """What each role may do, `tests/security/test_roles.py` has written down a second time."""
    with serving(store, bus_url) as client:
        headers = token(store, asker)
        del client.headers["Authorization"]
        wrong = []
        for call in calls(application(client)):
            status = client.request(call.method, url_of(call.path), headers=headers).status_code
            if status not in ((200, 503) if call.path in EVERYBODY else (401,)):
                wrong.append((call, status))
        assert wrong == []
