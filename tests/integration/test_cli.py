"""The command line as its users meet it: processes, exit codes, what is printed where."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline import cli, wire
from paceline.core.errors import InputError
from paceline.node.client import Client
from paceline.wire import Kill
from paceline.wire.bus import connect, publish
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.store import Store
from support.node import (
    NOBODY,
    SLEEP,
    family,
    nodes,
    paceline,
    ranks,
    script,
    states,
    until,
    wait_gone,
)
from support.web import serving

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """The command line inside this process, for what starts no other: many times as fast."""
    for name in ("SERVER", "TOKEN", "DATA"):
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(cli, "DEFAULT_SERVER", NOBODY)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def call(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error of a command that ends by itself."""
    process = paceline(*arguments)
    out, err = process.communicate(timeout=90)
    return process.returncode, out, err


@contextmanager
def web(answer: object, status: int = 200, kind: str = "application/json") -> Iterator[str]:
    """A server that answers everything alike; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(tmp_path: Path, bus_url: str) -> Iterator[httpx.Client]:
    """The real REST server over SQLite and a real bus."""
    store = Store.open(f"sqlite:///{tmp_path / 'paceline.db'}")
    with serving(store, bus_url) as client:
        yield client
    store.close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def url(server: httpx.Client) -> str:
    return str(server.base_url).rstrip("/")


def the_run(server: httpx.Client) -> dict[str, object]:
    (run,) = server.get("/api/v1/runs").json()["items"]
    found: dict[str, object] = run
    return found


def test_help_is_light() -> None:
    code = (
        "import sys; sys.argv[1:] = ['run', '--help']\n"
        "from paceline.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'numpy', 'httpx', 'fastapi', 'sqlalchemy', 'dash'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_version(main: Main) -> None:
    code, out, _ = main("version", "--json")
    assert code == 0
    assert json.loads(out)["protocol"] == wire.PROTOCOL_VERSION
    assert main("version")[1].startswith("paceline ")


def test_missing_server_packages_are_named() -> None:
    code = (
        "import sys; sys.argv[1:] = ['server', '--port', '1']; sys.modules['fastapi'] = None\n"
        "sys.modules['paceline_backend'] = None\n"
        "from paceline.cli import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 3
    assert "pip install 'paceline[server]'" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.ranks
def test_run_without_a_server(data: Path, tmp_path: Path) -> None:
    text = """
        import os, sys
        rank = os.environ["RANK"]
        print("out", rank, sys.argv[1:], sorted(k for k in os.environ if "PACELINE" in k))
        print("err", rank, file=sys.stderr)
        print(os.environ["PACELINE_EMULATE"])
        sys.exit(5 if rank == "0" and "--fail" in sys.argv else 0)
    """
    path = script(tmp_path, text)
    emulate = ("--slowdown", "1,3", "--seconds-per-unit", "0.5", "--seconds-per-step", "2")
    code, out, err = call("run", "--data", str(data), *emulate, path, "--nproc", "9")
    assert code == 0, err
    assert out == (
        "out 0 ['--nproc', '9'] ['PACELINE_EMULATE']\n{\"a_s\": [0.5, 1.5], \"b_s\": [2.0, 2.0]}\n"
    )
    assert "training without a control plane" in err
    assert "err 0\n" in err
    assert "err 1\n" not in err
    assert "EMULATED" in err
    (log,) = data.glob("runs/*/logs/attempt_0/1/stdout.log")
    assert log.read_text().startswith("out 1 ")
    assert str(log.parents[2]) in err

    devices = tmp_path / "devices.json"
    devices.write_text('{"a_s": [0.5, 1], "b_s": [2, 2], "cost": {"kappa": 0.5}, "serial": 1}')
    emulate = ("--emulate", str(devices))
    code, out, err = call("run", "--data", str(data), *emulate, path, "--fail")
    shown = json.loads(out.splitlines()[1])
    assert shown["cost"] == {"kappa": 0.5, "padded": False} and "serial" not in shown
    assert code == 5
    assert "rank 0 ended with code 5" in err or "rank 0 failed: err 0 (exit code 5)" in err
    assert err.splitlines().count("err 0") == 1, "it was copied already"


@pytest.mark.ranks
def test_run_with_a_server(server: httpx.Client, bus_url: str, data: Path, tmp_path: Path) -> None:
    text = """
        import os
        print(os.environ["PACELINE_RUN"])
        if os.environ["RANK"] == "2":
            raise LookupError("no such label")
    """
    path = script(tmp_path, text, "label.py")
    where = ("--server", url(server), "--data", str(data))
    code, out, err = call("run", *where, "--nproc", "3", "--node", "here", path, "a", "b")
    run = the_run(server)
    assert code == 1
    assert "rank 2 failed: LookupError: no such label (exit code 1); log: " in err
    assert f"{url(server)}/runs/{run['id']}" in err
    assert err.count('    raise LookupError("no such label")\n') == 1
    assert "launcher.py" not in err
    assert (run["name"], run["args"], run["node"], run["nproc"]) == ("label", ["a", "b"], "here", 3)
    assert out == f"{run['id']}\n"
    last = states(bus_url, str(run["id"]))[-1]
    assert (last.state, last.exit_code) == ("failed", 1)


@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_run(number: int, data: Path, tmp_path: Path) -> None:
    process = paceline("run", "--data", str(data), "--nproc", "2", script(tmp_path, SLEEP))
    assert process.stdout is not None
    assert process.stdout.readline() == "rank 0 of 2\n"
    until(lambda: len(ranks(family(process.pid))) == 2, "both ranks")
    everyone = family(process.pid)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    wait_gone(everyone)


@pytest.mark.ranks
def test_killed_run_leaves_no_process(data: Path, tmp_path: Path) -> None:
    process = paceline("run", "--data", str(data), "--nproc", "2", script(tmp_path, SLEEP))
    until(lambda: len(ranks(family(process.pid))) == 2, "both ranks", 60)
    everyone = family(process.pid)
    process.kill()
    process.communicate()
    wait_gone(everyone)


@pytest.mark.ranks
def test_operator_stops_a_foreground_run(
    server: httpx.Client, bus_url: str, data: Path, tmp_path: Path
) -> None:
    where = ("--server", url(server), "--data", str(data))
    process = paceline("run", *where, "--node", "here", script(tmp_path, SLEEP))
    assert process.stdout is not None
    assert process.stdout.readline() == "rank 0 of 1\n"
    run = str(the_run(server)["id"])
    with connect(bus_url) as bus:
        publish(bus, wire.commands("here"), Kill("an operator asked"), run)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "paceline: an operator asked" in err
    assert states(bus_url, run)[-1].state == "stopped"


@pytest.mark.ranks
def test_run_that_ends_while_the_bus_is_away_is_delivered_by_an_agent(
    data: Path, tmp_path: Path
) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'paceline.db'}")
    with EmbeddedBus(tmp_path / "bus") as bus, serving(store, bus.url) as server:
        where = ("--server", url(server), "--data", str(data))
        end = tmp_path / "end"
        text = f"""
            import os, time
            print("up", flush=True)
            while not os.path.exists({str(end)!r}):
                time.sleep(0.05)
        """
        process = paceline("run", *where, script(tmp_path, text))
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        run = str(the_run(server)["id"])
        until(lambda: any(s.state == "running" for s in states(bus.url, run)), "it to be running")
        bus.kill()
        end.touch()
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0
        assert "`paceline agent` with the same --data delivers it" in err
        bus.start()
        agent = paceline("agent", *where)
        try:
            until(lambda: states(bus.url, run)[-1].state == "finished", "the end to be reported")
        finally:
            agent.terminate()
            agent.communicate(timeout=20)
    store.close()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "nowhere.py"], 2, "script: there is no file"),
        (["run", "--nproc", "0", "SCRIPT"], 2, "--nproc"),
        (["run", "SCRIPT", "a\0b"], 2, "NUL"),
        (["run", "--bogus", "SCRIPT"], 2, "--bogus"),
        (["run", "--param", "oops", "SCRIPT"], 2, "--param oops: give NAME=VALUE"),
        (["run", "--slowdown", "1,x", "SCRIPT"], 2, "--slowdown 1,x: give factors above 0"),
        (["run", "--slowdown", "1,0", "SCRIPT"], 2, "--slowdown 1,0: give factors above 0"),
        (["run", "--slowdown", "1,2", "--nproc", "3", "SCRIPT"], 2, "2 factors for --nproc 3"),
        (["run", "--slowdown", "1", "--seconds-per-step", "-1", "SCRIPT"], 2, "--seconds-per-step"),
        (["run", "--emulate", "nowhere.json", "SCRIPT"], 2, "--emulate nowhere.json: "),
        (["run", "--emulate", "SCRIPT", "SCRIPT"], 2, "--emulate: JSON is malformed"),
        (["run", "--emulate", '{"a_s": [1, "x"], "b_s": [0]}', "SCRIPT"], 2, "at `$.a_s[1]`"),
        (["run", "--emulate", '{"a_s": [1], "b": [0]}', "SCRIPT"], 2, "`b`"),
        (["run", "--emulate", '{"a_s": [], "b_s": []}', "SCRIPT"], 2, "--emulate: a_s"),
        (["run", "--emulate", '{"a_s": [1], "b_s": [0], "noise": 2}', "SCRIPT"], 2, "noise = 2"),
        (
            ["run", "--emulate", '{"a_s": [1], "b_s": [0]}', "--nproc", "2", "SCRIPT"],
            2,
            "for each of 2 ranks",
        ),
        (["run", "--emulate", "{}", "--slowdown", "1", "SCRIPT"], 2, "give one of them"),
        (
            ["run", "--policy", "bspp", "SCRIPT"],
            2,
            "--policy bspp: no policy has this name",
        ),
        (["run", "--policy", "bspp", "SCRIPT"], 2, "did you mean bsp"),
        (["run", "--policy", "chronica", "SCRIPT"], 2, "--policy chronica needs a control plane"),
        (["run", "--policy", "chronica", "SCRIPT"], 2, f"no server answers at {NOBODY}"),
        (["run", "--param", "mode=free", "SCRIPT"], 2, "--param needs a control plane"),
        (["run", "--server", NOBODY, "SCRIPT"], 3, f"no server answers at {NOBODY}"),
        (["run", "--data", "SCRIPT", "SCRIPT"], 3, "cannot be written"),
        (["agent", "--data", "/proc/paceline", "--bus", "redis://h"], 3, "cannot be written"),
        (["agent", "--bus", "http://h"], 2, "bus http://h: "),
        (["runs", "--server", NOBODY], 3, "no server answers"),
        (["runs", "--server", "http://h:bad"], 2, "--server http://h:bad: "),
    ],
)
def test_bad_input(
    arguments: list[str],
    code: int,
    words: str,
    data: Path,
    tmp_path: Path,
    main: Main,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = script(tmp_path, "raise SystemExit('it must not run')")
    arguments = [path if a == "SCRIPT" else a for a in arguments]
    monkeypatch.setenv("PACELINE_DATA", str(data))
    got, out, err = main(*arguments)
    assert got == code, err
    assert words in err
    assert out == ""
    assert "Traceback" not in err
    if "paceline: " in err:
        assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["run", "agent"])
def test_server_of_another_protocol(command: str, data: Path, tmp_path: Path) -> None:
    rest = [script(tmp_path, "")] if command == "run" else []
    with web({"version": "9.9", "protocol": 99, "id": "c", "bus": "redis://127.0.0.1:9"}) as other:
        code, _, err = call(command, "--server", other, "--data", str(data), *rest)
    assert code == 3
    assert "speaks protocol version 99, this paceline 1" in err


def test_agent_follows_a_bus_that_moved(bus_url: str, data: Path, tmp_path: Path) -> None:
    broken = data / "runs" / "broken" / "run.json"
    broken.parent.mkdir(parents=True)
    broken.touch()  # as a power cut leaves it: the agent works on
    with EmbeddedBus(tmp_path / "bus") as first:
        answer = {
            "version": "0",
            "protocol": wire.PROTOCOL_VERSION,
            "id": "c",
            "bus": first.url,
        }
        with web(answer) as server_url:
            agent = paceline("agent", "--server", server_url, "--data", str(data))
            try:
                until(lambda: nodes(first.url), "the agent to register")
                answer["bus"] = bus_url
                first.kill()
                until(lambda: nodes(bus_url), "the agent to register there")
            finally:
                agent.terminate()
                _, err = agent.communicate(timeout=20)
    assert agent.returncode == 0, err
    place = bus_url.rpartition("@")[2].partition("/")[0]
    assert f"the bus moved to {place}" in err
    assert bus_url.split("/")[2] not in err  # its password
    assert broken.with_suffix(".bad").exists()


def test_server_that_is_none_of_ours(data: Path, tmp_path: Path, main: Main) -> None:
    path = script(tmp_path, "")
    for answer, status in ((["hello"], 200), ({"detail": "Not Found"}, 404), ("boom", 500)):
        with web(answer, status) as other:
            code, _, err = main("run", "--server", other, "--data", str(data), path)
        assert code == 3, err
        assert "no Paceline server" in err or "the server failed" in err


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("answer", "status", "kind", "words"),
    [
        ({"error": "who are you"}, 401, "application/json", "is no Paceline server (401 Unauth"),
        ("boom", 500, "application/json", "is no Paceline server (500 Internal"),
        ({"title": "", "detail": "bolted"}, 401, "application/problem+json", "wants a token"),
        ({"title": "", "detail": "bolted"}, 403, "application/problem+json", "refuses: bolted"),
        ({"protocol": 99}, 200, "application/json", "speaks protocol version 99"),
    ],
)
def test_what_nobody_asked_for_does_not_hinder_training(
    answer: object,
    status: int,
    kind: str,
    words: str,
    data: Path,
    tmp_path: Path,
    main: Main,
) -> None:
    path = script(tmp_path, "")
    with web(answer, status, kind) as other:
        command = f"from paceline import cli; cli.DEFAULT_SERVER = {other!r}; cli.main()"
        ended = subprocess.run(
            [sys.executable, "-c", command, "run", "--data", str(data), path],
            capture_output=True,
            text=True,
            check=False,
        )
        asked, _, refused = main("run", "--server", other, "--data", str(data), path)
    said = ended.stderr.splitlines()[0]
    assert ended.returncode == 0, ended.stderr
    assert words in said
    assert "training without a control plane" in said
    assert asked == 3
    assert words in refused


def test_token(bus_url: str, tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'paceline.db'}")
    with serving(store, bus_url, token="a-secret") as server:
        code, _, err = main("policies", "--server", url(server))
        assert code == 3
        assert "wants a token" in err
        monkeypatch.setenv("PACELINE_TOKEN", "a-secret")
        code, out, _ = main("policies", "--json", "--server", url(server))
        assert code == 0
        assert "bsp" in {policy["name"] for policy in json.loads(out)}
    store.close()


def test_thin_clients(server: httpx.Client, main: Main, data: Path, tmp_path: Path) -> None:
    where = ("--server", url(server))
    code, out, _ = main("policies", *where)
    assert code == 0
    assert "bsp" in out

    path = script(tmp_path, "")
    code, _, err = main("run", *where, "--data", str(data), "--policy", "cronica", path)
    assert code == 2
    assert "chronica" in err, "the nearest is suggested"
    assert len(err.strip().splitlines()) == 1
    assert json.loads(main("runs", "--json", *where)[1])["items"] == []

    body = {"script": path, "nproc": 1, "launch": False, "name": "a name"}
    run = server.post("/api/v1/runs", json=body).json()["id"]
    assert run in main("runs", *where)[1]
    assert main("switch", run, "chronica", *where)[0] == 0
    assert the_run(server)["policy"] == "chronica"
    assert main("switch", run[:7], "sata", *where)[0] == 0
    assert the_run(server)["policy"] == "sata"
    code, _, err = main("switch", run, "bsp", "--param", "nonsense=1", *where)
    assert code == 2
    assert "nonsense" in err
    code, _, err = main("switch", "nobody", "bsp", *where)
    assert code == 2
    assert "nobody" in err
    assert main("stop", run, "--force", *where)[0] == 0


def test_ids_are_whole_on_any_terminal(
    server: httpx.Client, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"script": "a/rather/long/name/of/a/script.py", "nproc": 1, "launch": False}
    run = server.post("/api/v1/runs", json=body).json()["id"]
    for columns in ("20", "40", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        assert run in main("runs", "--server", url(server))[1]


@pytest.mark.parametrize("command", [["stop"], ["switch", "bsp"], ["whatif"]])
def test_a_run_is_known_by_a_beginning_that_no_other_has(
    command: list[str], main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def call(client: Client, method: str, path: str, *_: object, **options: Any) -> Any:
        asked.append(path)
        if path == "/runs":  # in two pages
            first = options["params"].get("cursor") is None
            ids = ["ab12cd", "ab34ef"] if first else ["c0ffee"]
            return {"items": [{"id": i} for i in ids], "next_cursor": "2" if first else None}
        if path == "/runs/ab12cd":
            return {"id": "ab12cd"}
        if path.count("/") == 2:
            raise InputError("no such run")
        raise InputError("far enough")

    monkeypatch.setattr(Client, "call", call)
    for given, words, last in [
        ("ab12cd", "far enough", "/runs/ab12cd/"),
        ("ab1", "far enough", "/runs/ab12cd/"),
        ("c", "far enough", "/runs/c0ffee/"),
        ("ab", "RUN ab: 2 runs begin with it: ab12cd, ab34ef", "/runs"),
        ("x", "RUN x: no run's id begins with it", "/runs"),
        ("../../x", "RUN ../../x: ", ""),
        ("..", "RUN ..: ", ""),
        ("ab12cd/stop?x=", "RUN ab12cd/stop?x=: ", ""),
        ("", "RUN : ", ""),
    ]:
        asked.clear()
        code, _, err = main(command[0], given, *command[1:])
        assert code == 2
        assert words in err
        assert asked[-1].startswith(last) if last else not asked
