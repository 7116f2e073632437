"""Tricks of HTTP: headers, paths, methods, and bytes that are no HTTP at all."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.store import Store
from support.sites import RUN, Site
from support.waiting import DEADLINE_S
from support.web import ADMIN, serving

HEADERS: list[dict[str, str]] = [
    {"X-Forwarded-For": "127.0.0.1"},
    {"X-Forwarded-User": "admin"},
    {"X-Forwarded-User": "admin", "X-Forwarded-For": "10.0.0.5"},
    {"X-Remote-User": "admin", "Remote-User": "admin", "X-Forwarded-Email": "admin"},
    {"X-Auth-Request-User": "admin", "X-Forwarded-Groups": "admin"},
    {"Forwarded": "for=127.0.0.1;host=localhost"},
    {"Host": "localhost"},
    {"Host": "evil.example"},
    {"X-Forwarded-Host": "localhost", "X-Forwarded-Proto": "https"},
    {"X-Original-URL": "/healthz", "X-Rewrite-URL": "/healthz"},
    {"X-Forwarded-Prefix": "/login", "X-Script-Name": "/login"},
    {"X-HTTP-Method-Override": "GET"},
    {"Origin": "http://127.0.0.1"},
    {"Referer": "/login"},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer null"},
    {"Authorization": "Bearer pl__"},
    {"Authorization": "Bearer pl_%00_x"},
    {"Authorization": f"Basic {ADMIN}"},
    {"Authorization": f"Digest {ADMIN}"},
    {"Authorization": "Bearer ' OR 1=1 --"},
    {"Authorization": "Bearer " + "x" * 20_000},
    {"Upgrade": "h2c", "Connection": "Upgrade, HTTP2-Settings"},
]


@pytest.mark.parametrize(
    "headers", HEADERS, ids=lambda h: ",".join(f"{k}={v[:12]}" for k, v in h.items())
)
def test_headers_open_nothing(site: Site, headers: dict[str, str]) -> None:
    with contextlib.closing(site.client()) as client:
        for path in ("/api/v1/runs", "/api/v1/tokens", "/metrics", "/docs", "/"):
            status = client.get(path, headers={"accept": "application/json", **headers}).status_code
            assert status in (400, 401, 403, 429, 431), (path, status)


def raw(site: Site, text: bytes) -> int:
    """The status of a request that no library would send; 0: the connection was closed."""
    answer = read(site, text)
    return int(answer.split()[1]) if answer else 0


def read(site: Site, text: bytes) -> bytes:
    """The beginning of the answer to any bytes."""
    address = urlsplit(site.url)
    with socket.create_connection((address.hostname, address.port), 20) as connection:
        connection.sendall(text)
        connection.settimeout(DEADLINE_S)
        try:
            parts = []
            while part := connection.recv(65_536):
                parts.append(part)
                if b"connection: close" not in text.lower():
                    break
        except ConnectionError:
            return b""
    return b"".join(parts)


# What only an admin reads, or nobody: of tokens, of /etc/passwd, of pyproject.toml.
INSIDE = [b'"created_by"', b"root:", b"[project]"]
PATHS = [
    "/healthz/../api/v1/runs",
    "/login/../api/v1/runs",
    "/login/%2e%2e/api/v1/runs",
    "/healthz/..;/api/v1/runs",
    "//api/v1/runs",
    "/./api/v1/runs",
    "/api/v1//runs",
    "/api/v1/runs/",
    "/API/v1/runs",
    "/api/V1/RUNS",
    "/api%2fv1%2fruns",
    "/api/v1/%72uns",
    "/%61pi/v1/runs",
    "/api/v1/runs%00",
    "/api/v1/runs%20",
    "/api/v1/runs%2f..%2f..%2f..%2fhealthz",
    "/api/v1/runs;/healthz",
    "/api/v1/runs?/healthz",
    "/api/v1/runs#/healthz",
    "/healthz%2f..%2fapi%2fv1%2fruns",
    "/healthz?x=/../api/v1/runs/../../openapi.json",
    "/..%c0%af..%c0%afetc/passwd",
    "/assets/../../../../etc/passwd",
    "/assets/..%2f..%2f..%2f..%2fetc%2fpasswd",
    "/login/../../../../../../etc/passwd",
    "/login/..%2f..%2fetc%2fpasswd",
    "/assets/%252e%252e/%252e%252e/etc/passwd",
    "/_dash-component-suites/dash/../../../../etc/passwd",
    "/logout",
    "/_dash-component-suites/..%2f..%2fpyproject.toml",
    "/healthz/x",
    "/readyz/x",
    "/login/x",
    "/healthz/",
    "\\api\\v1\\runs",
    "http://localhost/api/v1/runs",
    "http://evil.example/healthz/../api/v1/runs",
    "*",
    "/healthz%0d%0aX:%20y",
    "/docs/oauth2-redirect",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("role", ["", "viewer"])
def test_paths_open_nothing(site: Site, path: str, role: str) -> None:
    """Without a token nothing; a viewer's opens no files, nor what an admin's would."""
    for base in ("runs", "tokens"):
        target = path.replace("runs", base).replace("RUNS", base.upper())
        token = f"Authorization: Bearer {site.tokens['viewer']['token']}\r\n" if role else ""
        request = f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{token}\r\n"
        answer = read(site, request.encode())
        status = int(answer.split()[1]) if answer else 0
        if target.startswith("/healthz?"):
            assert status == 200
        elif not role:
            assert status in (0, 303, 302, 307, 400, 401, 403, 404, 405), (target, status)
            assert status != 404 or "/login" in target or "z/" in target or "%" in target
        else:
            assert not [word for word in INSIDE if word in answer], (target, answer[:300])


@pytest.mark.parametrize("path", [path for path in PATHS if "component-suites" in path])
def test_a_path_is_no_fault_of_the_server(site: Site, path: str) -> None:
    token = f"Authorization: Bearer {site.tokens['viewer']['token']}\r\n"
    request = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{token}\r\n"
    assert raw(site, request.encode()) < 500


METHODS = ["HEAD", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "PATCH", "PUT"]
METHODS += ["DELETE", "get", "Get", "GETX", "BREW", "PURGE", "LINK"]


@pytest.mark.parametrize("method", METHODS)
def test_methods_open_nothing(site: Site, method: str) -> None:
    for path in ("/api/v1/runs", "/api/v1/tokens", "/", "/metrics", f"/api/v1/runs/{RUN}/stop"):
        text = (
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        )
        assert raw(site, text.encode()) in (0, 302, 303, 307, 400, 401, 403, 405, 501), path
    viewer = site.tokens["viewer"]["token"]
    head = (
        f"Host: x\r\nConnection: close\r\nAuthorization: Bearer {viewer}\r\nContent-Length: 0\r\n"
    )
    for path in ("/api/v1/tokens", f"/api/v1/runs/{RUN}/stop", f"/api/v1/runs/{RUN}/session"):
        status = raw(site, f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode())
        assert status in (0, 400, 401, 403, 404, 405, 501), path
    assert site.admin.get(f"/api/v1/runs/{RUN}").json()["state"] == "running"


SMUGGLED = [
    b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nContent-Length: 0\r\n\r\n",
    b"GET /healthz HTTP/0.9\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\0" * 100_000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


@pytest.mark.parametrize("number", range(len(SMUGGLED)))
def test_what_is_no_http_harms_nobody(site: Site, number: int) -> None:
    text = SMUGGLED[number] + b"GET /api/v1/tokens HTTP/1.1\r\nHost: x\r\n\r\n"
    assert raw(site, text) < 500
    assert site.admin.get("/healthz").status_code == 200


def test_wrong_tokens_are_slowed_down_and_right_ones_go_on(tmp_path: Path) -> None:
    with EmbeddedBus(tmp_path / "bus") as bus:
        store = Store.open(f"sqlite:///{tmp_path / 'x.db'}")
        with serving(store, bus.url) as admin:
            url = str(admin.base_url).rstrip("/")
            wrong = {"Authorization": "Bearer pl_00000000_wrong"}
            said = []
            for number in range(40):  # another address each time, says the sender
                headers = {**wrong, "X-Forwarded-For": f"10.1.1.{number}"}
                said.append(httpx.get(f"{url}/api/v1/runs", headers=headers))
            assert said[0].status_code == 401
            assert said[-1].status_code == 429
            assert int(said[-1].headers["retry-after"]) > 0
            for _ in range(12):
                httpx.post(f"{url}/login", data={"token": "wrong"})
            assert httpx.post(f"{url}/login", data={"token": "wrong"}).status_code == 429
            assert httpx.post(f"{url}/login", data={"token": ADMIN}).status_code == 303
            assert admin.get("/api/v1/runs").status_code == 200
