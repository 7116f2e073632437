"""Logs of runs over REST: real answers of nodes behind, a real HTTP client in front."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import redis
import sqlalchemy as sa
from redis.asyncio.client import Pipeline

from paceline import wire
from paceline.wire import Answer, Ask, State
from paceline.wire.asking import LogPart
from paceline.wire.codec import signed
from paceline.wire.sealing import seal_answer
from paceline_backend.api import logs
from paceline_backend.requests import asking, sessions
from paceline_backend.store import Store, nodes, schema, telemetry
from paceline_backend.store.nodes import run_nodes
from support import groups
from support.answering import Node, node
from support.records import add_run, hello
from support.waiting import until
from support.web import serving

RUN = "r"
LOGS = f"/api/v1/runs/{RUN}/logs"
Start = Callable[[str], Node]


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 3600.0)  # the machine may be busy,
    monkeypatch.setattr(asking, "ANSWER_S", 60.0)  # very busy
    monkeypatch.setattr(logs, "_SOON_S", 0.05)
    monkeypatch.setattr(logs, "_LATER_S", 0.1)


@pytest.fixture
def start(store: Store, bus_url: str, tmp_path: Path) -> Iterator[Start]:
    """Starts nodes that answer."""
    with ExitStack() as stack:
        yield lambda name: stack.enter_context(node(store, bus_url, name, tmp_path))


@pytest.fixture
def here(store: Store, start: Start) -> Node:
    """The only node of a run that trains."""
    add_run(store, RUN, node="here", state="running")
    made = start("here")
    made.run(RUN)
    return made


def read(client: httpx.Client, rank: int | str = 0, **query: Any) -> dict[str, Any]:
    answer = client.get(f"{LOGS}/{rank}", params=query)
    assert answer.status_code == 200, answer.text
    part: dict[str, Any] = answer.json()
    return part


def refused(client: httpx.Client, rank: int | str = 0, **query: Any) -> tuple[int, str]:
    answer = client.get(f"{LOGS}/{rank}", params=query)
    assert answer.is_error, answer.text
    return answer.status_code, answer.json()["detail"]


def set_state(store: Store, state: str) -> None:
    with store.write() as connection:
        connection.execute(sa.update(schema.runs).values(state=state))


def test_a_drivers_ranks_have_no_logs_and_no_stacks(
    client: httpx.Client, store: Store, here: Node
) -> None:
    with store.write() as connection:
        connection.execute(sa.update(schema.runs).values(env=["PACELINE_DRIVER"]))
    here.log(RUN, 0, "worker 1 begins\n")
    assert read(client, 0)["text"] == "worker 1 begins\n"
    for path in ("1", "1/stream"):
        status, why = refused(client, path)
        assert (status, "so only rank 0 has a log" in why) == (409, True), path
    answer = client.get(f"/api/v1/runs/{RUN}/stacks")
    assert answer.status_code == 409
    assert "for Ray workers, run `ray stack` on their machine" in answer.json()["detail"]


def test_a_part_says_where_it_is_from(client: httpx.Client, here: Node) -> None:
    here.log(RUN, 1, "loss 3\nloss 2\n", 0, "stderr")
    assert read(client, 1, output="stderr", offset=7) == {
        "run": RUN,
        "node": "here",
        "rank": 1,
        "output": "stderr",
        "attempt": 0,
        "offset": 7,
        "next": 14,
        "size": 14,
        "may_grow": True,
        "text": "loss 2\n",
    }
    assert read(client, 1, output="stderr", tail=1)["text"] == "loss 2\n"
    assert read(client, 1, output="stderr", offset=-4)["text"] == "s 2\n"


def test_the_logs_of_a_run_are_listed(client: httpx.Client, here: Node) -> None:
    for rank, attempt, output in [
        (10, 0, "stdout"),
        (9, 0, "stderr"),
        (9, 0, "stdout"),
        (0, 1, "stdout"),
    ]:
        here.log(RUN, rank, "x" * rank, attempt, output)
    (here.data / "runs" / RUN / "launcher.log").write_text("launched")
    here.run(RUN, attempt=1)
    listed = client.get(LOGS).json()
    assert (listed["run"], listed["state"]) == (RUN, "running")
    assert listed["nodes"] == [{"node": "here", "problem": None}]
    names = ("rank", "output", "attempt", "size", "may_grow")
    assert [tuple(log[name] for name in names) for log in listed["logs"]] == [
        (None, None, None, 8, True),
        (9, "stdout", 0, 9, False),
        (9, "stderr", 0, 9, False),
        (10, "stdout", 0, 10, False),
        (0, "stdout", 1, 0, True),
    ]
    later = client.get(LOGS, params={"from_attempt": 1}).json()["logs"]
    assert [log["attempt"] for log in later] == [None, 1]
    assert read(client, "launcher")["text"] == "launched"


def test_a_character_that_a_part_cuts_comes_with_the_next(client: httpx.Client, here: Node) -> None:
    text = "ab€😀é"
    here.log(RUN, 0, text)
    parts, offset = [], 0
    while offset < len(text.encode()):
        part = read(client, limit=4, offset=offset)
        assert part["offset"] == offset < part["next"]
        parts.append(part["text"])
        offset = part["next"]
    assert "".join(parts) == text
    assert "�" not in "".join(parts)


def test_what_is_no_text_is_replaced(client: httpx.Client, here: Node) -> None:
    here.log(RUN, 0, b"a\xffb\x00\xe2\x82")  # the last is the beginning of a character
    part = read(client)
    assert (part["text"], part["next"], part["size"]) == ("a�b\0", 4, 6)
    here.run(RUN, state=State.FAILED)  # so nothing comes after it
    part = read(client)
    assert (part["text"], part["next"]) == ("a�b\0�", 6)


def test_what_is_wrong_with_a_question_is_said(client: httpx.Client, here: Node) -> None:
    here.log(RUN, 0, "x")
    for rank in ("x", "-1", "0x1", "../launcher", "launcher.log", "1" * 10):
        status, _ = refused(client, rank)
        assert status in (404, 422), rank
    assert refused(client, tail=1, offset=2) == (422, "offset: give tail or offset, not both")
    assert refused(client, node="there") == (
        422,
        "node: there is not a node of the run; its nodes: here",
    )
    assert refused(client, 3)[0] == 404
    assert refused(client, attempt=1) == (404, "node here: it has no logs/attempt_1/0/stdout.log")
    assert client.get("/api/v1/runs/none/logs").status_code == 404
    assert client.get("/api/v1/runs/none/logs/0").status_code == 404


def test_a_run_that_no_node_has_begun_has_no_logs(client: httpx.Client, store: Store) -> None:
    add_run(store, RUN)
    assert client.get(LOGS).json() == {"run": RUN, "state": "pending", "nodes": [], "logs": []}
    status, words = refused(client)
    assert (status, words) == (404, f"run {RUN} has no logs: no node has started it")


def test_a_run_of_another_control_plane_is_not_shown(client: httpx.Client, here: Node) -> None:
    """An agent may have looked after runs of several; a run's id says nothing about that."""
    here.log(RUN, 0, "secret")
    here.control = "another"
    here.run(RUN)
    assert refused(client) == (404, f"node here: it has no directory for run {RUN}")


def test_a_node_without_an_agent_is_named(client: httpx.Client, store: Store) -> None:
    """Such as one that only knows `paceline run`."""
    add_run(store, RUN, node="desk")
    status, words = refused(client)
    assert (status, words.startswith("no agent answers on node desk")) == (409, True)
    assert client.get(LOGS).status_code == 409
    groups.answer(store, "desk", signed=False)
    status, words = refused(client)
    assert (status, "agent of node desk has no session" in words) == (409, True)


def test_a_node_that_does_not_answer_is_named(
    client: httpx.Client, here: Node, bus: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "ANSWER_S", 0.3)
    here.deaf = True
    for answer in (client.get(LOGS), client.get(f"{LOGS}/0"), client.get(f"{LOGS}/0/stream")):
        assert answer.status_code == 504
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["detail"].startswith("node here did not answer within 0.3 s")
    assert_tidy(bus)


def test_a_client_of_the_bus_that_forgets_a_cancellation_holds_up_nobody(
    client: httpx.Client, here: Node, bus: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11's `asyncio.wait_for`, with which redis-py writes, does at times."""
    execute = Pipeline.execute

    async def later(pipeline: Pipeline) -> Any:
        await asyncio.sleep(0.1)  # a third of the time is gone before the answer is waited for
        return await execute(pipeline)

    async def forget(*_: object, **__: object) -> list[object]:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)
        return []

    monkeypatch.setattr(asking, "ANSWER_S", 0.3)
    monkeypatch.setattr(Pipeline, "execute", later)
    monkeypatch.setattr(redis.asyncio.Redis, "xread", forget)
    assert client.get(LOGS).status_code == 504
    assert_tidy(bus)


def assert_tidy(bus: redis.Redis) -> None:
    """Nothing is left of questions and answers: launches must not be pushed out."""
    assert list(bus.scan_iter(match="*:answer:*")) == []
    assert bus.xlen(wire.commands("here")) == 0


def test_nothing_is_left_of_a_question(client: httpx.Client, here: Node, bus: redis.Redis) -> None:
    here.log(RUN, 0, "secret-4711")
    assert read(client)["text"] == "secret-4711"
    assert len(here.asked) == 1
    assert_tidy(bus)


def test_an_answer_that_comes_late_is_kept_nowhere(
    client: httpx.Client, here: Node, store: Store, bus: redis.Redis
) -> None:
    here.log(RUN, 0, "x")
    read(client)
    place = wire.answers("here", here.asked[0].id)
    replayed = signed(
        wire.encode(here.asked[0], RUN),
        wire.commands("here"),
        sessions.keys(store, ["here"]).of_node("here"),
    )
    bus.xadd(wire.commands("here"), replayed)  # type: ignore[arg-type]
    read(client)  # asked after it
    assert len(here.asked) == 3
    assert not bus.exists(place)


def lies(ask: Ask, key: bytes) -> Iterator[dict[bytes, bytes]]:
    """What somebody may write who reaches the bus, and perhaps has another node's key."""
    place, other = wire.answers("here", ask.id), b"x" * 32
    lie = msgspec.msgpack.encode(LogPart(0, 0, b"a lie", 5, False))
    whole = wire.encode(Answer(seal_answer(lie, key)), RUN)
    yield whole
    yield signed(whole, place, other)
    yield signed(whole, wire.answers("here", "0" * 32), key)
    yield signed(wire.encode(Answer(seal_answer(lie, other)), RUN), place, key)
    yield signed(wire.encode(Answer(seal_answer(b"no reply", key)), RUN), place, key)
    yield signed(wire.encode(ask, RUN), place, key)
    yield {b"v": b"1", b"data": b"\xc1"}


def test_only_the_node_can_answer(
    client: httpx.Client,
    here: Node,
    store: Store,
    bus: redis.Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a bus without access rights everybody could: so each answer has a MAC."""
    key = sessions.keys(store, ["here"]).of_node("here")
    here.log(RUN, 0, "the truth")
    here.before = lambda ask: [
        bus.xadd(wire.answers("here", ask.id), lie)  # type: ignore[arg-type]
        for lie in lies(ask, key)
    ]
    assert read(client)["text"] == "the truth"
    assert "an answer that its node did not write is ignored" in caplog.text


def test_an_answer_with_the_right_mac_would_do(
    client: httpx.Client, here: Node, store: Store, bus: redis.Redis
) -> None:
    """So the test above fails if MACs are not looked at."""
    key = sessions.keys(store, ["here"]).of_node("here")

    def answer(ask: Ask) -> None:
        place = wire.answers("here", ask.id)
        lie = msgspec.msgpack.encode(LogPart(0, 0, b"a lie", 5, False))
        entry = signed(wire.encode(Answer(seal_answer(lie, key)), RUN), place, key)
        bus.xadd(place, entry)  # type: ignore[arg-type]

    here.before = answer
    assert read(client)["text"] == "a lie"


def test_the_bus_never_has_a_log_in_clear_text(
    client: httpx.Client, here: Node, bus: redis.Redis
) -> None:
    """The bus may keep it on its disk, and may have no access rights."""
    here.log(RUN, 0, "sesame-4711 " * 100)
    with bus.monitor() as monitor:
        read(client)
        seen = []
        while "unlink" not in (line := str(next(monitor.listen())["command"])).lower():
            seen.append(line)
    assert any(":answer:" in line for line in seen)
    assert not any("sesame" in line for line in seen)


@pytest.fixture
def three(store: Store, start: Start) -> dict[str, Node]:
    """The nodes of a run on several, that has come to its second attempt."""
    key = add_run(store, RUN, node="n1", state="running", nproc=1, nodes_min=1, nodes_max=3)
    with store.write() as connection:
        run_nodes.launch(connection, key, ["n1", "n2", "n3"], 0)
    made = {name: start(name) for name in ("n1", "n2", "n3")}
    for name in ("n3", "n1", "n2"):
        groups.report(store, RUN, name, State.RUNNING, 1)
        made[name].run(RUN, attempt=1)
    telemetry.write(store, [(RUN, hello(3, 1, placement=["n3", "n1", "n2"]))])
    for rank, name in enumerate(("n3", "n1", "n2")):
        made[name].log(RUN, rank, f"rank {rank} on {name}", 1)
        made[name].log(RUN, (rank + 1) % 3, f"rank {(rank + 1) % 3} was on {name}", 0)
    return made


def asked(three: dict[str, Node]) -> dict[str, int]:
    return {name: len(made.asked) for name, made in three.items()}


def test_only_the_ranks_node_is_asked(client: httpx.Client, three: dict[str, Node]) -> None:
    for rank, name in enumerate(("n3", "n1", "n2")):
        for query in ({}, {"attempt": 1}):
            part = read(client, rank, **query)
            assert (part["node"], part["attempt"]) == (name, 1)
            assert part["text"] == f"rank {rank} on {name}"
    assert asked(three) == {"n1": 2, "n2": 2, "n3": 2}


def test_logs_of_earlier_attempts_are_searched(
    client: httpx.Client, three: dict[str, Node]
) -> None:
    """Where ranks were then is not stored."""
    part = read(client, 1, attempt=0)
    assert (part["node"], part["text"]) == ("n3", "rank 1 was on n3")
    assert asked(three) == {"n1": 1, "n2": 1, "n3": 1}
    assert read(client, 1, attempt=0, node="n3")["node"] == "n3"
    status, words = refused(client, 1, attempt=0, node="n1")
    assert (status, "node n1: " in words) == (404, True)


def test_an_attempt_that_has_begun_and_not_said_where_its_ranks_are(
    client: httpx.Client, store: Store, three: dict[str, Node]
) -> None:
    """For example because its scripts fail at an import."""
    groups.report(store, RUN, "n2", State.RUNNING, 2)
    three["n2"].log(RUN, 0, "ImportError", 2)
    assert (read(client, 0)["attempt"], read(client, 0)["text"]) == (2, "ImportError")


def test_each_node_has_a_launcher_with_a_log(client: httpx.Client, three: dict[str, Node]) -> None:
    assert refused(client, "launcher") == (
        422,
        "node: each node has a launcher's log: give one of n1, n2, n3",
    )
    for name, made in three.items():
        (made.data / "runs" / RUN / "launcher.log").write_text(f"on {name}")
        assert read(client, "launcher", node=name)["text"] == f"on {name}"


def test_a_node_that_is_away_hides_its_own_logs_only(
    client: httpx.Client, store: Store, three: dict[str, Node]
) -> None:
    groups.answer(store, "n2", left=True)
    listed = client.get(LOGS).json()
    problems = {each["node"]: each["problem"] for each in listed["nodes"]}
    assert problems["n1"] is problems["n3"] is None
    assert problems["n2"].startswith("no agent answers on node n2")
    assert {log["node"] for log in listed["logs"]} == {"n1", "n3"}
    assert refused(client, 2)[0] == 409
    assert read(client, 0)["node"] == "n3"
    assert refused(client, 7, attempt=0)[0] == 409, "the node that is away may have it"


class Events:
    """Events of a log, read one by one."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.position = ""
        self._lines = response.iter_lines()

    def __next__(self) -> dict[str, Any]:
        for line in self._lines:
            if line.startswith("id: "):
                self.position = line[4:]
            if line.startswith("data: "):
                event: dict[str, Any] = json.loads(line[6:])
                return event
        raise StopIteration

    def __iter__(self) -> Events:
        return self


def follow(
    stack: ExitStack, client: httpx.Client, rank: int, position: str = "", **query: Any
) -> Events:
    headers = {"Last-Event-ID": position} if position else {}
    path = f"{LOGS}/{rank}/stream"
    streaming = client.stream("GET", path, params=query, headers=headers, timeout=170)
    return Events(stack.enter_context(streaming))


def test_a_log_is_followed_over_attempts_to_the_runs_end(
    client: httpx.Client, here: Node, store: Store
) -> None:
    here.log(RUN, 0, "one\ntwo\nthree\n")
    with ExitStack() as stack:
        events = follow(stack, client, 0, tail=2)
        first = next(events)
        assert (first["type"], first["text"], first["next"]) == ("text", "two\nthree\n", 14)
        assert events.position == "0-14"
        here.log(RUN, 0, "four\n")
        assert next(events)["text"] == "four\n"
        here.run(RUN, attempt=2)
        here.log(RUN, 0, "again\n", 2)
        again = next(events)
        assert (again["attempt"], again["offset"], again["text"]) == (2, 0, "again\n")
        here.run(RUN, attempt=2, state=State.FINISHED)
        here.log(RUN, 0, "last\n", 2)
        assert next(events)["text"] == "last\n"
        set_state(store, "finished")
        assert list(events) == []
        assert events.position == "2-11"


def test_who_comes_back_goes_on_where_it_was(
    client: httpx.Client, here: Node, store: Store
) -> None:
    here.log(RUN, 0, "zero\n")
    here.log(RUN, 0, "one\n", 1)
    here.run(RUN, attempt=1, state=State.FINISHED)
    set_state(store, "finished")
    with ExitStack() as stack:
        events = follow(stack, client, 0, "0-2")
        assert [event["text"] for event in events] == ["ro\n", "one\n"]
        assert [event["text"] for event in follow(stack, client, 0, "1-3", tail=9)] == ["\n"]
        assert follow(stack, client, 0, events.position).status == 204


def test_a_log_that_is_not_there_yet_is_waited_for(
    client: httpx.Client, here: Node, store: Store
) -> None:
    with ExitStack() as stack:
        events = follow(stack, client, 5)
        assert events.status == 200
        here.log(RUN, 5, "here\n")
        assert next(events)["text"] == "here\n"
    here.run(RUN, state=State.FAILED)
    set_state(store, "failed")
    assert client.get(f"{LOGS}/6/stream").status_code == 404


def test_a_log_that_another_took_the_place_of_is_read_from_its_beginning(
    client: httpx.Client, here: Node
) -> None:
    here.log(RUN, 0, "a rendezvous that failed\n")
    with ExitStack() as stack:
        events = follow(stack, client, 0)
        assert next(events)["next"] == 25
        here.path(RUN, 0).write_text("anew\n")
        anew = next(events)
        assert (anew["offset"], anew["text"]) == (0, "anew\n")


def test_a_node_that_goes_away_is_told_once(
    client: httpx.Client, here: Node, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.log(RUN, 0, "one\n")
    with ExitStack() as stack:
        events = follow(stack, client, 0)
        assert next(events)["text"] == "one\n"
        with monkeypatch.context() as hurry:
            hurry.setattr(asking, "ANSWER_S", 0.3)
            here.deaf = True
            assert next(events)["type"] == "problem"
            before = len(here.asked)
            until(lambda: len(here.asked) > before + 3, "further questions")
        here.log(RUN, 0, "two\n")
        here.deaf = False
        assert next(events)["text"] == "two\n"
        groups.answer(store, "here", left=True)
        set_state(store, "failed")
        assert [event["type"] for event in events] == ["problem"]


def test_streams_of_logs_count_as_the_clients_streams(
    store: Store, bus_url: str, tmp_path: Path
) -> None:
    add_run(store, RUN, node="here", state="running")
    with (
        node(store, bus_url, "here", tmp_path) as here,
        serving(store, bus_url, max_streams=1) as client,
        ExitStack() as stack,
    ):
        here.run(RUN)
        here.log(RUN, 0, "x")
        first = follow(stack, client, 0)
        next(first)
        second = stack.enter_context(client.stream("GET", f"{LOGS}/0/stream"))
        assert (second.status_code, second.headers["retry-after"]) == (429, "5")


def test_many_questions_at_once_are_all_answered(client: httpx.Client, here: Node) -> None:
    for rank in range(100):
        here.log(RUN, rank, f"rank {rank}")
    with ThreadPoolExecutor(20) as pool:
        parts = list(pool.map(lambda rank: read(client, rank), range(100)))
    assert [part["text"] for part in parts] == [f"rank {rank}" for rank in range(100)]
