"""Wrong logins: how many, for how long, and for how many addresses they are remembered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import urlencode

import httpx
from starlette.responses import PlainTextResponse

from paceline_backend.api.auth import Authentication, CredentialCheck
from paceline_backend.api.auth.failures import MOST_WRONG, WRONG_S, LoginThrottle
from paceline_backend.api.rules import VIEWER
from paceline_backend.store import Store


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def fail(throttle: LoginThrottle, address: str, times: int = MOST_WRONG) -> None:
    for _ in range(times):
        throttle.wrong(address)


def test_an_address_waits_after_too_many_wrong_logins() -> None:
    clock = Clock()
    throttle = LoginThrottle(clock)
    fail(throttle, "192.0.2.1", MOST_WRONG - 1)
    assert throttle.wait_s("192.0.2.1") == 0
    fail(throttle, "192.0.2.1", 1)
    assert throttle.wait_s("192.0.2.1") == WRONG_S
    assert throttle.wait_s("192.0.2.2") == 0, "another address does not wait"
    clock.now += WRONG_S - 0.5
    assert throttle.wait_s("192.0.2.1") == 1, "rounded up: earlier would be in vain"
    clock.now += 0.5
    assert throttle.wait_s("192.0.2.1") == 0


def test_the_rate_holds_for_good() -> None:
    """However long a client goes on, no window has more wrong logins than allowed."""
    clock = Clock()
    throttle = LoginThrottle(clock)
    tried: list[float] = []
    for _ in range(1_000):
        clock.now += 1.0
        if not throttle.wait_s("a"):
            throttle.wrong("a")
            tried.append(clock.now)
    assert len(tried) > 100
    assert all(
        later - earlier >= WRONG_S
        for earlier, later in zip(tried, tried[MOST_WRONG:], strict=False)
    )


def test_addresses_of_an_ipv6_network_are_counted_together() -> None:
    throttle = LoginThrottle(Clock())
    for host in range(MOST_WRONG):
        throttle.wrong(f"2001:db8::{host:x}")
    assert throttle.wait_s("2001:db8::ffff") > 0
    assert throttle.wait_s("2001:db8:0:1::1") == 0


def test_memory_is_bounded_and_the_newest_are_kept() -> None:
    throttle = LoginThrottle(Clock())
    fail(throttle, "first")
    for number in range(4095):
        throttle.wrong(f"10.0.{number // 256}.{number % 256}")
    assert throttle.wait_s("first") > 0
    throttle.wrong("10.1.0.0")
    assert throttle.wait_s("first") == 0, "the oldest was forgotten"


def test_the_page_to_log_in_says_when_to_try_again(tmp_path: Path) -> None:
    clock = Clock()
    store = Store.open(f"sqlite:///{tmp_path / 'paceline.db'}")
    credentials = CredentialCheck(store, "secret")
    guard = Authentication(
        PlainTextResponse("in"), credentials, lambda _: VIEWER, LoginThrottle(clock)
    )

    async def login(token: str, address: str) -> httpx.Response:
        transport = httpx.ASGITransport(guard, client=(address, 1))
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            content = urlencode({"token": token})
            return await client.post("/login", content=content, headers=form)

    def status(token: str, address: str = "192.0.2.1") -> int:
        return asyncio.run(login(token, address)).status_code

    assert [status("guess") for _ in range(MOST_WRONG)] == [401] * MOST_WRONG
    refused = asyncio.run(login("secret", "192.0.2.1"))
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "60")
    assert "Try again in 60 s" in refused.text
    assert "set-cookie" not in refused.headers
    assert status("secret", "192.0.2.2") == 303
    clock.now += WRONG_S
    assert status("secret") == 303
    store.close()
