"""Alerts over REST: lists, rules, acknowledging, and webhooks with their test."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from paceline_backend.insight.alerts import DEFAULTS
from paceline_backend.server.origins import Origins
from paceline_backend.store import Store
from paceline_backend.store.alerts import rows
from paceline_backend.store.alerts import rules as changed_rules
from support.receiver import Receiver, receiving
from support.web import serving

ALERTS = "/api/v1/alerts"
HOOKS = f"{ALERTS}/webhooks"


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


def raised(store: Store, run: str, **fields: Any) -> int:
    values = {"rule": "run-waste", "run": run, "severity": "warning", "value": 0.4}
    values |= {"threshold": 0.2, "words": "Ranks wait.", "since": 1.0, "raised_at": 2.0}
    with store.write() as connection:
        return rows.add(connection, values | fields)


def test_alerts_are_listed_by_filters_and_pages(client: httpx.Client, store: Store) -> None:
    first = raised(store, "a", resolved_at=9.0, gone_at=8.0)
    second = raised(store, "b", rule="run-hangs", severity="critical", raised_at=5.0)
    third = raised(store, "c", raised_at=6.0)
    raised(store, "d", raised_at=None)  # its condition has not held for long enough
    page = client.get(ALERTS).json()
    assert [each["id"] for each in page["items"]] == [third, second, first]
    assert page["counts"] == {"raised": 2, "unacknowledged": 2, "critical": 1}
    for query, expected in (
        ("state=raised", [third, second]),
        ("state=resolved", [first]),
        ("rule=run-hangs", [second]),
        ("severity=critical", [second]),
        ("run=a", [first]),
        ("since=5.5", [third]),
        ("acknowledged=true", []),
    ):
        items = client.get(f"{ALERTS}?{query}").json()["items"]
        assert [each["id"] for each in items] == expected, query
    page = client.get(f"{ALERTS}?limit=2").json()
    rest = client.get(f"{ALERTS}?limit=2&cursor={page['next_cursor']}").json()
    assert [each["id"] for each in rest["items"]] == [first]
    assert rest["next_cursor"] is None
    answer = client.get(f"{ALERTS}?cursor=nonsense!")
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "cursor")


def test_an_alert_is_acknowledged_once(client: httpx.Client, store: Store) -> None:
    key = raised(store, "a")
    call = f"{ALERTS}/{key}/acknowledge"
    alert = client.post(call, json={"why": "its disk is replaced"}).json()
    assert (alert["acknowledged_by"], alert["acknowledged_why"]) == (
        "configured",
        "its disk is replaced",
    )
    counts = client.get(f"{ALERTS}?state=raised").json()["counts"]
    assert counts == {"raised": 1, "unacknowledged": 0, "critical": 0}
    again = client.post(call)
    assert again.status_code == 409
    assert "was acknowledged by configured" in again.json()["detail"]
    over = raised(store, "b", resolved_at=3.0)
    assert client.post(f"{ALERTS}/{over}/acknowledge").status_code == 409
    assert client.post(f"{ALERTS}/999/acknowledge").status_code == 404
    [change] = client.get("/api/v1/audit?action=alert.acknowledge").json()["items"]
    assert (change["run"], change["target"], change["why"]) == (
        "a",
        str(key),
        "its disk is replaced",
    )


def test_rules_are_changed_and_restored(client: httpx.Client) -> None:
    call = f"{ALERTS}/rules/run-waste"
    assert [rule["name"] for rule in client.get(f"{ALERTS}/rules").json()] == list(DEFAULTS)
    changed = client.put(call, json={"threshold": 0.5, "severity": "critical"}).json()
    assert (changed["threshold"], changed["severity"], changed["raise_after_s"]) == (
        *(0.5, "critical"),
        DEFAULTS["run-waste"].raise_after_s,
    )
    assert changed["changed_by"] == "configured"
    client.put(call, json={"enabled": False})
    [rule] = [each for each in client.get(f"{ALERTS}/rules").json() if each["name"] == "run-waste"]
    assert (rule["threshold"], rule["enabled"]) == (0.5, False)
    restored = client.delete(call).json()
    assert (restored["threshold"], restored["enabled"], restored["changed_at"]) == (
        *(DEFAULTS["run-waste"].threshold, True),
        None,
    )
    assert client.put(f"{ALERTS}/rules/nonsense", json={}).status_code == 404
    for body, field in (
        ({"threshold": -1}, "threshold"),
        ({"raise_after_s": 1e9}, "raise_after_s"),
        ({"severity": "dire"}, "severity"),
        ({"treshold": 1}, "treshold"),
    ):
        answer = client.put(call, json=body)
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)


def test_who_shares_a_token_is_named(client: httpx.Client, store: Store) -> None:
    key = raised(store, "a")
    alert = client.post(f"{ALERTS}/{key}/acknowledge", json={"operator": "ada"}).json()
    assert alert["acknowledged_by"] == "ada"
    changed = client.put(f"{ALERTS}/rules/run-waste", json={"threshold": 0.5, "operator": "bob"})
    assert changed.json()["changed_by"] == "bob"
    names = [
        (change["who"], change["details"]["operator"])
        for change in client.get("/api/v1/audit").json()["items"]
        if change["action"].startswith("alert.")
    ]
    assert sorted(names) == [("configured", "ada"), ("configured", "bob")]


def test_a_change_of_a_rule_does_not_undo_another(client: httpx.Client) -> None:
    call = f"{ALERTS}/rules/run-waste"
    seen = {rule["name"]: rule for rule in client.get(f"{ALERTS}/rules").json()}["run-waste"]
    if_match = {"If-Match": f'"{seen["revision"]}"'}
    first = client.put(call, json={"threshold": 0.5, "operator": "ada"}, headers=if_match).json()
    assert first["revision"] != seen["revision"]
    late = client.put(call, json={"threshold": 0.3}, headers=if_match)
    assert late.status_code == 412
    assert (late.json()["who"], late.json()["revision"]) == ("ada", first["revision"])
    again = {"If-Match": f'"{first["revision"]}"'}
    assert client.put(call, json={"threshold": 0.3}, headers=again).json()["threshold"] == 0.3
    assert client.put(call, json={"threshold": 0.4}, headers={"If-Match": "*"}).is_success
    assert client.delete(call, headers=again).status_code == 412
    client.delete(call)
    restored = client.put(call, json={"enabled": False}, headers=if_match)
    assert restored.is_success  # its values are those that were seen


def test_of_two_changes_at_once_one_is_refused(
    database_url: str, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a rule with its defaults, which has no row."""
    change = changed_rules.change

    def slow_change(*arguments: Any) -> None:
        time.sleep(0.5)  # the other one would read the rule meanwhile
        change(*arguments)

    monkeypatch.setattr(changed_rules, "change", slow_change)
    call = f"{ALERTS}/rules/run-waste"
    if_match = {"If-Match": f'"{DEFAULTS["run-waste"].revision}"'}
    with Store.open(database_url) as store, serving(store, bus_url) as client:

        def put(body: dict[str, Any]) -> int:
            return client.put(call, json=body, headers=if_match).status_code

        with ThreadPoolExecutor() as pool:
            codes = list(pool.map(put, [{"threshold": 0.5}, {"raise_after_s": 7.0}]))
    assert sorted(codes) == [200, 412]


def test_a_webhook_is_made_tried_out_and_deleted(
    store: Store, bus_url: str, receiver: Receiver
) -> None:
    allowed = Origins([receiver.origin])
    with serving(store, bus_url, webhook_origins=allowed) as client:
        made = client.post(HOOKS, json={"name": "on-call", "url": receiver.url}).json()
        [listed] = client.get(HOOKS).json()
        assert listed == {name: value for name, value in made.items() if name != "secret"}
        call = f"{HOOKS}/{made['id']}/test"
        assert client.post(call).json() == {"sent": True, "status": 200, "error": None}
        [(headers, body)] = receiver.requests
        assert json.loads(body)["type"] == "alert.test"
        key = base64.b64decode(made["secret"].removeprefix("whsec_"))
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        digest = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
        assert headers["webhook-signature"] == f"v1,{digest}"
        receiver.answers.append(503)
        tried = client.post(call).json()
        assert (tried["sent"], tried["status"]) == (False, 503)
        assert client.delete(f"{HOOKS}/{made['id']}").json()["name"] == "on-call"
        assert client.get(HOOKS).json() == []
        assert client.post(call).status_code == 404
        entries = client.get("/api/v1/audit").json()["items"]
    assert {each["action"] for each in entries} >= {
        *("webhook.create", "webhook.test", "webhook.delete"),
    }
    assert not any(made["secret"] in json.dumps(each) for each in entries)


def test_a_webhook_is_no_way_to_the_inside(client: httpx.Client, receiver: Receiver) -> None:
    """Without an operator's list nothing is allowed; a redirect would lead past it."""
    for url in (receiver.url, "http://169.254.169.254/latest", "file:///etc/passwd"):
        answer = client.post(HOOKS, json={"name": "x", "url": url})
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"] == "url"
    assert receiver.requests == []
