"""The pages of all runs and of alerts."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import sqlalchemy as sa
from playwright.sync_api import Page, expect

from paceline.wire import StepBatch
from paceline_backend.control.fleet import FleetWatch
from paceline_backend.server.origins import Origins
from paceline_backend.server.prices import Price
from paceline_backend.store import Store, nodes, schema, telemetry
from paceline_backend.store.alerts import rows
from paceline_backend.store.history import days
from support.receiver import Receiver, receiving
from support.records import add_run, hello, record
from support.web import serving

NEVER = threading.Event()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


@pytest.fixture
def web(store: Store, bus_url: str, port: int, receiver: Receiver) -> Iterator[httpx.Client]:
    allowed, price = Origins([receiver.origin]), Price(2.5, "EUR")
    with serving(store, bus_url, port=port, webhook_origins=allowed, hour_price=price) as client:
        yield client


def trained(store: Store) -> None:
    """Rank 1 of three, on node gpu-b2, is 3 × slower."""
    key = add_run(store, "slow", state="running", nproc=3, attempt=0, node="gpu-b2")
    now = time.time()
    steps = [
        record(
            step,
            rank,
            load=40.0,
            compute_s=0.3 if rank == 1 else 0.1,
            sync_s=0.02 if rank == 1 else 0.22,
            step_s=0.321,
            ended_at=now - 60 + 0.321 * step,
        )
        for step in range(60)
        for rank in range(3)
    ]
    telemetry.write(store, [("slow", hello(world=3)), ("slow", StepBatch(steps))])
    with store.write() as connection:
        for node in ("gpu-b1", "gpu-b2", "gpu-c3"):
            nodes.expect(connection, node)
        connection.execute(sa.update(schema.nodes).values(heartbeat_at=now + 3, left=False))
        cordon = {"node": "gpu-c3", "at": now, "by": "ada", "reason": "its disk is slow"}
        connection.execute(sa.insert(schema.cordons).values(cordon))
    FleetWatch(store, "worker").look(NEVER)
    days.sum_up(store, key)


def raised(store: Store, **fields: object) -> int:
    values = {"rule": "run-waste", "run": "slow", "severity": "warning", "value": 0.44}
    values |= {"threshold": 0.2, "words": "Ranks spend 44 % of their time waiting."}
    with store.write() as connection:
        return rows.add(connection, values | {"since": 1.0, "raised_at": 2.0} | fields)


def test_the_fleet_says_who_loses_what(
    store: Store, web: httpx.Client, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", math.inf)  # however slow this machine is
    trained(store)
    page.goto(f"{web.base_url}/fleet")
    expect(page.locator("#fleet-words")).to_contain_text("1 of 1 run on 3 workers is slowed down")
    run = page.locator("#fleet-runs tbody tr")
    expect(run).to_contain_text("Held up: rank 1 computes")
    expect(run).to_contain_text("EUR")
    names = page.locator("#fleet-nodes .name")
    expect(names).to_have_text(["gpu-b1", "gpu-b2", "gpu-c3"])
    notes = page.locator("#fleet-nodes .note")
    expect(notes).to_have_text(["0 runs", "1 run", "cordoned by ada: its disk is slow, 0 runs"])
    expect(page.locator("#fleet-cost tbody tr")).to_contain_text("owner not known")
    page.locator("#fleet-by").select_option("run")
    expect(page.locator("#fleet-cost tbody tr")).to_contain_text("slow")


def test_alerts_are_shown_counted_and_acknowledged(
    store: Store, web: httpx.Client, page: Page
) -> None:
    raised(store)
    raised(store, rule="run-hangs", severity="critical", words="No step has ended for 31 s.")
    raised(store, rule="disk-low", run="", resolved_at=9.0, gone_at=8.0)
    page.goto(f"{web.base_url}/")
    bell = page.locator("#alerts-bell")
    expect(bell).to_have_text("2")
    expect(bell).to_have_class("bell bad")
    page.get_by_role("link", name="Alerts").click()
    listed = page.locator("#alerts-list tbody tr")
    expect(listed).to_have_count(2)
    page.get_by_role("button", name="Acknowledge run-hangs of slow").click()
    page.fill("#acknowledge-operator", "ada")
    page.fill("#acknowledge-why", "its disk is replaced")
    page.click("#acknowledge-confirm")
    expect(bell).to_have_text("1")
    expect(bell).to_have_class("bell")
    expect(listed.first).to_contain_text("ada: its disk is replaced")
    expect(page.locator("#acknowledge-dialog")).to_be_hidden()
    # The list is asked for again and again; whoever is on a button stays there.
    button = page.get_by_role("button", name="Acknowledge run-waste of slow")
    button.focus()
    raised(store, rule="rank-slow", words="Rank 1 is slow.")
    expect(listed).to_have_count(3)
    expect(button).to_be_focused()
    page.locator("#alerts-state").select_option("resolved")
    expect(listed).to_have_count(1)
    expect(listed).to_contain_text("the control plane")


def test_a_webhook_is_added_and_tried_out_on_the_page(
    web: httpx.Client, page: Page, receiver: Receiver
) -> None:
    page.goto(f"{web.base_url}/alerts")
    page.get_by_label("Name", exact=True).fill("on-call")
    page.get_by_label("URL").fill("https://evil.example/")
    page.get_by_role("button", name="Add webhook").click()
    expect(page.locator("#alerts-problem")).to_contain_text("is not allowed")
    page.get_by_label("URL").fill(receiver.url)
    page.get_by_role("button", name="Add webhook").click()
    expect(page.locator("#webhook-secret")).to_contain_text("whsec_")
    page.get_by_role("button", name="Test on-call").click()
    expect(page.locator("#webhooks-list")).to_contain_text("the test was taken (200)")
    assert len(receiver.requests) == 1
    page.get_by_role("button", name="Delete on-call").click()
    page.keyboard.press("Escape")
    expect(page.locator("#webhooks-list")).to_contain_text("on-call")
    page.get_by_role("button", name="Delete on-call").click()
    page.click("#webhook-confirm")
    expect(page.locator("#webhooks-list")).to_be_empty()
