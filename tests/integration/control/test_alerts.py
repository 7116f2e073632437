"""Alerts are raised and resolved by given times, by one worker, and webhooks are told once."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from paceline.wire import StepBatch
from paceline_backend.control.alerts import MOST_TRIES, AlertWatch, Sender, back_off
from paceline_backend.control.fleet import FleetWatch
from paceline_backend.insight.alerts import DEFAULTS
from paceline_backend.requests import webhooks as requests
from paceline_backend.server.keys import Keys
from paceline_backend.server.origins import Origins
from paceline_backend.store import Store, leases, meta, schema, telemetry
from paceline_backend.store.alerts import rows, webhooks
from paceline_backend.store.alerts import rules as changed_rules
from paceline_backend.store.schema import alert_deliveries
from support.receiver import Receiver, receiving
from support.records import add_run, hello, record

NEVER = threading.Event()
RULE = DEFAULTS["run-waste"]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


def trained(store: Store, run: str = "r", slow: float = 3.0, first: int = 0) -> None:
    """A run whose rank 1 of three is so many times slower; only the waste is an alert."""
    if not first:
        add_run(store, run, state="running", nproc=3, attempt=0)
        telemetry.write(store, [(run, hello(world=3))])
    records = [
        record(step, rank, compute_s=0.1 * slow if rank == 1 else 0.1, step_s=0.31)
        for step in range(first, first + 60)
        for rank in range(3)
    ]
    telemetry.write(store, [(run, StepBatch(records))])


def only(store: Store, *names: str) -> None:
    """Disables all other rules."""
    with store.write() as connection:
        for name in set(DEFAULTS) - set(names):
            fields = ("threshold", "raise_after_s", "resolve_after_s", "severity")
            values = {field: getattr(DEFAULTS[name], field) for field in fields}
            changed_rules.change(connection, name, "a test", {**values, "enabled": False})


def listed(store: Store, **which: Any) -> list[dict[str, Any]]:
    with store.read() as connection:
        return rows.page(connection, rows.AlertFilter(**which), 50)[0]


def hook(store: Store, url: str, severity: str = "warning") -> str:
    with store.write() as connection:
        return webhooks.create(connection, "on-call", url, severity, "a test")


def test_an_alert_is_raised_and_resolved_by_its_times(store: Store) -> None:
    only(store, "run-waste")
    trained(store)
    watch = AlertWatch(store, "worker")
    for at in (1_000.0, 1_000.0 + RULE.raise_after_s - 1):
        assert watch.look(at)
        assert listed(store) == []
    raised_at = 1_000.0 + RULE.raise_after_s
    watch.look(raised_at)
    [alert] = listed(store)
    assert (alert["rule"], alert["run"], alert["state"]) == ("run-waste", "r", "raised")
    assert (alert["since"], alert["raised_at"]) == (1_000.0, raised_at)
    assert alert["value"] == pytest.approx(1 - 0.5 / 0.9)
    assert alert["words"] == "Ranks spend 44 % of their time waiting, over the last 50 steps."
    trained(store, slow=1.0, first=60)
    watch.look(raised_at + 10)
    watch.look(raised_at + 10 + RULE.resolve_after_s - 1)
    assert [each["state"] for each in listed(store)] == ["raised"]
    watch.look(raised_at + 10 + RULE.resolve_after_s)
    [alert] = listed(store)
    assert (alert["state"], alert["gone_at"]) == ("resolved", raised_at + 10)
    assert alert["value"] == pytest.approx(1 - 0.5 / 0.9), "the last value beyond the threshold"


def test_an_alert_ends_with_its_run_and_with_its_rule(store: Store) -> None:
    only(store, "run-waste")
    for run in ("a", "b"):
        trained(store, run)
    watch = AlertWatch(store, "worker")
    for at in (0.0, 600.0):
        watch.look(at)
    with store.write() as connection:
        connection.execute(
            sa.update(schema.runs).where(schema.runs.c.id == "a").values(state="finished")
        )
    watch.look(610.0)
    [over] = listed(store, state="resolved")
    assert (over["run"], over["resolved_at"]) == ("a", 610.0)
    assert over["words"].endswith("The run is no longer training.")
    only(store)
    watch.look(620.0)
    [over, _] = listed(store, state="resolved")
    assert over["words"].endswith("The rule is disabled.")


def test_a_changed_threshold_counts_from_the_next_look(store: Store) -> None:
    only(store, "run-waste")
    trained(store)
    with store.write() as connection:
        values = {"enabled": True, "threshold": 0.5, "raise_after_s": 0.0}
        values |= {"resolve_after_s": 0.0, "severity": "critical"}
        changed_rules.change(connection, "run-waste", "ada", values)
    watch = AlertWatch(store, "worker")
    watch.look(0.0)
    assert listed(store) == []
    with store.write() as connection:
        changed_rules.change(connection, "run-waste", "ada", values | {"threshold": 0.4})
    watch.look(1.0)
    [alert] = listed(store)
    assert (alert["severity"], alert["threshold"]) == ("critical", 0.4)


def test_what_verdicts_and_progress_say_is_looked_at(store: Store) -> None:
    trained(store)
    with store.write() as connection:
        connection.execute(sa.update(schema.runs).values(dropped=7))
    assert FleetWatch(store, "worker").look(NEVER)
    watch = AlertWatch(store, "worker")
    with store.read() as connection:
        at = connection.execute(sa.text("SELECT max(step_at) FROM run_progress")).scalar_one()
    for seconds in (0.0, 600.0, 901.0):
        watch.look(at + seconds)
    by_rule = {alert["rule"]: alert for alert in listed(store)}
    assert set(by_rule) == {
        *("run-held-up", "run-waste", "run-straggler-effect", "rank-slow", "run-stands"),
        "records-lost",
    }
    assert by_rule["rank-slow"]["value"] == pytest.approx(3.0, rel=0.05)
    assert by_rule["rank-slow"]["words"].startswith("Rank 1 computes 2.9 × slower.")
    assert by_rule["run-held-up"]["value"] > 0.15
    assert by_rule["records-lost"]["value"] == 7
    assert by_rule["run-stands"]["words"].startswith("Step 59 was the last, 901 s ago")


def test_of_two_workers_one_looks(store: Store) -> None:
    only(store, "run-waste")
    trained(store)
    first, second = AlertWatch(store, "first"), AlertWatch(store, "second")
    assert first.look(0.0)
    assert not second.look(0.0)
    leases.give_back(store, "first", "alerts")
    assert second.look(600.0)
    assert len(listed(store)) == 1
    assert not first.look(600.0)


def test_a_webhook_is_told_with_a_signature(store: Store, receiver: Receiver) -> None:
    only(store, "run-waste")
    trained(store)
    name = hook(store, receiver.url)
    hook(store, receiver.url, "critical")  # which is not told of a warning
    watch = AlertWatch(store, "worker")
    for at in (0.0, 600.0, 605.0):
        watch.look(at)
    worker = Sender(store, Origins([receiver.origin]))
    assert worker.send(NEVER) == 1
    assert worker.send(NEVER) == 0, "it was told"
    [(headers, body)] = receiver.requests
    told_of = json.loads(body)
    assert (told_of["type"], told_of["timestamp"]) == ("alert.raised", 600.0)
    assert told_of["data"] == json.loads(json.dumps(listed(store)[0]))
    key = Keys(meta.secret(store)).of_webhook(name)
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    made = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{made}"
    trained(store, slow=1.0, first=60)
    for at in (610.0, 910.0):
        watch.look(at)
    worker.send(NEVER)
    assert json.loads(receiver.requests[-1][1])["type"] == "alert.resolved"
    assert len(receiver.requests) == 2


def due_now(store: Store) -> None:
    with store.write() as connection:
        c = alert_deliveries.c
        again = sa.update(alert_deliveries).where(c.due_at.is_not(None)).values(due_at=0.0)
        connection.execute(again)


def raised(store: Store) -> None:
    only(store, "run-waste")
    trained(store)
    for at in (0.0, 600.0):
        AlertWatch(store, "worker").look(at)


def test_what_was_not_taken_is_sent_again_later(store: Store, receiver: Receiver) -> None:
    name = hook(store, receiver.url)
    raised(store)
    receiver.answers += [500, 307, 200]
    worker = Sender(store, Origins([receiver.origin]))
    assert worker.send(NEVER) == 1
    with store.read() as connection:
        known = webhooks.get(connection, name)
    assert (known["status"], known["tries"], known["sent_at"]) == (500, 1, None)
    assert known["error"] == "127.0.0.1 answered 500 Internal Server Error"
    assert known["due_at"] == pytest.approx(known["tried_at"] + 10)
    assert worker.send(NEVER) == 0, "not before its time"
    due_now(store)
    worker.send(NEVER)  # a redirect is not followed
    due_now(store)
    worker.send(NEVER)
    due_now(store)
    assert worker.send(NEVER) == 0, "it was taken"
    assert len(receiver.requests) == 3
    ids = {headers["webhook-id"] for headers, _ in receiver.requests}
    assert len(ids) == 1, "a receiver knows a second try by its id"
    with store.read() as connection:
        known = webhooks.get(connection, name)
    assert (known["tries"], known["error"], known["due_at"]) == (3, None, None)


def test_two_workers_do_not_both_send(store: Store, receiver: Receiver) -> None:
    for _ in range(8):
        hook(store, receiver.url)
    raised(store)
    workers = [Sender(store, Origins([receiver.origin])) for _ in range(2)]
    threads = [threading.Thread(target=each.send, args=(NEVER,)) for each in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = [headers["webhook-id"] for headers, _ in receiver.requests]
    assert len(ids) == len(set(ids)) == 8


def test_an_origin_that_is_no_longer_allowed_is_told_nothing(
    store: Store, receiver: Receiver
) -> None:
    name = hook(store, receiver.url)
    raised(store)
    Sender(store, Origins()).send(NEVER)
    assert receiver.requests == []
    with store.read() as connection:
        assert "is not allowed" in webhooks.get(connection, name)["error"]


def test_it_is_given_up_after_hours() -> None:
    waits = [back_off(tries) for tries in range(1, MOST_TRIES + 1)]
    assert waits[:4] == [10.0, 20.0, 40.0, 80.0]
    assert waits[-1] is None
    assert 2 * 3600 < sum(wait for wait in waits if wait) < 8 * 3600


def test_resolved_alerts_are_forgotten_with_their_deliveries(
    store: Store, receiver: Receiver
) -> None:
    hook(store, receiver.url)
    raised(store)
    only(store)
    AlertWatch(store, "worker").look(700.0)
    with store.write() as connection:
        rows.forget(connection, 700.0)
    assert len(listed(store)) == 1
    with store.write() as connection:
        rows.forget(connection, 701.0)
    assert listed(store) == []
    with store.read() as connection:
        assert connection.execute(sa.select(alert_deliveries.c.key)).all() == []


@contextmanager
def dripping(stop: threading.Event) -> Iterator[str]:
    """A receiver that sends an endless head, byte by byte; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            peer = server.accept()[0]
            with peer:
                try:
                    peer.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
                    for _ in range(200):
                        if stop.wait(0.05):
                            return
                        peer.sendall(b"a")
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}/"
        finally:
            stop.set()
            thread.join()


def test_a_receiver_that_drips_bytes_does_not_hold_the_sender() -> None:
    with dripping(threading.Event()) as url:
        allowed = Origins([url.rstrip("/")])
        sent = requests.post(url, b"{}", "msg_1", b"key", allowed, timeout_s=0.5)
    assert sent.status is None
    assert sent.error is not None
    assert "no answer within 0.5 s" in sent.error


def test_a_delivery_that_fails_is_noted_and_the_others_are_sent(
    store: Store, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook(store, receiver.url)
    raised(store)
    post = requests.post

    def failing(*given: Any) -> requests.Sent:
        monkeypatch.setattr(requests, "post", post)
        raise ValueError("an address that nobody expects")

    monkeypatch.setattr(requests, "post", failing)
    assert Sender(store, Origins([])).send(NEVER) >= 1
    with store.read() as connection:
        c = alert_deliveries.c
        errors = list(connection.execute(sa.select(c.error).order_by(c.key)).scalars())
    assert errors[0] == "the request failed: ValueError"
