"""Proxies in front of the server: whose word counts, and for what."""

from __future__ import annotations

import httpx
import pytest

from paceline.core.errors import PacelineError
from paceline_backend.api.auth import COOKIE
from paceline_backend.api.auth.failures import MOST_WRONG
from paceline_backend.server.settings import Proxies
from paceline_backend.store import Store
from support.web import serving

V1 = "/api/v1"
USER = "X-Forwarded-User"
TRUSTED = Proxies(("127.0.0.0/8",), USER, {"ada": "operator", "root": "admin"})
BODY = {"script": "train.py", "nproc": 1, "launch": False}


def status(client: httpx.Client, user: str, method: str = "GET", path: str = "/runs") -> int:
    body = BODY if method == "POST" else None
    return client.request(method, V1 + path, headers={USER: user}, json=body).status_code


def test_a_trusted_proxy_names_the_user(store: Store, bus_url: str) -> None:
    with serving(store, bus_url, token="of a test", proxies=TRUSTED) as client:
        assert status(client, "") == 401
        assert status(client, "eve") == 200, "a viewer, as nothing else is said"
        assert status(client, "eve", "POST") == 403
        assert status(client, "ada", "POST") == 201
        assert status(client, "ada", path="/tokens") == 403
        assert status(client, "root", path="/tokens") == 200


def test_a_user_whom_a_proxy_names_gets_no_link(store: Store, bus_url: str) -> None:
    """It would belong to no token: nobody could end what it lets in."""
    with serving(store, bus_url, token="of a test", proxies=TRUSTED) as client:
        refused = client.post(f"{V1}/login-links", headers={USER: "ada"})
        assert refused.status_code == 403
        assert "ada is authenticated by a proxy" in refused.json()["detail"]
        assert "paceline token create" in refused.json()["detail"]
        with_token = {USER: "ada", "Authorization": "Bearer of a test"}
        assert client.post(f"{V1}/login-links", headers=with_token).status_code == 201


def test_a_browser_behind_a_proxy_keeps_pages_from_elsewhere_out(
    store: Store, bus_url: str
) -> None:
    """It sends the proxy's own cookie along for them."""
    with serving(store, bus_url, token="of a test", proxies=TRUSTED) as client:
        evil = {USER: "ada", "Origin": "https://evil.example"}
        assert client.post(f"{V1}/runs", json=BODY, headers=evil).status_code == 403


def test_two_names_are_nobodys(store: Store, bus_url: str) -> None:
    """One of them came from the client."""
    with serving(store, bus_url, token="of a test", proxies=TRUSTED) as client:
        twice = [(USER, "root"), (USER, "eve")]
        assert client.get(f"{V1}/runs", headers=twice).status_code == 401


@pytest.mark.parametrize(
    "proxies", [Proxies(), Proxies(("127.0.0.1",)), Proxies(("192.0.2.0/24",), USER)]
)
def test_nobody_else_says_who_asks(store: Store, bus_url: str, proxies: Proxies) -> None:
    with serving(store, bus_url, token="of a test", proxies=proxies) as client:
        assert status(client, "root") == 401


def test_only_a_trusted_proxy_says_where_a_client_is(store: Store, bus_url: str) -> None:
    """Otherwise who guesses tokens would take another address for each."""
    for proxies, last in ((Proxies(), 429), (Proxies(("127.0.0.1",)), 401)):
        with serving(store, bus_url, token="of a test", proxies=proxies) as client:
            statuses = [
                client.post(
                    "/login", data={"token": "x"}, headers={"X-Forwarded-For": f"192.0.2.{n}"}
                ).status_code
                for n in range(MOST_WRONG + 1)
            ]
            assert statuses == [401] * MOST_WRONG + [last]


def test_only_a_trusted_proxy_says_that_the_way_is_encrypted(store: Store, bus_url: str) -> None:
    for proxies, secure in ((Proxies(), False), (Proxies(("127.0.0.1",)), True)):
        with serving(store, bus_url, token="of a test", proxies=proxies) as client:
            entered = client.post(
                "/login", data={"token": "of a test"}, headers={"X-Forwarded-Proto": "https"}
            )
            assert entered.headers["set-cookie"].startswith(COOKIE)
            assert ("Secure" in entered.headers["set-cookie"]) == secure


@pytest.mark.parametrize(
    ("trusted", "header", "roles", "says"),
    [
        ("proxy.example", None, None, "--trusted-proxy proxy.example"),
        (None, USER, None, "--trusted-proxy"),
        ("10.0.0.1", USER, "ada", "USER=ROLE"),
        ("10.0.0.1", USER, "ada=root", "viewer, operator, admin"),
        ("10.0.0.1", USER, "ada=agent", "viewer, operator, admin"),
    ],
)
def test_mistakes_are_named(
    trusted: str | None, header: str | None, roles: str | None, says: str
) -> None:
    with pytest.raises(PacelineError, match=says):
        Proxies.of(trusted, header, roles)
