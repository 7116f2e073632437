"""A POST that is repeated with its Idempotency-Key changes nothing a second time."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from paceline_backend import requests
from paceline_backend.api.idempotency import key_id
from paceline_backend.api.identity import Identity
from paceline_backend.store import Store, StoreUnavailableError
from paceline_backend.store import repeats as repeats_store
from paceline_backend.store.schema import repeats
from support.records import add_run
from support.web import ADMIN, ANY, SIGNED_IN, application

V1 = "/api/v1"
RUN = {"script": "/x/train.py", "nproc": 2, "launch": False}


def keyed(key: str) -> dict[str, str]:
    return {"Idempotency-Key": key, **ANY}


def runs(client: httpx.Client) -> int:
    return len(client.get(f"{V1}/runs").json()["items"])


def switches(client: httpx.Client) -> int:
    """How often the run was switched, after its first policy."""
    return len(client.get(f"{V1}/runs/r/switches").json()) - 1


def test_a_repeated_request_gets_the_first_answer(client: httpx.Client) -> None:
    first = client.post(f"{V1}/runs", json=RUN, headers=keyed("a"))
    again = client.post(f"{V1}/runs", json=RUN, headers=keyed("a"))
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.content == first.content
    assert again.headers["content-type"] == first.headers["content-type"]
    assert again.headers["Idempotency-Replayed"] == "true"
    assert "Idempotency-Replayed" not in first.headers
    assert runs(client) == 1
    assert client.post(f"{V1}/runs", json=RUN, headers=keyed("b")).status_code == 201
    assert client.post(f"{V1}/runs", json=RUN).status_code == 201
    assert runs(client) == 3


def test_a_switch_is_made_once_although_the_revision_has_moved(
    client: httpx.Client, store: Store
) -> None:
    add_run(store, "r", state="running")
    headers = {"Idempotency-Key": "a", "If-Match": client.get(f"{V1}/runs/r").headers["ETag"]}
    answers = [
        client.post(f"{V1}/runs/r/policy", json={"policy": "chronica"}, headers=headers)
        for _ in range(4)
    ]
    assert [answer.status_code for answer in answers] == [202] * 4
    assert len({answer.headers["ETag"] for answer in answers}) == 1
    assert switches(client) == 1


def test_every_post_of_the_document_takes_the_key(client: httpx.Client, store: Store) -> None:
    """No POST is made twice: a second one with another body is refused before its route."""
    missed, document = [], application(client).openapi()
    for number, (path, methods) in enumerate(document["paths"].items()):
        operation = methods.get("post")
        if operation is None:
            continue
        names = [each["name"] for each in operation.get("parameters", [])]
        if "Idempotency-Key" not in names or not {"409", "422"} <= set(operation["responses"]):
            missed.append((path, "not documented"))
        key = {"Idempotency-Key": f"of-{number}"}
        with store.write() as connection:  # the first one is still at work
            values = {"id": id_of(f"of-{number}"), "request": "other", "at": time.time()}
            connection.execute(sa.insert(repeats).values(values))
        answer = client.post(path.replace("{alert}", "1"), json={}, headers=key)
        if answer.status_code != 422 or "Idempotency-Key" not in answer.text:
            missed.append((path, answer.text))
    assert missed == []


def id_of(key: str) -> str:
    """The id of a key that the test's own client sends."""
    digest = hashlib.sha256(ADMIN.encode()).hexdigest()
    return key_id(Identity("configured", "admin", token=f"configured-{digest[:16]}"), key)


def test_a_key_is_of_one_request_and_of_one_requester(client: httpx.Client) -> None:
    assert client.post(f"{V1}/runs", json=RUN, headers=keyed("a")).status_code == 201
    other = client.post(f"{V1}/runs", json={**RUN, "nproc": 3}, headers=keyed("a"))
    assert other.status_code == 422
    assert other.json()["errors"][0]["field"] == "Idempotency-Key"
    body = {"name": "ada", "scope": "operator"}
    elsewhere = client.post(f"{V1}/tokens", json=body, headers=keyed("a"))
    assert elsewhere.status_code == 422
    made = client.post(f"{V1}/tokens", json=body).json()["token"]
    headers = {**keyed("a"), "Authorization": f"Bearer {made}"}
    assert client.post(f"{V1}/runs", json=RUN, headers=headers).status_code == 201
    assert runs(client) == 2


def test_tokens_of_the_same_name_share_no_key(client: httpx.Client) -> None:
    """Otherwise one would get the other's answer, which may hold a secret."""
    body = {"name": "ada", "scope": "admin"}
    answers = []
    for _ in range(2):
        made = client.post(f"{V1}/tokens", json=body).json()["token"]
        headers = {**keyed("a"), "Authorization": f"Bearer {made}"}
        answers.append(client.post(f"{V1}/tokens", json=body, headers=headers))
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].json()["token"] != answers[1].json()["token"]


def test_a_refused_request_may_be_repeated(client: httpx.Client, store: Store) -> None:
    headers = keyed("a")
    assert client.post(f"{V1}/runs/r/stop", headers=headers).status_code == 404
    add_run(store, "r", state="running")
    assert client.post(f"{V1}/runs/r/stop", headers=headers).status_code == 202
    assert client.post(f"{V1}/runs/r/stop", headers=headers).status_code == 202


def test_many_at_once_make_one_run(client: httpx.Client) -> None:
    together, answered = threading.Barrier(6), []

    def create() -> None:
        together.wait()
        url = client.base_url.join(f"{V1}/runs")
        headers = {**keyed("a"), **SIGNED_IN}
        answered.append(httpx.post(url, json=RUN, headers=headers, timeout=60).status_code)

    threads = [threading.Thread(target=create) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answered) <= {201, 409}
    assert 201 in answered
    assert runs(client) == 1


@pytest.mark.parametrize("changed", [False, True])
def test_what_failed_may_be_repeated_if_it_changed_nothing(
    client: httpx.Client, store: Store, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    """A bus may go away between the database and the answer."""
    add_run(store, "r", state="running")
    switch = requests.switch

    def half(*given: Any, **named: Any) -> None:
        if changed:
            switch(*given, **named)
        raise StoreUnavailableError("the database does not answer")

    with monkeypatch.context() as patched:
        patched.setattr(requests, "switch", half)
        failed = client.post(f"{V1}/runs/r/policy", json={"policy": "chronica"}, headers=keyed("a"))
        assert failed.status_code == 503
    again = client.post(f"{V1}/runs/r/policy", json={"policy": "chronica"}, headers=keyed("a"))
    assert again.status_code == (409 if changed else 202)
    assert ("check what it changed" in again.text) == changed
    assert switches(client) == 1


def test_the_database_does_not_have_what_was_answered(client: httpx.Client, store: Store) -> None:
    body = {"name": "ada", "scope": "operator"}
    made = client.post(f"{V1}/tokens", json=body, headers=keyed("a-key")).json()
    assert client.post(f"{V1}/tokens", json=body, headers=keyed("a-key")).json() == made
    with store.read() as connection:
        (row,) = connection.execute(sa.select(repeats)).mappings()
    assert made["token"].rpartition("_")[2] not in repr(dict(row))
    assert "a-key" not in repr(dict(row))


def test_answers_are_kept_for_a_day(client: httpx.Client, store: Store) -> None:
    assert client.post(f"{V1}/runs", json=RUN, headers=keyed("a")).status_code == 201
    with store.write() as connection:
        connection.execute(sa.update(repeats).values(at=time.time() - 86_401))
    assert client.post(f"{V1}/runs", json=RUN, headers=keyed("a")).status_code == 201
    assert runs(client) == 2
    with store.read() as connection:
        assert len(connection.execute(sa.select(repeats)).all()) == 1


@pytest.mark.parametrize("key", ["", "x" * 201, "é"])
def test_a_key_that_is_none_is_refused(client: httpx.Client, key: str) -> None:
    answer = client.post(f"{V1}/runs", json=RUN, headers={"Idempotency-Key": key.encode()})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "Idempotency-Key"
    assert runs(client) == 0


def test_a_request_that_is_released_meanwhile_may_begin(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres shows the release between two statements of one transaction."""
    assert repeats_store.begin(store, "a", "request") is None
    insert, calls = repeats_store.insert, []

    class Nothing:
        """An INSERT that meets the row of a request that is released right after it."""

        def values(self, _: Any) -> Nothing:
            return self

        def on_conflict_do_nothing(self) -> Any:
            return sa.delete(repeats).where(sa.false())

    def released(connection: Any, table: Any) -> Any:
        if calls:
            return insert(connection, table)
        calls.append(connection.execute(sa.delete(table)).rowcount)
        return Nothing()

    monkeypatch.setattr(repeats_store, "insert", released)
    assert repeats_store.begin(store, "a", "request") is None
    assert calls == [1]
    assert repeats_store.begin(store, "a", "request") == ("request", None)
