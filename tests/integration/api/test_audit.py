"""Changes over REST: each is kept with who asked, and none is overwritten unseen."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import redis
from starlette.requests import HTTPConnection

from paceline.wire import control
from paceline_backend.api import preconditions
from paceline_backend.api.identity import Identity
from paceline_backend.store import Store, switches
from support.records import add_run
from support.web import ANY

V1 = "/api/v1"
RUN = f"{V1}/runs/r"
CHANGES: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "policy", {"policy": "chronica"}),
    ("PUT", "auto", {"mode": "switch"}),
    ("POST", "stop", {}),
]


def named(request: HTTPConnection) -> Identity:
    """Who the header `X-Who` says: this test is not about tokens."""
    return Identity(request.headers.get("x-who", "nobody"), "operator", "10.0.0.7")


@pytest.fixture(autouse=True)
def _operators(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    monkeypatch.setattr(preconditions, "identity_of", named)
    add_run(store, "r", node="n1", state="running")


def change(
    client: httpx.Client, method: str, what: str, body: dict[str, Any], who: str, seen: str
) -> httpx.Response:
    headers = {"X-Who": who, "If-Match": seen}
    return client.request(method, f"{RUN}/{what}", json=body, headers=headers)


@pytest.mark.parametrize(
    ("first", "second"), list(zip(CHANGES, [*CHANGES[1:], CHANGES[0]], strict=True))
)
def test_the_second_operator_is_told_who_was_first(
    client: httpx.Client,
    store: Store,
    bus_url: str,
    first: tuple[str, str, dict[str, Any]],
    second: tuple[str, str, dict[str, Any]],
) -> None:
    seen = client.get(RUN).headers["etag"]
    assert seen == '"0"'
    assert change(client, *first, who="ada", seen=seen).is_success
    with redis.Redis.from_url(bus_url) as bus:
        published = bus.xlen(control("r"))
    before = (switches.rows(store, "r"), client.get(f"{RUN}/auto").json())
    refused = change(client, *second, who="bob", seen=seen)
    [row] = client.get(f"{RUN}/audit").json()["items"]
    assert refused.status_code == 412
    problem = refused.json()
    assert {name: problem[name] for name in ("who", "at", "action", "revision")} == {
        "who": "ada",
        "at": row["at"],
        "action": f"run.{first[1]}",
        "revision": 1,
    }
    assert f"changed by ada (run.{first[1]})" in problem["detail"]
    assert (switches.rows(store, "r"), client.get(f"{RUN}/auto").json()) == before
    with redis.Redis.from_url(bus_url) as bus:
        assert bus.xlen(control("r")) == published
    assert change(client, *second, who="bob", seen=client.get(RUN).headers["etag"]).is_success
    who = [item["who"] for item in client.get(f"{RUN}/audit").json()["items"]]
    assert who == ["bob", "ada"]


def test_what_is_no_etag_of_the_run_matches_nothing(client: httpx.Client) -> None:
    for seen in ('"1"', '"x"', 'W/"0"', "0", '""', f'"{"9" * 40}"', "nonsense"):
        refused = change(client, "POST", "policy", {"policy": "bsp"}, "ada", seen)
        assert refused.status_code == 412, seen
    assert client.get(RUN).json()["revision"] == 0


def test_the_log_says_who_when_from_where_and_why(client: httpx.Client) -> None:
    body = {
        "script": "train.py",
        "nproc": 2,
        "launch": False,
        "env": {"KEY": "s3cret"},
        "args": ["--password=s3cret"],
    }
    run = client.post(f"{V1}/runs", json=body, headers={"X-Who": "ada"}).json()["id"]
    path = f"{V1}/runs/{run}"
    asked = {"policy": "bsp", "parameters": {}, "by": "dashboard", "why": "compare"}
    client.post(f"{path}/policy", json=asked, headers={"X-Who": "bob", **ANY})
    client.put(f"{path}/auto", json={"mode": "off"}, headers={"X-Who": "bob", **ANY})
    client.post(f"{path}/stop", json={"why": "too hot"}, headers={"X-Who": "ada", **ANY})
    page = client.get(f"{V1}/audit", params={"run": run}).json()
    assert page["next_cursor"] is None
    rows = page["items"][::-1]
    assert [(row["action"], row["who"], row["revision"]) for row in rows] == [
        ("run.create", "ada", 0),
        ("run.policy", "bob", 1),
        ("run.auto", "bob", 2),
        ("run.stop", "ada", 3),
    ]
    assert {(row["scope"], row["address"], row["run"]) for row in rows} == {
        ("operator", "10.0.0.7", run)
    }
    assert [row["why"] for row in rows] == ["", "compare", "", "too hot"]
    assert (rows[1]["via"], rows[1]["details"]["policy"]) == ("dashboard", "bsp")
    assert "s3cret" not in str(page)
    assert [row["at"] for row in rows] == sorted(row["at"] for row in rows)
    shown = client.get(f"{path}/audit").json()["items"]
    assert [row["action"] for row in shown] == [row["action"] for row in rows[::-1]]
    assert not {"address", "scope"} & set(shown[0]), "every viewer may see a run's changes"


def test_the_log_is_filtered_and_paged(client: httpx.Client) -> None:
    for number in range(5):
        change(client, "PUT", "auto", {"mode": "off"}, "ada" if number % 2 else "bob", "*")
    query = {"who": "bob", "limit": "2"}
    first = client.get(f"{V1}/audit", params=query).json()
    rest = client.get(f"{V1}/audit", params={**query, "cursor": first["next_cursor"]}).json()
    assert [row["revision"] for row in [*first["items"], *rest["items"]]] == [5, 3, 1]
    assert rest["next_cursor"] is None
    since = first["items"][0]["at"]
    newest = client.get(f"{V1}/audit", params={"since": since}).json()["items"]
    assert [row["revision"] for row in newest] == [5]
    assert client.get(f"{V1}/audit", params={"action": "run.stop"}).json()["items"] == []
    of_run = client.get(f"{RUN}/audit", params={"limit": 1}).json()
    assert [row["revision"] for row in of_run["items"]] == [5]
    for path in (f"{V1}/audit", f"{RUN}/audit"):
        refused = client.get(path, params={"cursor": "!"})
        assert refused.status_code == 422
        assert refused.json()["errors"][0]["field"] == "cursor"
    assert client.get(f"{V1}/runs/none/audit").status_code == 404
