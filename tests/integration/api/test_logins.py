"""Logins that fail leave a trace, and those that succeed are rows that end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from paceline_backend.api.auth import COOKIE
from paceline_backend.api.auth.failures import MOST_AUDITED, MOST_WRONG, FailedLogins
from paceline_backend.store import Store, StoreUnavailableError, audit
from support.waiting import DEADLINE_S
from support.web import ADMIN, SIGNED_IN, serving

V1 = "/api/v1"
WRONG = "pl_00000000_" + "0" * 48


@pytest.fixture
def browser(client: httpx.Client) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=client.base_url, timeout=DEADLINE_S, trust_env=False) as bare:
        yield bare


def create(client: httpx.Client, scope: str = "operator") -> dict[str, str]:
    made: dict[str, str] = client.post(
        f"{V1}/tokens", json={"name": f"an {scope}'s", "scope": scope}
    ).json()
    return made


def audited(client: httpx.Client, action: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = client.get(f"{V1}/audit", params={"action": action}).json()[
        "items"
    ]
    return rows


def login(browser: httpx.Client, token: str) -> int:
    return browser.post("/login", data={"token": token}).status_code


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_each_way_to_fail_is_logged_and_audited(
    client: httpx.Client, browser: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    revoked, agents = create(client), create(client, "agent")
    client.delete(f"{V1}/tokens/{revoked['id']}")
    caplog.set_level(logging.WARNING)
    assert login(browser, WRONG) == 401
    assert login(browser, revoked["token"]) == 401
    assert login(browser, agents["token"]) == 403
    assert browser.get("/login", params={"code": WRONG}).status_code == 401
    assert browser.get(f"{V1}/runs", headers=bearer(WRONG)).status_code == 401
    assert browser.get(f"{V1}/runs", headers=bearer(revoked["token"])).status_code == 401
    rows = audited(client, "login.failed")
    causes = [(row["who"], row["details"]["way"], row["details"]["reason"]) for row in rows]
    assert causes[::-1] == [
        ("unknown", "login page", "unknown token"),
        ("an operator's", "login page", "the token is revoked"),
        ("an agent's", "login page", "the token is for agents only"),
        ("unknown", "link", "unknown, used or expired link"),
        ("unknown", "request", "unknown token"),
        ("an operator's", "request", "the token is revoked"),
    ]
    assert {row["address"] for row in rows} == {"127.0.0.1"}
    assert caplog.text.count("failed login from 127.0.0.1") == len(rows)
    for secret in (WRONG, revoked["token"], agents["token"]):
        assert secret not in caplog.text + str(rows)


def test_a_client_that_repeats_an_old_token_is_one_row(
    client: httpx.Client, browser: httpx.Client
) -> None:
    revoked = create(client)
    client.delete(f"{V1}/tokens/{revoked['id']}")
    for token in (WRONG, revoked["token"]) * (MOST_WRONG + 2):
        assert browser.get(f"{V1}/runs", headers=bearer(token)).status_code in (401, 429)
    assert len(audited(client, "login.failed")) == 2


def test_rows_of_failed_logins_have_a_bound(store: Store) -> None:
    """Whoever has many addresses fills neither the database nor the log."""
    now = [0.0]
    failed = FailedLogins(store, lambda: now[0])
    for number in range(MOST_AUDITED + 7):
        failed.record(f"10.0.0.{number}", None, "login page", "unknown token")
    now[0] += 61
    failed.record("10.0.1.0", None, "login page", "unknown token")
    with store.read() as connection:
        rows, _ = audit.page(connection, audit.ChangeFilter(action="login.failed"), limit=500)
    assert len(rows) == MOST_AUDITED + 1
    assert rows[0]["details"]["left_out"] == 7


def test_a_database_that_is_away_changes_no_refusal(
    client: httpx.Client, browser: httpx.Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise StoreUnavailableError("the database does not answer")

    monkeypatch.setattr(Store, "write", away)
    assert login(browser, WRONG) == 401


def test_a_right_token_passes_while_its_address_is_throttled(
    client: httpx.Client, browser: httpx.Client
) -> None:
    made = create(client)
    link = client.post(f"{V1}/login-links").json()["path"]
    assert [login(browser, WRONG) for _ in range(MOST_WRONG + 1)] == [401] * MOST_WRONG + [429]
    assert login(browser, made["token"]) == 303
    assert login(browser, ADMIN) == 303
    browser.cookies.clear()
    assert browser.get(link).status_code == 303
    assert browser.get(f"{V1}/runs").status_code == 200
    assert login(browser, WRONG) == 429, "nothing was taken back"


def test_each_browser_is_a_row_that_an_admin_can_end(
    client: httpx.Client, browser: httpx.Client
) -> None:
    made = create(client)
    assert login(browser, made["token"]) == 303
    first = browser.cookies[COOKIE]
    browser.cookies.clear()
    assert login(browser, made["token"]) == 303
    rows = [row for row in client.get(f"{V1}/tokens").json() if row["kind"] == "browser"]
    assert len(rows) == 2
    assert all((row["name"], row["scope"]) == (made["name"], "operator") for row in rows)
    logins = [row["details"]["browser"] for row in audited(client, "login")]
    assert logins == [row["id"] for row in rows], "by which the audit log names it"
    assert client.delete(f"{V1}/tokens/{rows[1]['id']}").status_code == 200
    headers = {"Cookie": f"{COOKIE}={first}"}
    assert httpx.get(client.base_url.join(f"{V1}/runs"), headers=headers).status_code == 401
    assert browser.get(f"{V1}/runs").status_code == 200, "the other goes on"
    assert browser.get(f"{V1}/runs", headers=bearer(made["token"])).status_code == 200


def test_logout_ends_this_browser_for_good(client: httpx.Client, browser: httpx.Client) -> None:
    for token in (create(client)["token"], ADMIN):
        assert login(browser, token) == 303
        cookie = browser.cookies[COOKIE]
        left = browser.post("/logout")
        assert (left.status_code, left.headers["location"]) == (303, "/login")
        assert COOKIE not in browser.cookies
        kept = browser.get(f"{V1}/runs", headers={"Cookie": f"{COOKIE}={cookie}"})
        assert kept.status_code == 401, "a copy of the cookie is worth nothing"
        assert client.get(f"{V1}/runs", headers=bearer(token)).status_code == 200
    assert [row["who"] for row in audited(client, "logout")] == ["configured", "an operator's"]


def test_only_its_own_pages_log_a_browser_out(client: httpx.Client, browser: httpx.Client) -> None:
    assert login(browser, ADMIN) == 303
    assert browser.post("/logout", headers={"Origin": "http://127.0.0.1:9"}).status_code == 403
    refused = browser.get("/logout")
    assert (refused.status_code, refused.headers["Allow"]) == (405, "POST")
    assert browser.get(f"{V1}/runs").status_code == 200
    browser.cookies.clear()
    assert browser.post("/logout").status_code == 303, "nobody is logged in: nothing to do"


def test_logout_leads_below_the_prefix(store: Store, bus_url: str) -> None:
    with serving(store, bus_url, path_prefix="/p") as client:
        client.post("/p/login", data={"token": SIGNED_IN["Authorization"].split()[1]})
        left = client.post("/p/logout")
        assert left.headers["location"] == "/p/login"
        assert "Path=/p" in left.headers["set-cookie"]
