"""Tokens and links over REST, and the browsers that they let in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import httpx
import pytest
import sqlalchemy as sa

from paceline_backend.api.auth import COOKIE
from paceline_backend.api.auth.failures import MOST_WRONG
from paceline_backend.store import Store, tokens
from paceline_backend.store.schema import tokens as table
from support.waiting import DEADLINE_S, until
from support.web import serving

V1 = "/api/v1"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture
def stranger(client: httpx.Client) -> Iterator[httpx.Client]:
    """As the client, but without a token."""
    with httpx.Client(base_url=client.base_url, timeout=DEADLINE_S, trust_env=False) as bare:
        yield bare


def create(client: httpx.Client, scope: str = "viewer", **body: object) -> dict[str, str]:
    answer = client.post(f"{V1}/tokens", json={"name": "of a test", "scope": scope, **body})
    assert answer.status_code == 201, answer.text
    made: dict[str, str] = answer.json()
    return made


def test_made_used_revoked(client: httpx.Client, stranger: httpx.Client, store: Store) -> None:
    made = create(client, "operator")
    assert made["token"].startswith(f"pl_{made['id']}_")
    assert stranger.get(f"{V1}/runs", headers=bearer(made["token"])).status_code == 200
    until(lambda: client.get(f"{V1}/tokens").json()[0]["used_at"] is not None, "no use was noted")
    (listed,) = client.get(f"{V1}/tokens").json()
    assert "token" not in listed and "hash" not in listed
    assert (listed["name"], listed["created_by"]) == ("of a test", "configured")
    revoked = client.delete(f"{V1}/tokens/{made['id']}").json()
    assert revoked["revoked_at"] is not None
    refused = stranger.get(f"{V1}/runs", headers=bearer(made["token"]))
    assert (refused.status_code, "is revoked" in refused.text) == (401, True)
    assert client.delete(f"{V1}/tokens/none").status_code == 404
    with store.read() as connection:
        (row,) = connection.execute(sa.select(table)).mappings()
    secret = made["token"].rpartition("_")[2]
    assert secret not in str(dict(row)), "the database has its hash only"


def test_a_link_lets_one_browser_in_once(client: httpx.Client, stranger: httpx.Client) -> None:
    link = client.post(f"{V1}/login-links").json()["path"]
    code = link.partition("=")[2]
    assert stranger.get(f"{V1}/runs", headers=bearer(code)).status_code == 401, "it is no token"
    entered = stranger.get(f"{link}&next=/runs/abc")
    assert (entered.status_code, entered.headers["location"]) == (303, "/runs/abc")
    assert stranger.get(f"{V1}/tokens").status_code == 200, "with the rights of who asked for it"
    assert stranger.get(f"{V1}/runs", headers=bearer(code)).status_code == 401
    stranger.cookies.clear()
    again = stranger.get(link)
    assert (again.status_code, "paceline open" in again.text) == (401, True)


def test_links_and_logins_are_in_the_audit_log(
    client: httpx.Client, stranger: httpx.Client
) -> None:
    made = create(client, "operator")
    path = client.post(f"{V1}/login-links", headers=bearer(made["token"])).json()["path"]
    assert stranger.get(path).is_redirect
    assert stranger.get(path).status_code == 401, "that is no login"
    page = client.get(f"{V1}/audit").json()
    failed, login, link = page["items"][:3]
    assert (failed["action"], failed["details"]["way"]) == ("login.failed", "link")
    for entry, action in ((link, "link.create"), (login, "login")):
        assert (entry["who"], entry["scope"]) == (made["name"], "operator")
        assert (entry["action"], entry["address"]) == (action, "127.0.0.1")
        assert entry["at"] == pytest.approx(time.time(), abs=600)
    assert link["details"]["id"] == login["details"]["link"]
    browsers = [row["id"] for row in client.get(f"{V1}/tokens").json() if row["kind"] == "browser"]
    assert login["details"]["link"] in browsers, "by which the browser can be shut out"
    assert path.rpartition("_")[2] not in str(page)
    assert sum(entry["action"] == "login" for entry in page["items"]) == 1


def test_another_configured_token_shuts_out_who_came_by_the_old(store: Store, bus_url: str) -> None:
    jar = []
    with serving(store, bus_url, token="the first configured token") as client:
        client.post("/login", data={"token": "the first configured token"})
        jar.append(client.cookies[COOKIE])
        link = client.post(f"{V1}/login-links").json()["path"]
        client.cookies.clear()
        assert client.get(link).status_code == 303
        jar.append(client.cookies[COOKIE])
    with serving(store, bus_url, token="the second configured token") as client:
        for cookie in jar:
            asked = client.get(f"{V1}/runs", headers={"Cookie": f"{COOKIE}={cookie}"})
            assert asked.status_code == 401


def test_a_right_login_takes_back_itself_only(client: httpx.Client, stranger: httpx.Client) -> None:
    """Else who has a token could guess another between his own logins, as often as he likes."""
    good = create(client)["token"]
    for _ in range(MOST_WRONG - 1):
        assert stranger.post("/login", data={"token": good[:-1] + "!"}).status_code == 401
        assert stranger.post("/login", data={"token": good}).status_code == 303
    assert stranger.post("/login", data={"token": good[:-1] + "!"}).status_code == 401
    assert stranger.post("/login", data={"token": good[:-1] + "!"}).status_code == 429


def test_a_short_configured_token_cannot_be_guessed_at_will(store: Store, bus_url: str) -> None:
    with serving(store, bus_url, token="1234") as client:
        for guess in range(MOST_WRONG):
            assert client.get("/", headers=bearer(str(guess))).status_code == 401
        assert client.get("/", headers=bearer("1234")).status_code == 429


NO_TOKENS: list[dict[str, object]] = [
    {"name": "n", "scope": "root"},
    {"name": "", "scope": "admin"},
    {"name": "the control plane", "scope": "admin"},
    {"name": "a\nb", "scope": "admin"},
    {"name": "\x00", "scope": "admin"},
    {"name": "n" * 201, "scope": "admin"},
    {"name": "n", "scope": "admin", "expires_s": 0},
    {"name": "n", "scope": "admin", "node": "a"},
    {"name": "n", "scope": "agent", "node": "a/b"},
    {"name": "n", "scope": "admin", "expires_s": 1e300},
    {"name": "n"},
]


def test_what_is_no_token_is_refused(client: httpx.Client) -> None:
    for body in NO_TOKENS:
        assert client.post(f"{V1}/tokens", json=body).status_code == 422, body
    assert client.get(f"{V1}/tokens").json() == []


def test_the_servers_own_token_lasts_until_it_is_revoked(store: Store) -> None:
    first = tokens.embedded(store)
    assert tokens.embedded(store) == first
    with store.write() as connection:
        tokens.revoke(connection, first.id)
    second = tokens.embedded(store)
    assert second != first
    with store.read() as connection:
        holder = tokens.checked(connection, str(second))
    assert holder is not None
    assert (holder.scope, holder.refused) == ("admin", "")


Enter = Callable[..., httpx.Client]


@pytest.fixture
def enter(client: httpx.Client) -> Iterator[Enter]:
    """Lets a browser in by a link that somebody asks for."""
    with ExitStack() as held:

        def entered(asker: httpx.Client, headers: dict[str, str] | None = None) -> httpx.Client:
            link = asker.post(f"{V1}/login-links", headers=headers).json()["path"]
            browser = httpx.Client(base_url=client.base_url, timeout=DEADLINE_S, trust_env=False)
            held.enter_context(browser)
            assert browser.get(link).status_code == 303
            assert browser.get(f"{V1}/runs").status_code == 200
            return browser

        yield entered


def test_a_browsers_links_end_with_the_token_and_with_the_browser(
    client: httpx.Client, stranger: httpx.Client, enter: Enter
) -> None:
    """Each browser may ask for a link to the next: none of them outlives what it began with."""
    made = create(client, "operator")
    first = enter(stranger, bearer(made["token"]))
    second = enter(first)
    third = enter(second)
    rows = client.get(f"{V1}/tokens").json()
    newest_first = [row["id"] for row in rows if row["kind"] == "browser"]
    client.delete(f"{V1}/tokens/{newest_first[1]}")
    answers = [each.get(f"{V1}/runs").status_code for each in (first, second, third)]
    assert answers == [200, 401, 401]
    fourth = enter(first)
    client.delete(f"{V1}/tokens/{made['id']}")
    assert [each.get(f"{V1}/runs").status_code for each in (first, fourth)] == [401, 401]


def test_a_browsers_link_ends_when_the_token_expires(
    client: httpx.Client, stranger: httpx.Client, enter: Enter, store: Store
) -> None:
    made = create(client, "operator", expires_s=1000)
    second = enter(enter(stranger, bearer(made["token"])))
    with store.write() as connection:
        over = sa.update(table).where(table.c.id == made["id"])
        connection.execute(over.values(expires_at=time.time() - 1))
    assert second.get(f"{V1}/runs").status_code == 401


def test_a_browsers_use_is_noted_once_a_minute(
    client: httpx.Client, enter: Enter, store: Store
) -> None:
    def used_at() -> float:
        with store.read() as connection:
            return float(connection.execute(sa.select(table.c.used_at)).scalar_one())

    browser = enter(client)
    with store.write() as connection:
        connection.execute(sa.update(table).values(used_at=time.time() - 1000))
    before = used_at()
    browser.get(f"{V1}/runs")
    until(lambda: used_at() > before, "no use was noted")
    noted = used_at()
    browser.get(f"{V1}/runs")
    browser.get(f"{V1}/runs")
    assert used_at() == noted
