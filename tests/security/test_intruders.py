"""Attacks on a running platform with two runs, from its own machine.

The user `nobody` of the same machine learns what the system lets it. A thief has PACELINE_BUS,
PACELINE_KEY and PACELINE_SPOOL of a run, as its script has.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
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
from support.strangers import SESAME, Field, as_nobody, processes, stores
from support.waiting import DEADLINE_S, TRAINING_S, until

pytestmark = pytest.mark.ranks
AS_NOBODY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
OPEN = {"/healthz", "/readyz", "/login"}


def test_a_run_reports_as_itself_and_its_variables_are_nowhere(field: Field) -> None:
    """The first test here: so nobody has needed more than it may."""
    assert f"paceline-run-{field.mine}:" in field.stolen["PACELINE_BUS"]
    assert field.stolen["SESAME"] == SESAME
    data = field.stack.data
    for path in [*(data / "bus").rglob("*"), *data.glob("paceline.db*")]:
        if path.is_file():
            assert SESAME.encode() not in path.read_bytes(), path
    with field.owner() as bus:
        assert bus.xlen(wire.TELEMETRY) == 0
        assert bus.exists(wire.run_telemetry(field.mine)), "its ranks wrote there"
        refused: Any = bus.execute_command("ACL", "LOG")
        assert refused == []


# The user `nobody`


def port_of(field: Field) -> int:
    return int(urlsplit(field.stack.url).port or 0)


KINDS = {
    "database": ["data/paceline.db", "data/paceline.db-wal"],
    "AOF": ["data/bus/appendonlydir/*"],
    "password of the bus": ["data/bus/password"],
    "logs": ["data/*.log", "data/runs/*/launcher.log", "data/runs/*/logs/*/*/*.log"],
    "tokens": ["data/token", "state/paceline/servers/*/*"],
    "runs": ["data/runs/*/run.json", "data/runs/*/launches"],
}


@AS_NOBODY
@pytest.mark.parametrize("kind", KINDS)
def test_files_are_closed(field: Field, kind: str) -> None:
    paths = [str(path) for pattern in KINDS[kind] for path in field.folder.glob(pattern)]
    assert paths, "there is nothing to read"
    code = """
        ways = (os.R_OK, os.W_OK)
        print(json.dumps([p for p in sys.argv[1:] for way in ways if os.access(p, way)]))
    """
    assert as_nobody(code, *paths) == []
    modes = {oct(Path(path).stat().st_mode & 0o777) for path in paths}
    assert modes == {"0o600"}, "also where a directory's mode is changed by mistake"


@AS_NOBODY
def test_folders_are_closed(field: Field) -> None:
    """Spools and checkpoints, too, which come into being while a run trains."""
    run = field.folder / "data/runs" / field.theirs
    checkpoints, spool = run / "checkpoints", run / "spool"
    folders = [field.folder / "data", field.folder / "data/bus", field.folder / "state", run]
    folders += [folder for folder in (checkpoints, spool) if folder.exists()]
    code = """
        ways = (os.R_OK, os.X_OK)
        print(json.dumps([p for p in sys.argv[1:] for way in ways if os.access(p, way)]))
    """
    assert as_nobody(code, *map(str, folders)) == []
    assert {oct(folder.stat().st_mode & 0o777) for folder in folders} == {"0o700"}


@AS_NOBODY
def test_nothing_of_interest_lies_elsewhere(field: Field) -> None:
    """Neither in /tmp nor in /dev/shm is a file that holds a secret and that others can read."""
    code = """
        found = []
        for top in ("/dev/shm", sys.argv[1]):
            for folder, _, names in os.walk(top):
                for name in names:
                    path = os.path.join(folder, name)
                    try:
                        with open(path, "rb") as file:
                            text = file.read(1 << 20)
                    except OSError:
                        continue
                    found += [path for secret in sys.argv[2:] if secret.encode() in text]
        print(json.dumps(found))
    """
    assert as_nobody(code, str(field.folder), *field.secrets.values()) == []


@AS_NOBODY
def test_processes_tell_no_secret(field: Field) -> None:
    """Neither their arguments, nor anything else of /proc that others may read."""
    code = """
        said = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            for name in ("cmdline", "environ", "comm", "status", "maps"):
                try:
                    with open(f"/proc/{pid}/{name}", "rb") as file:
                        said.append(file.read().decode(errors="replace"))
                except OSError:
                    continue
        print(json.dumps("\\n".join(said)))
    """
    said = as_nobody(code)
    assert "paceline" in said, "it saw the platform's processes"
    assert [name for name, secret in field.secrets.items() if secret in said] == []


@AS_NOBODY
def test_the_command_line_finds_no_token(field: Field) -> None:
    """Also when it looks where the platform's user has it."""
    from paceline.node import tokens

    url = field.stack.url
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(field.folder / "state"))
        assert tokens.kept(url) == field.token, "its own user finds it"
    code = """
        try:
            print(json.dumps(tokens.kept(sys.argv[1])))
        except PermissionError:
            print("null")
    """
    first = "from paceline.node import tokens"
    state = str(field.folder / "state")
    assert as_nobody(code, url, first=first, XDG_STATE_HOME=state) is None


def paths(field: Field) -> list[tuple[str, str]]:
    """Every call of the OpenAPI document, as (method, path)."""
    document = httpx.get(
        f"{field.stack.url}/openapi.json",
        headers={"Authorization": f"Bearer {field.token}"},
        timeout=DEADLINE_S,
    ).json()
    filled = {"{run}": field.theirs, "{node}": "here", "{token}": "1", "{entry}": "1-1"}
    calls = []
    for path, methods in document["paths"].items():
        for name, value in filled.items():
            path = path.replace(name, value)
        calls += [(method.upper(), path) for method in methods]
    assert len(calls) > 35
    return calls


PAGES = ["/", "/runs", "/runs/{run}", "/compare", "/docs", "/redoc", "/openapi.json", "/metrics"]
PAGES += ["/_dash-layout", "/_dash-dependencies", "/_dash-update-component", "/assets/js/live.js"]
PAGES += ["/_favicon.ico", "/_reload-hash", "/_dash-component-suites/dash/dash.js", "/login/x"]


def test_http_is_closed(field: Field) -> None:
    """Each call and each page, by each method that a browser knows."""
    calls = paths(field) + [
        (method, page.replace("{run}", field.theirs))
        for page in PAGES
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
    ]
    said = []
    with httpx.Client(base_url=field.stack.url, timeout=DEADLINE_S) as client:
        for method, path in calls:
            for accept in ("application/json", "text/html"):
                answer = client.request(method, path, headers={"accept": accept}, json=None)
                if path not in OPEN and answer.status_code not in (401, 403, 302, 303, 307):
                    said.append((method, path, accept, answer.status_code))
                assert field.theirs not in answer.text or field.theirs in path, (method, path)
    assert said == []


def test_open_paths_tell_nothing(field: Field) -> None:
    for path in OPEN:
        text = httpx.get(field.stack.url + path, timeout=DEADLINE_S).text
        assert [name for name, secret in field.secrets.items() if secret in text] == []
        assert field.mine not in text
        assert str(field.folder) not in text


@AS_NOBODY
def test_no_websocket_is_opened(field: Field) -> None:
    code = """
        answers = []
        for path in sys.argv[2:]:
            with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20) as s:
                s.sendall((f"GET {path} HTTP/1.1\\r\\nHost: 127.0.0.1:{sys.argv[1]}\\r\\n"
                    "Connection: Upgrade\\r\\nUpgrade: websocket\\r\\n"
                    "Sec-WebSocket-Version: 13\\r\\n"
                    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\\r\\n\\r\\n").encode())
                answers.append(int(s.recv(4096).split()[1]))
        print(json.dumps(answers))
    """
    tried = [
        "/",
        "/ws",
        "/api/v1/runs",
        f"/api/v1/runs/{field.theirs}/events",
        "/_dash-ws",
        "/healthz",
    ]
    answers = as_nobody(code, str(port_of(field)), *tried)
    assert 101 not in answers
    assert all(status in (401, 403, 404, 400, 426) for status in answers[:-1]), answers


BUS = [
    ["PING"],
    ["INFO"],
    ["KEYS", "*"],
    ["CONFIG", "GET", "*"],
    ["XADD", "paceline:telemetry", "*", "a", "b"],
]
BUS += [["AUTH", ""], ["AUTH", "default", ""], ["AUTH", "paceline"], ["HELLO", "3"], ["MONITOR"]]


@AS_NOBODY
def test_the_bus_wants_a_password(field: Field) -> None:
    port = urlsplit(field.stolen["PACELINE_BUS"]).port
    code = """
        answers = []
        for words in json.loads(sys.argv[2]):
            with socket.create_connection(("127.0.0.1", int(sys.argv[1])), 20) as s:
                parts = [f"*{len(words)}"] + [f"${len(w)}\\r\\n{w}" for w in words]
                s.sendall(("\\r\\n".join(parts) + "\\r\\n").encode())
                answers.append(s.recv(4096).decode())
        print(json.dumps(answers))
    """
    answers = as_nobody(code, str(port), json.dumps(BUS))
    assert all(answer.startswith(("-NOAUTH", "-WRONGPASS", "-ERR")) for answer in answers), answers


@pytest.mark.xfail(strict=True, reason="PyTorch opens MASTER_PORT on all interfaces")
def test_runs_listen_on_loopback_only(field: Field) -> None:
    """A training of one machine has nothing that others could reach over the network."""
    listening = stores(field, field.theirs)
    assert listening
    assert [address for address, _ in listening if address not in ("127.0.0.1", "::1")] == []


TORCH = "import select; from datetime import timedelta; from torch.distributed import TCPStore"
STORE = """
    def use(port):
        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False,
                         timeout=timedelta(seconds=10))
        keys = store.list_keys()
        for key in keys:
            if sys.argv[1] and key.startswith("torch.rendezvous.") and "/" not in key:
                store.set(key, sys.argv[1])
        return keys

    answers = {}  # a port that speaks something else keeps its client waiting
    for port in map(int, sys.argv[2:]):
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            os.write(theirs, json.dumps(use(port)).encode())
            os._exit(0)
        answers[ours] = child
        os.close(theirs)
    said = []
    for ours, child in answers.items():
        if select.select([ours], [], [], 20)[0]:
            said += json.loads(os.read(ours, 65536) or "[]")
        os.kill(child, 9)
    print(json.dumps(said))
"""


@AS_NOBODY
@pytest.mark.xfail(strict=True, reason="neither PyTorch's store nor rank 0's has a password")
def test_stores_of_runs_are_closed(field: Field) -> None:
    """Plans go from rank to rank through the ranks' store: others can neither read nor write it."""
    ports = {str(port) for _, port in stores(field, field.theirs)}
    assert ports
    assert as_nobody(STORE, "", *sorted(ports), first=TORCH) == []


class _Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@AS_NOBODY
def test_nobody_runs_programs_as_the_agents_user(field: Field) -> None:
    """TorchElastic's rendezvous reads pickles from its store, again and again."""
    folder = field.folder / "data/runs" / field.theirs
    witness = folder / "was here"
    body = field.stack.api(
        "POST",
        "/runs",
        {
            "script": str(field.folder / "train.py"),
            "args": [str(field.folder / "other.json")],
            "nproc": 1,
        },
    )
    run = str(body["id"])
    until(lambda: stores(field, run) and field.step(run) >= 1, "the run", 150, 0.3)
    pickled = base64.b64encode(pickle.dumps(_Payload(witness))).decode()
    ports = {str(port) for _, port in stores(field, run)}
    others = {str(port) for _, port in stores(field, field.theirs)}
    as_nobody(STORE, pickled, *sorted(ports - others or ports), first=TORCH)
    try:
        # Each step takes 0.1 s and more: meanwhile the rendezvous has looked at its store.
        last = field.step(run) + 80
        until(lambda: witness.exists() or field.step(run) >= last, "steps", TRAINING_S, 0.2)
        assert not witness.exists(), "a program of nobody's ran as the agent's user"
    finally:
        field.stack.api("POST", f"/runs/{run}/stop", {"force": True})


# A thief


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
                    message.plan, policy="forged", seq=message.plan.seq + ahead
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
