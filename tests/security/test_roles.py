"""Tokens and cookies of a role try what is above it, and tricks of HTTP try what is above all."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from urllib.parse import urlsplit

import httpx
import pytest
import sqlalchemy as sa

from paceline_backend.api import event_streams
from paceline_backend.store import schema
from support.sites import ROLES, RUN, Site
from support.waiting import DEADLINE_S, until
from support.web import ADMIN

# Who may what, as docs/rest.md and docs/deploying.md have it.
OPERATORS = {
    ("POST", "/api/v1/runs"),
    ("POST", "/api/v1/adoptions"),
    ("POST", "/api/v1/runs/{run}/session"),
    ("POST", "/api/v1/runs/{run}/stop"),
    ("POST", "/api/v1/runs/{run}/resume"),
    ("POST", "/api/v1/runs/{run}/policy"),
    ("POST", "/api/v1/runs/{run}/nodes"),
    ("DELETE", "/api/v1/runs/{run}/nodes/{node}"),
    ("GET", "/api/v1/runs/{run}/stacks"),
    ("GET", "/api/v1/runs/{run}/logs"),
    ("GET", "/api/v1/runs/{run}/logs/{rank}"),
    ("GET", "/api/v1/runs/{run}/logs/{rank}/stream"),
    ("POST", "/api/v1/runs/{run}/nodes/{node}/replace"),
    ("DELETE", "/api/v1/runs/{run}/nodes/{node}/replace"),
    ("PUT", "/api/v1/nodes/{node}/cordon"),
    ("POST", "/api/v1/nodes/{node}/check"),
    ("DELETE", "/api/v1/nodes/{node}/cordon"),
    ("PUT", "/api/v1/runs/{run}/auto"),
    ("GET", "/api/v1/audit"),
    ("POST", "/api/v1/login-links"),
    ("GET", "/api/v1/rejected"),
    ("PUT", "/api/v1/runs/{run}/tags/{tag}"),
    ("DELETE", "/api/v1/runs/{run}/tags/{tag}"),
    ("PUT", "/api/v1/runs/{run}/note"),
    ("PUT", "/api/v1/runs/{run}/target"),
    ("DELETE", "/api/v1/runs/{run}/target"),
    ("POST", "/api/v1/alerts/{alert}/acknowledge"),
}
ADMINS = {
    ("PUT", "/api/v1/alerts/rules/{rule}"),
    ("DELETE", "/api/v1/alerts/rules/{rule}"),
    ("GET", "/api/v1/alerts/webhooks"),
    ("POST", "/api/v1/alerts/webhooks"),
    ("DELETE", "/api/v1/alerts/webhooks/{webhook}"),
    ("POST", "/api/v1/alerts/webhooks/{webhook}/test"),
    ("GET", "/api/v1/tokens"),
    ("POST", "/api/v1/tokens"),
    ("DELETE", "/api/v1/tokens/{token}"),
    ("DELETE", "/api/v1/nodes/{node}"),
    ("DELETE", "/api/v1/rejected/{entry}"),
}
AGENTS = {
    ("GET", "/api/v1/me"),
    ("GET", "/api/v1/version"),
    ("POST", "/api/v1/nodes/{node}/session"),
    ("POST", "/api/v1/runs/{run}/nodes/{node}/join"),
}
OPEN = {"/healthz", "/readyz"}


def filled(path: str) -> str:
    names = {"{run}": RUN, "{node}": "here", "{token}": "nothing", "{entry}": "1-1", "{rank}": "0"}
    for name, value in names.items():
        path = path.replace(name, value)
    return path


def may(role: str, method: str, path: str) -> bool:
    call = (method, path)
    if path in OPEN or role == "admin":
        return True
    if role == "agent" or call in AGENTS:
        return call in AGENTS and (role == "agent" or method == "GET")
    return call not in ADMINS and (role == "operator" or call not in OPERATORS)


def crossing(site: Site, client: httpx.Client, role: str) -> list[tuple[str, str, int]]:
    """Calls that a client may make and should not, or should and may not."""
    wrong = []
    for method, path in site.calls:
        if path.endswith(("/events", "/stream")):
            continue
        status = client.request(method, filled(path), headers={"Origin": site.url}).status_code
        if (status != 403) != may(role, method, path):
            wrong.append((method, path, status))
        assert status < 500 or path == "/readyz", (method, path)  # there is no worker
    return wrong


@pytest.mark.parametrize("role", ROLES)
def test_a_token_stays_in_its_role(site: Site, role: str) -> None:
    with site.bearer(site.tokens[role]["token"]) as client:
        assert crossing(site, client, role) == []


@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
def test_a_cookie_stays_in_its_role(site: Site, role: str) -> None:
    with contextlib.closing(site.browser(site.tokens[role]["token"])) as client:
        assert crossing(site, client, role) == []


@pytest.mark.parametrize(
    "page", ["/", "/runs/r1", "/docs", "/openapi.json", "/metrics", "/_dash-layout"]
)
def test_an_agents_token_opens_no_page(site: Site, page: str) -> None:
    with site.bearer(site.tokens["agent"]["token"]) as client:
        assert client.get(page).status_code == 403
    with contextlib.closing(site.client()) as client:
        client.post("/login", data={"token": site.tokens["agent"]["token"], "next": "/"})
        assert client.get(page).status_code in (401, 403)


@pytest.mark.parametrize("role", ["viewer", "operator", "agent"])
def test_nobody_below_admin_reads_secrets(site: Site, role: str) -> None:
    bus = site.admin.get("/api/v1/version").json()["bus"]
    with site.store.read() as connection:
        named = sa.select(schema.meta.c.value).where(schema.meta.c.name == "secret")
        secrets = list(connection.scalars(named))
        assert secrets
        secrets += list(connection.scalars(sa.select(schema.tokens.c.hash)))
    secrets += ["open-4711", urlsplit(bus).password or ADMIN, ADMIN]
    secrets += [hashlib.sha256(ADMIN.encode()).hexdigest()]
    with site.bearer(site.tokens[role]["token"]) as client:
        for method, path in site.calls:
            if method == "GET" and not path.endswith("/events"):
                text = client.get(filled(path)).text
                assert not [s for s in map(str, secrets) if s in text], path


def test_an_operator_makes_no_admin(site: Site) -> None:
    """Its link lets a browser in as an operator; its runs' credentials are those runs' alone."""
    with site.bearer(site.tokens["operator"]["token"]) as operator:
        body = {"scope": "admin", "role": "admin", "name": "x"}
        link = operator.post("/api/v1/login-links", json=body).json()["path"]
        answer = operator.get(f"/api/v1/runs/{RUN}").json()
        assert "open-4711" not in str(answer)
    with contextlib.closing(site.client()) as browser:
        assert browser.get(link).status_code in (200, 303)
        assert browser.get("/api/v1/audit").status_code == 200
        assert browser.get("/api/v1/tokens").status_code == 403


def test_a_link_works_once(site: Site) -> None:
    link = site.admin.post("/api/v1/login-links").json()["path"]
    done = []

    def use() -> None:
        with contextlib.closing(site.client()) as browser:
            browser.get(link)
            done.append(browser.get("/api/v1/tokens").status_code)

    threads = [threading.Thread(target=use) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done) == [200] + [401] * 11


def links(site: Site) -> tuple[str, str]:
    """A link's path, and the row that it made."""
    with site.store.read() as connection:
        before = set(connection.scalars(sa.select(schema.tokens.c.id)))
    path = str(site.admin.post("/api/v1/login-links").json()["path"])
    with site.store.read() as connection:
        [row] = set(connection.scalars(sa.select(schema.tokens.c.id))) - before
    return path, row


@pytest.mark.parametrize("late_s", [601, 86_400 * 365])
def test_a_link_ends_after_ten_minutes(site: Site, late_s: float) -> None:
    link, row = links(site)
    with site.store.read() as connection:
        table = schema.tokens
        made = connection.execute(sa.select(table).where(table.c.id == row)).one()
    assert 0 < made.expires_at - made.created_at <= 600
    site.set(row, created_at=made.created_at - late_s, expires_at=made.expires_at - late_s)
    with contextlib.closing(site.client()) as browser:
        browser.get(link)
        assert browser.get("/api/v1/runs").status_code == 401


def test_a_link_of_a_revoked_token_is_worthless(site: Site) -> None:
    made = site.token("operator")
    with site.bearer(made["token"]) as operator:
        link = operator.post("/api/v1/login-links").json()["path"]
    assert site.admin.delete(f"/api/v1/tokens/{made['id']}").status_code == 200
    with contextlib.closing(site.client()) as browser:
        browser.get(link)
        assert browser.get("/api/v1/runs").status_code == 401


@pytest.mark.parametrize("end", ["revoked", "expired"])
def test_cookies_end_with_their_token(site: Site, end: str) -> None:
    """Of a browser that logged in with it, and of one that used its link."""
    made = site.token("operator", expires_s=3600)
    with contextlib.ExitStack() as held:
        client = held.enter_context(contextlib.closing(site.bearer(made["token"])))
        browser = held.enter_context(contextlib.closing(site.browser(made["token"])))
        link = client.post("/api/v1/login-links").json()["path"]
        with contextlib.closing(site.client()) as other:
            other.get(link)
            for each in (client, browser, other):
                assert each.get("/api/v1/runs").status_code == 200
            if end == "revoked":
                assert site.admin.delete(f"/api/v1/tokens/{made['id']}").status_code == 200
            else:
                site.set(made["id"], expires_at=1.0)
            for each in (client, browser, other):
                assert each.get("/api/v1/runs").status_code == 401
                assert each.get("/").status_code in (302, 303, 307, 401)


@pytest.mark.parametrize(("kind", "end"), [("token", "revoked"), ("cookie", "expired")])
def test_an_open_stream_ends_with_its_token(
    site: Site, monkeypatch: pytest.MonkeyPatch, kind: str, end: str
) -> None:
    monkeypatch.setattr(event_streams, "CHECK_S", 0.2)
    made = site.token("viewer", expires_s=3600)
    client = (site.bearer if kind == "token" else site.browser)(made["token"])
    over = threading.Event()

    def listen() -> None:
        with (
            contextlib.closing(client),
            client.stream("GET", f"/api/v1/runs/{RUN}/events", timeout=DEADLINE_S) as answer,
        ):
            began.append(answer.status_code)
            for _ in answer.iter_raw():
                pass
        over.set()

    began: list[int] = []
    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    until(lambda: began, "the stream")
    assert began == [200]
    if end == "revoked":
        assert site.admin.delete(f"/api/v1/tokens/{made['id']}").status_code == 200
    else:
        site.set(made["id"], expires_at=1.0)
    until(over.is_set, "the stream's end")


@pytest.mark.parametrize("change", ["signature", "name", "empty", "json", "other"])
def test_a_cookie_cannot_be_made(site: Site, change: str) -> None:
    with contextlib.closing(site.browser(site.tokens["viewer"]["token"])) as browser:
        [(name, value)] = browser.cookies.items()
    with contextlib.closing(site.browser(site.tokens["admin"]["token"])) as browser:
        [(_, admin)] = browser.cookies.items()
    with site.store.read() as connection:
        rows = list(connection.scalars(sa.select(schema.tokens.c.id)))
    half = len(value) // 2
    tried = {
        "signature": [value[:-1] + ("A" if value[-1] != "A" else "E"), value[:-2], value + "A"],
        "name": [row + value[len(row) :] for row in rows] + [admin[:half] + value[half:]],
        "empty": ["", ".", "..", "-", "null", "0"],
        "json": ['{"scope":"admin"}', "eyJhbGciOiJub25lIn0.eyJzY29wZSI6ImFkbWluIn0.", "é" * 3],
        "other": [*rows, *(made["token"] for made in site.tokens.values()), ADMIN],
    }[change]
    for text in tried:
        if text in (value, admin):
            continue
        headers = {b"cookie": f"{name}={text}".encode()}
        answer = httpx.get(f"{site.url}/api/v1/tokens", headers=headers)
        assert answer.status_code == 401, text


def test_a_cookie_is_of_this_site_only(site: Site) -> None:
    answer = httpx.post(f"{site.url}/login", data={"token": ADMIN, "next": "//evil.example/x"})
    flags = answer.headers["set-cookie"].lower()
    assert "httponly" in flags
    assert "samesite" in flags
    assert urlsplit(answer.headers["location"]).netloc == ""
    for target in ("https://evil.example", "/\\evil.example", "\thttps://evil.example", "//evil"):
        answer = httpx.post(f"{site.url}/login", data={"token": ADMIN, "next": target})
        where = answer.headers["location"]
        assert where.startswith("/"), where
        assert not where.startswith(("//", "/\\")), where


ORIGINS = ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1", "file://", ""]


@pytest.mark.parametrize("origin", ORIGINS)
def test_other_origins_change_nothing(site: Site, origin: str) -> None:
    """With a logged-in operator's cookie; by forms, too, which send no JSON."""
    with contextlib.closing(site.browser(site.tokens["operator"]["token"])) as browser:
        for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
            headers = {"Origin": origin, "content-type": kind, "If-Match": "*"}
            for path in (f"/api/v1/runs/{RUN}/stop", "/api/v1/runs", "/api/v1/login-links"):
                answer = browser.post(path, headers=headers, content="{}")
                assert answer.status_code == 403, (kind, path)
    assert site.admin.get(f"/api/v1/runs/{RUN}").json()["state"] == "running"
