"""A thief has PACELINE_BUS, PACELINE_KEY and PACELINE_SPOOL of a run, as its script has."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError, ResponseError
from redis.retry import Retry

from paceline import wire
from paceline.core.errors import PacelineError
from paceline.node.spool import Spool
from paceline.wire.asking import ListLogs, LogPart
from paceline.wire.codec import signed
from paceline.wire.sealing import seal_answer
from paceline_backend.server.floods import Bounds
from support.bus_tries import CASES
from support.poison import fields
from support.records import hello, record
from support.strangers import Field, processes
from support.waiting import DEADLINE_S, until

pytestmark = pytest.mark.ranks


def node_of(field: Field) -> str:
    return str(field.run(field.mine)["node"])


def words(field: Field, tried: str) -> list[str]:
    mine, theirs, node = field.mine, field.theirs, node_of(field)
    names = {
        "T": wire.run_telemetry(mine),
        "C": wire.control(mine),
        "L": wire.live(mine),
        "T2": wire.run_telemetry(theirs),
        "C2": wire.control(theirs),
        "L2": wire.live(theirs),
        "N": wire.commands(node),
        "M": wire.node_telemetry(node),
        "A": wire.answers(node, "0" * 32),
        "U": urlsplit(field.stolen["PACELINE_BUS"]).username or "",
        "V": f"paceline-run-{theirs}",
    }
    return [names.get(word, word) for word in tried.split()]


def test_what_the_thief_may(field: Field) -> None:
    """Its URL works: so what is refused is refused on purpose."""
    with field.thief() as thief:
        assert thief.ping()
        thief.xread({wire.control(field.mine): 0}, count=1)
        before = field.rejected()
        thief.xadd(wire.run_telemetry(field.mine), {"v": "1"})
    until(lambda: field.rejected() > before, "its message to be rejected")


@pytest.mark.parametrize("tried", CASES)
def test_the_bus_refuses(field: Field, tried: str) -> None:
    with redis.Redis.from_url(field.stolen["PACELINE_BUS"], socket_timeout=DEADLINE_S) as thief:
        with pytest.raises(ResponseError) as refused:
            thief.execute_command(*words(field, tried))
        said = str(refused.value).lower()
        ways = ("noperm", "unknown command", "not allowed")
        assert isinstance(refused.value, NoPermissionError) or any(w in said for w in ways), said


def test_other_users_stay_closed(field: Field) -> None:
    url = urlsplit(field.stolen["PACELINE_BUS"])
    passwords = [url.password or "", field.stolen["PACELINE_KEY"], "", field.mine]
    users = ["default", f"paceline-run-{field.theirs}", f"paceline-node-{node_of(field)}"]
    for user in users:
        for password in passwords:
            client = redis.Redis(
                host=str(url.hostname),
                port=url.port or 0,
                username=user,
                password=password,
                retry=Retry(NoBackoff(), 0),
            )
            with client, pytest.raises(AuthenticationError):
                client.ping()


def test_a_huge_value_harms_nobody(field: Field) -> None:
    before = field.rejected()
    with field.thief() as thief:
        for _ in range(3):
            thief.xadd(wire.run_telemetry(field.mine), fields(os.urandom(20 << 20)))
    until(lambda: field.rejected() >= before + 3, "the huge values to be rejected")
    field.goes_on(field.theirs)


def macs(field: Field, stream: str, entry: dict[bytes, bytes], wrong: bytes) -> list[bytes | None]:
    """MACs that are not the control plane's."""
    with field.owner() as bus:
        genuine = [e.get(b"mac", b"") for _, e in bus.xrevrange(stream, count=3)]
    other = signed(entry, wire.control("another"), wrong)[b"mac"]
    mine = signed(entry, stream, wrong)[b"mac"]
    plain = signed(entry, stream, b"")[b"mac"]
    return [None, b"", b"\0" * 32, mine, other, plain, mine.hex().encode(), mine[:16], *genuine]


def forged(field: Field, run: str, key: bytes | None) -> list[str]:
    """Offers 100 plans of another policy to a run; the policies that it has followed since.

    Args:
        field: of the attack.
        run: that is attacked.
        key: to sign with; None: MACs that are wrong in many ways.
    """
    stream = wire.control(run)
    wrong = bytes.fromhex(field.stolen["PACELINE_KEY"] if run == field.theirs else "ab" * 32)
    since = field.planned(run)
    sent = 0
    with field.owner() as bus:
        while sent < 100:
            [(_, genuine)] = bus.xrevrange(stream, count=1)
            _, message = wire.decode(genuine)
            assert isinstance(message, wire.Proposal)
            for ahead in range(2):
                segment = msgspec.structs.replace(
                    message.segment, policy="forged", seq=message.segment.seq + ahead
                )
                entry = wire.encode(wire.Proposal(message.attempt, segment, "thief"), run)
                if key is not None:
                    bus.xadd(stream, signed(entry, stream, key))
                    sent += 1
                    continue
                for mac in macs(field, stream, entry, wrong):
                    bus.xadd(stream, entry if mac is None else {**entry, b"mac": mac})
                    sent += 1
            field.goes_on(run, 1)
    field.goes_on(run)
    rows = field.stack.api("GET", f"/runs/{run}/segments?limit=300")
    return [row["policy"] for row in rows if row["seq"] > since]


@pytest.mark.parametrize("whose", ["theirs", "mine"])
def test_a_forged_plan_is_not_followed(field: Field, whose: str) -> None:
    """By somebody who could write to the streams: on a bus without access rights, all can."""
    assert "forged" not in forged(field, getattr(field, whose), None)


def test_a_plan_with_the_right_mac_would_be(field: Field) -> None:
    """So the test above fails if MACs are not looked at."""
    stolen = json.loads((field.folder / "mine.json").read_text())
    assert "forged" in forged(field, field.mine, bytes.fromhex(stolen["PACELINE_KEY"]))


@pytest.mark.parametrize("message", [wire.StopTraining("thief", 0), wire.Kill("thief", 0)])
def test_a_forged_stop_is_not_obeyed(field: Field, message: wire.Message) -> None:
    node = node_of(field)
    with field.owner() as bus:
        for run in (field.theirs, field.mine):
            wrong = bytes.fromhex(
                field.stolen["PACELINE_KEY"] if run == field.theirs else "ab" * 32
            )
            entry = wire.encode(message, run)
            for stream in (wire.control(run), wire.commands(node)):
                for mac in macs(field, stream, entry, wrong):
                    bus.xadd(stream, entry if mac is None else {**entry, b"mac": mac})
    for run in (field.theirs, field.mine):
        field.goes_on(run)


def test_a_forged_launch_is_not_obeyed(field: Field, tmp_path: Path) -> None:
    """Nor is a genuine one obeyed twice."""
    witness, seen = tmp_path / "witness", tmp_path / "seen"
    script = tmp_path / "touch.py"
    script.write_text("import sys; open(sys.argv[1], 'a').write('x')\n")
    node, own = node_of(field), bytes.fromhex(field.stolen["PACELINE_KEY"])
    stream = wire.commands(node)
    launch = wire.Launch(str(script), [str(witness)], 1, {})
    with field.owner() as bus:
        genuine = [entry for _, entry in bus.xrange(stream)]
        for run in ("0123456789ab", field.theirs, field.mine):
            entry = wire.encode(launch, run)
            for mac in macs(field, stream, entry, own):
                bus.xadd(stream, entry if mac is None else {**entry, b"mac": mac})
        for entry in genuine:
            bus.xadd(stream, entry)
    body = {"script": str(script), "args": [str(seen)], "nproc": 1}
    run = str(field.stack.api("POST", "/runs", body)["id"])
    until(
        lambda: field.run(run)["state"] == "finished", "a run that was asked for", DEADLINE_S, 0.2
    )
    assert seen.read_text() == "x"
    assert not witness.exists()
    field.goes_on(field.theirs)
    field.goes_on(field.mine)


def test_a_forged_question_is_not_answered(field: Field) -> None:
    """By somebody who could write to the streams. The node's own answer would be sealed, too."""
    node, ask = node_of(field), wire.Ask("a" * 32, ListLogs())
    stream, place = wire.commands(node), wire.answers(node, ask.id)
    entry = wire.encode(ask, field.theirs)
    with field.owner() as bus:
        bus.xadd(place, {"v": "asked"})
        for mac in macs(field, stream, entry, bytes.fromhex(field.stolen["PACELINE_KEY"])):
            bus.xadd(stream, entry if mac is None else {**entry, b"mac": mac})
        until(lambda: answered(field), "an answer to a question that was asked after them")
        assert bus.xlen(place) == 1
        bus.delete(place)


def answered(field: Field) -> bool:
    with contextlib.suppress(PacelineError):  # the machine is too busy
        return bool(field.stack.api("GET", f"/runs/{field.theirs}/logs")["logs"])
    return False


def test_a_forged_answer_is_not_believed(field: Field) -> None:
    """Whoever sees the question answers while the node is stopped."""
    assert field.stack.agent
    agent = psutil.Process(field.stack.agent.pid)

    def forged_and_genuine() -> str | None:
        with field.owner() as bus, ThreadPoolExecutor(1) as pool:
            agent.suspend()
            try:
                asked = pool.submit(field.stack.api, "GET", f"/runs/{field.theirs}/logs/0")
                until(lambda: asked.done() or forge(field, bus), "the question")
            finally:
                agent.resume()
            try:
                return str(asked.result(DEADLINE_S)["text"])
            except PacelineError:  # on a busy machine the node's own answer came too late
                return None

    texts: list[str | None] = []
    until(lambda: texts.append(forged_and_genuine()) or texts[-1] is not None, "an answer")
    assert texts[-1] == ""


def forge(field: Field, bus: redis.Redis) -> bool:
    """Answers the questions that are there; whether there was one, and an answer came in."""
    own, came_in = bytes.fromhex(field.stolen["PACELINE_KEY"]), False
    lie = msgspec.msgpack.encode(LogPart(0, 0, b"a lie", 5, False))
    for place in bus.scan_iter(match=wire.answers(node_of(field), "*")):
        entry = wire.encode(wire.Answer(seal_answer(lie, own)), field.theirs)
        for mac in macs(field, place.decode(), entry, own):
            fields = entry if mac is None else {**entry, b"mac": mac}
            came_in = bool(bus.xadd(place, fields, nomkstream=True)) or came_in
    return came_in


def lies(field: Field) -> dict[str, tuple[str, wire.Message]]:
    """(run, message) by what it says."""
    node, now = node_of(field), field.run(field.theirs)["started_at"]
    theirs, mine = field.theirs, field.mine
    return {
        "another run has failed": (theirs, wire.RunState(wire.State.FAILED, now, node, 0, 1, "x")),
        "another run's steps": (theirs, wire.StepBatch([record(10**6, 0)])),
        "another run begins again": (theirs, hello(2)),
        "a node is gone": ("", wire.NodeState(node, "h", 1, 1, [], now, "0", [], True)),
        "a node is there": ("", wire.NodeState("ghost", "h", 1, 1, [], now, "0", [], False)),
        "a rank that is none": (mine, wire.StepBatch([record(1, 7)])),
        "an attempt that is none": (mine, wire.StepBatch([record(1, 0, 5)])),
        "a world that is none": (mine, hello(64)),
        "an unknown run": ("0123456789ab", wire.RunState(wire.State.RUNNING, now, node)),
    }


def untouched(field: Field) -> None:
    field.goes_on(field.theirs)
    workers = field.stack.api("GET", f"/runs/{field.theirs}/workers")
    assert [row["rank"] for row in workers] == [0, 1]
    assert field.run(field.theirs)["attempt"] == 0
    nodes = {row["id"]: row["alive"] for row in field.stack.api("GET", "/nodes")}
    assert nodes == {node_of(field): True}


def test_lies_on_its_own_stream_are_rejected(field: Field) -> None:
    lie = lies(field)
    before = field.rejected()
    with field.thief() as thief:
        for run, message in lie.values():
            thief.xadd(wire.run_telemetry(field.mine), wire.encode(message, run))
    until(lambda: field.rejected() >= before + len(lie), f"{len(lie)} messages to be rejected")
    untouched(field)


def test_lies_in_its_spool_are_rejected(field: Field) -> None:
    """The agent delivers a spool, which a script can write: it may speak of its own run only."""
    folder = Path(field.stolen["PACELINE_SPOOL"])
    spool = Spool(folder, "thief", 1 << 20)
    for run, message in lies(field).values():
        assert spool.append(wire.encode(message, run))
    spool.close()
    until(lambda: not list(folder.glob("thief*.spool")), "the agent to deliver the spool")
    untouched(field)


def test_a_broken_spool_harms_nobody(field: Field) -> None:
    folder = Path(field.stolen["PACELINE_SPOOL"])
    folder.mkdir(exist_ok=True)
    (folder / "thief-1.spool").write_bytes(os.urandom(1 << 20))
    for number, body in enumerate([b"no MessagePack", b"\x80", b"\x81\x01\x02", b"\x91" * 9_000]):
        head = struct.pack("<II", len(body), zlib.crc32(body))
        (folder / f"thief-0{number}.spool").write_bytes(head + body)
    (folder / "thief.dropped").write_text("9" * 100)
    (folder / "thief-2.dropped").symlink_to("/dev/zero")
    (folder / "thief-2.spool").symlink_to("/dev/zero")
    (folder / "thief-3.spool").mkdir()
    os.mkfifo(folder / "thief-4.spool")
    field.goes_on(field.theirs)
    script = field.folder / "nothing.py"
    script.write_text("pass\n")
    body = {"script": str(script), "nproc": 1}
    run = str(field.stack.api("POST", "/runs", body)["id"])
    try:
        until(
            lambda: field.run(run)["state"] == "finished", "a run on the same node", DEADLINE_S, 0.2
        )
    finally:
        for path in folder.glob("thief*"):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.mark.parametrize("name", ["PACELINE_KEY", "PACELINE_RUN", "password", "user"])
def test_rest_takes_none_of_it_for_a_token(field: Field, name: str) -> None:
    url = urlsplit(field.stolen["PACELINE_BUS"])
    token = {**field.stolen, "password": url.password, "user": url.username}[name]
    run = f"/api/v1/runs/{field.mine}"
    with httpx.Client(base_url=field.stack.url, trust_env=False, timeout=DEADLINE_S) as client:
        for headers in ({}, {"Authorization": f"Bearer {token}"}, {"Cookie": f"paceline={token}"}):
            for method, path in [
                ("GET", run),
                ("POST", f"{run}/stop"),
                ("POST", f"{run}/session"),
                ("POST", f"/api/v1/nodes/{node_of(field)}/session"),
                ("GET", f"{run}/events"),
            ]:
                assert client.request(method, path, headers=headers).status_code in (401, 429)


@pytest.mark.timeout(1800)
def test_a_flood_is_bounded(field: Field) -> None:
    """The last test here: the thief's user of the bus is off afterwards."""
    stream, large = wire.run_telemetry(field.mine), os.urandom(20_000)
    names = ("paceline-worker", "paceline-ingest")
    worker = [each for each in processes(field) if each.name() in names]
    assert len(worker) == 2
    with field.thief() as thief, field.owner() as owner:

        def refused() -> bool:
            try:
                thief.ping()
            except RedisError:
                return True
            return False

        for process in worker:
            process.suspend()  # else it may store the flood as fast as it comes
        try:
            while owner.xlen(stream) * len(large) < 1.1 * Bounds().bytes:
                with thief.pipeline(transaction=False) as many:
                    for _ in range(500):
                        many.xadd(stream, {"v": "1", "large": large})
                    many.execute()
        finally:
            for process in worker:
                process.resume()
        until(refused, "the thief to be switched off", DEADLINE_S, 0.01)
        field.goes_on(field.theirs)
        assert (owner.memory_usage("paceline:rejected", samples=0) or 0) <= 80 << 20
        until(lambda: owner.xlen(stream) < 500, "the flood to be over", 600, 0.2)
    field.goes_on(field.theirs)
