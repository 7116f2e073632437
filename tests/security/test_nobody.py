"""Another user of the same machine: what the user `nobody` learns of a running platform."""

from __future__ import annotations

import base64
import json
import os
import pickle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from support.strangers import Field, as_nobody, stores
from support.waiting import DEADLINE_S, TRAINING_S, until

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
]
OPEN = {"/healthz", "/readyz", "/login"}


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
