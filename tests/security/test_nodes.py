"""Tokens of runs and nodes try to take other nodes; nodes whose token was revoked stay out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import redis
import sqlalchemy as sa

from paceline.wire import Launch, State, commands
from paceline.wire.bus import connect
from paceline.wire.codec import ForgedError, decode_signed
from paceline.wire.sealing import SealError, unseal
from paceline_backend.control.bus_users import UserReconciler
from paceline_backend.control.writers import Writers
from paceline_backend.requests import ConflictError, sessions
from paceline_backend.server import users
from paceline_backend.server.keys import Keys
from paceline_backend.store import Store, meta, nodes, schema, tokens
from support.command_line import in_process
from support.groups import answer, orders, report
from support.web import ANY, serving

BODY = {
    **{"key": "k", "script": "/shared/train.py", "nproc": 1},
    **{"nodes_min": 1, "nodes_max": 1, "policy": "bsp"},
}


@pytest.fixture
def store(database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 3600)  # the machine may be busy
    with Store.open(database_url) as opened:
        yield opened


@pytest.fixture
def client(store: Store, bus_url: str) -> Iterator[httpx.Client]:
    with serving(store, bus_url) as made:
        made.headers.update(ANY)
        made.base_url = httpx.URL(f"{made.base_url}/api/v1/")
        yield made


@pytest.fixture
def bus(bus_url: str) -> Iterator[redis.Redis]:
    with connect(bus_url) as opened:
        yield opened


def token(
    client: httpx.Client, /, scope: str = "agent", **fields: Any
) -> tuple[str, dict[str, str]]:
    """A token's id, and the header that shows it."""
    made = client.post("tokens", json={"name": "t", "scope": scope, **fields}).json()
    return made["id"], bearer(made["token"])


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


def adopt(client: httpx.Client, **fields: Any) -> tuple[str, dict[str, str]]:
    """A run of somebody's own nodes, and the header of its token."""
    made = client.post("adoptions", json=BODY | fields).json()
    return made["run"], bearer(made["token"])


def session(client: httpx.Client, node: str, headers: dict[str, str]) -> httpx.Response:
    return client.post(f"nodes/{node}/session", headers=headers)


def join(client: httpx.Client, run: str, node: str, headers: dict[str, str]) -> httpx.Response:
    return client.post(f"runs/{run}/nodes/{node}/join", headers=headers)


def fleet(client: httpx.Client, store: Store, name: str, /, **fields: Any) -> dict[str, Any]:
    """A node of the fleet that answers; its session, with the token's id and header."""
    identity, headers = token(client, **fields)
    made = session(client, name, headers)
    assert made.status_code == 200, made.text
    answer(store, name, signed=False)
    return {**made.json(), "token": identity, "headers": headers}


def only_run(store: Store, node: str) -> str | None:
    with store.read() as connection:
        query = sa.select(schema.nodes.c.only_run).where(schema.nodes.c.id == node)
        return connection.execute(query).scalar()


def start(client: httpx.Client, node: str | None = None, **fields: Any) -> httpx.Response:
    body = {"script": "/x.py", "nproc": 1, "node": node, "env": {"WORD": "open-sesame"}}
    return client.post("runs", json=body | fields)


def opened(bus: redis.Redis, given: dict[str, Any], node: str) -> int:
    """How many launches of a node a session's key opens."""
    key, count = bytes.fromhex(given["key"]), 0
    for _, fields in bus.xrange(commands(node)):
        try:
            _, message = decode_signed(fields, commands(node), key)
            assert isinstance(message, Launch)
            unseal(message.sealed, key)
            count += 1
        except (ForgedError, SealError):
            pass
    return count


def works(given: dict[str, Any]) -> bool:
    """Whether a session's user reaches the bus."""
    try:
        with connect(given["bus"]) as opened:
            return bool(opened.ping())
    except redis.RedisError:
        return False


@pytest.mark.parametrize("signed", [True, False])
def test_a_runs_token_takes_no_node_of_the_fleet(
    client: httpx.Client, store: Store, bus: redis.Redis, signed: bool
) -> None:
    """With a session or without; before the run has ended and after."""
    if signed:
        fleet(client, store, "n1")
    else:
        answer(store, "n1", signed=False)
    for key in ("first", "second"):
        run, own = adopt(client, key=key)
        assert session(client, "n1", own).status_code == 409
        assert join(client, run, "n1", own).status_code == 409
        assert only_run(store, "n1") is None
        client.post(f"runs/{run}/stop", json={})
        assert join(client, run, "n1", own).status_code == 409
    assert orders(bus, "n1") == []
    assert start(client, "n1").status_code == 201, "the fleet has it still"


def test_a_runs_token_takes_names_of_its_run_only(client: httpx.Client, store: Store) -> None:
    """So it reserves none that others want, whether they come before or after."""
    run, own = adopt(client)
    other, theirs = adopt(client, key="other")
    _, named = token(client, node="named")
    for name in ("named", "later", f"gpu7-1001.0.{other}", run, f"gpu7{run}"):
        refused = session(client, name, own)
        assert (refused.status_code, f"NAME.{run}" in refused.json()["detail"]) == (409, True)
    fleet(client, store, "later")
    assert session(client, "named", named).status_code == 200
    assert session(client, f"gpu7-1001.0.{other}", theirs).status_code == 200


def test_a_name_of_a_run_stays_whose_it_is(client: httpx.Client, store: Store) -> None:
    run, own = adopt(client)
    _, agent = token(client)
    for node in (f"a.{run}", f"b.{run}"):
        assert session(client, node, own).status_code == 200
        answer(store, node, signed=False)
    assert join(client, run, f"a.{run}", own).json()["needed"]
    assert not join(client, run, f"b.{run}", own).json()["needed"]
    for node in (f"a.{run}", f"b.{run}"):
        assert session(client, node, agent).status_code == 409
        assert only_run(store, node) == run
    fleet(client, store, f"c.{run}")
    assert session(client, f"c.{run}", own).status_code == 409


def test_a_runs_nodes_end_with_the_run(client: httpx.Client, store: Store) -> None:
    run, own = adopt(client)
    first = session(client, f"n1.{run}", own).json()
    answer(store, f"n1.{run}", signed=False)
    assert join(client, run, f"n1.{run}", own).json()["needed"]
    assert works(first)
    report(store, run, f"n1.{run}", State.FINISHED, exit_code=0)
    assert not join(client, run, f"n1.{run}", own).json()["needed"]
    with store.write() as connection:
        tokens.revoke_of_run(connection, run)
    assert session(client, f"n1.{run}", own).status_code == 401


def test_a_session_is_of_the_admission_that_was_asked_for(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens to the node between that transaction and the answer."""
    write, seeds = Store.write, list[str]()

    @contextmanager
    def and_another(self: Store) -> Iterator[sa.Connection]:
        with write(self) as connection:
            yield connection
        if not seeds:
            with write(self) as connection:
                seeds.extend(connection.execute(sa.select(schema.nodes.c.seed)).scalars())
                connection.execute(sa.update(schema.nodes).values(seed="of another"))

    monkeypatch.setattr(Store, "write", and_another)
    given = sessions.of_node(store, bus_url, "n1")
    assert given.key == Keys(meta.secret(store), {"n1": seeds[0]}).of_node("n1")


def test_a_token_that_has_ended_meanwhile_admits_nobody(store: Store, bus_url: str) -> None:
    with pytest.raises(ConflictError, match="its token is no longer valid"):
        sessions.of_node(store, bus_url, "n1", "revoked")
    with store.read() as connection:
        assert nodes.registered(connection, ["n1"]) == set()


def test_a_nodes_token_takes_no_run_of_others(
    client: httpx.Client, store: Store, bus: redis.Redis
) -> None:
    run, own = adopt(client)
    for fields in ({"node": "m1"}, {}):
        given = fleet(client, store, "m1", **fields)
        refused = join(client, run, "m1", given["headers"])
        assert refused.status_code == 409
        assert "`paceline node`" in refused.json()["detail"]
    _, admin = token(client, "admin")
    assert join(client, run, "m1", admin).status_code == 409
    assert orders(bus, "m1") == []
    mine = f"mine.{run}"
    assert session(client, mine, own).status_code == 200
    answer(store, mine, signed=False)
    assert join(client, run, mine, own).json()["needed"]
    assert session(client, mine, given["headers"]).status_code == 409


def test_a_revoked_node_is_out(
    client: httpx.Client, store: Store, bus: redis.Redis, bus_url: str
) -> None:
    given = fleet(client, store, "n1", node="n1")
    assert start(client, "n1").status_code == 201
    assert opened(bus, given, "n1") == 1
    with connect(given["bus"]) as thief:
        assert thief.ping()
        keeper = UserReconciler(store, bus_url)
        keeper.keep(bus)
        client.delete(f"tokens/{given['token']}").raise_for_status()
        with pytest.raises(redis.RedisError):
            thief.ping()
    assert not works(given)
    keeper.keep(bus)
    assert not works(given), "a worker does not let it back"
    assert session(client, "n1", given["headers"]).status_code == 401
    for node in ("n1", None):
        assert start(client, node).status_code == 409
    answer(store, "n1", signed=False)  # what was on its stream
    assert start(client, "n1").status_code == 409
    assert opened(bus, given, "n1") == 1
    assert commands("n1") not in Writers(store).streams()
    [row] = client.get("nodes").json()
    assert (row["alive"], row["revoked"]) == (False, True)
    again = fleet(client, store, "n1", node="n1")
    assert again["key"] != given["key"]
    assert start(client, "n1").status_code == 201
    assert (opened(bus, given, "n1"), opened(bus, again, "n1")) == (1, 1)
    assert (works(given), works(again)) == (False, True)


def test_a_token_that_expires_ends_its_nodes(
    client: httpx.Client, store: Store, bus: redis.Redis, bus_url: str
) -> None:
    given = fleet(client, store, "n1")
    keeper = UserReconciler(store, bus_url)
    keeper.keep(bus)
    with store.write() as connection:
        mine = schema.tokens.c.id == given["token"]
        connection.execute(sa.update(schema.tokens).where(mine).values(expires_at=1.0))
    keeper.keep(bus)
    assert not works(given)
    assert start(client, "n1").status_code == 409


def test_a_token_revoked_while_its_node_has_another_ends_nothing(
    client: httpx.Client, store: Store
) -> None:
    """So tokens can be replaced: the agent asks for a session with the new one first."""
    first = fleet(client, store, "n1")
    second = fleet(client, store, "n1")
    client.delete(f"tokens/{first['token']}").raise_for_status()
    assert first["key"] != second["key"]
    assert (works(first), works(second)) == (False, True)
    assert start(client, "n1").status_code == 201


def test_a_token_that_the_configuration_no_longer_has_ends_its_nodes(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    before, after = "agents-of-before-0123456789", "agents-of-after-0123456789"
    with serving(store, bus_url, agent_token=before) as client:
        given = client.post("api/v1/nodes/n1/session", headers=bearer(before)).json()
    with serving(store, bus_url, agent_token=before):
        assert works(given)
    with serving(store, bus_url, agent_token=after):
        UserReconciler(store, bus_url).keep(bus)
        assert not works(given)


def test_a_node_is_forgotten(client: httpx.Client, store: Store, bus: redis.Redis) -> None:
    given = fleet(client, store, "n1")
    refused = client.delete("nodes/n1")
    assert refused.status_code == 409
    assert "revoke" in refused.json()["detail"]
    answer(store, "n1", signed=False, left=True)
    _, operator = token(client, "operator")
    assert client.delete("nodes/n1", headers=operator).status_code == 403
    assert client.delete("nodes/n1?why=sold").json()["id"] == "n1"
    assert client.get("nodes").json() == []
    assert not works(given)
    assert client.delete("nodes/n1").status_code == 404
    row = client.get("audit").json()["items"][0]
    assert (row["action"], row["target"], row["why"]) == ("node.forget", "n1", "sold")
    again = session(client, "n1", given["headers"]).json()
    assert again["key"] != given["key"], "its token is valid, and its key is another"


def test_a_node_with_a_run_is_not_forgotten(client: httpx.Client, store: Store) -> None:
    given = fleet(client, store, "n1")
    run = start(client, "n1").json()["id"]
    client.delete(f"tokens/{given['token']}").raise_for_status()
    refused = client.delete("nodes/n1")
    assert (refused.status_code, run in refused.json()["detail"]) == (409, True)


def test_users_whose_password_changes_lose_their_connections(
    store: Store, bus: redis.Redis, bus_url: str, client: httpx.Client
) -> None:
    given = fleet(client, store, "n1")
    with connect(given["bus"]) as thief:
        assert thief.ping()
        with store.read() as connection:
            row = connection.execute(sa.select(schema.nodes.c.id)).scalar_one()
        user = users.User(f"paceline-node-{row}", "another", (), commands("n1"))
        assert users.make(bus, [user]) is None
        with pytest.raises(redis.RedisError):
            thief.ping()


def test_the_secret_is_rotated(
    client: httpx.Client,
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whoever has read it has nothing that counts; agents go on with the tokens that they have."""
    main = in_process(monkeypatch, capsys)
    command = "db", "rotate-secret", "--database", store.url.render_as_string(hide_password=False)
    own, given = tokens.embedded(store), fleet(client, store, "n1")
    run, of_run = adopt(client)
    webhook = sessions.keys(store).of_webhook("w")
    UserReconciler(store, bus_url).keep(bus)
    code, _, err = main(*command)
    assert (
        code,
        f"1 runs are active and would lose their connection to the server ({run})" in err,
    ) == (3, True)
    assert works(given)
    with connect(given["bus"]) as thief:
        assert thief.ping()
        assert main(*command, "--yes")[0] == 0
        with serving(store, bus_url) as again:  # the server starts again
            again.base_url = httpx.URL(f"{again.base_url}/api/v1/")
            UserReconciler(store, bus_url).keep(bus)
            with pytest.raises(redis.RedisError):
                thief.ping()
            assert not works(given)
            assert tokens.embedded(store).id != own.id
            for old in (bearer(str(own)), of_run):
                assert again.get("version", headers=old).status_code == 401
            renewed = session(again, "n1", given["headers"]).json()
            assert renewed["key"] != given["key"]
            assert works(renewed)
            assert start(again, "n1").status_code == 201
            assert (opened(bus, given, "n1"), opened(bus, renewed, "n1")) == (0, 1)
            actions = [row["action"] for row in again.get("audit").json()["items"]]
            assert "secret.rotate" in actions
    assert sessions.keys(store).of_webhook("w") != webhook
