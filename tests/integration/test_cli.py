"""The command line as its users meet it: processes, exit codes, what is printed where."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer

from paceline import wire
from paceline.node.client import Client
from paceline_backend.cli import register
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.store import Store
from support.command_line import Main
from support.node import (
    SLEEP,
    family,
    nodes,
    paceline,
    ranks,
    script,
    states,
    wait_gone,
)
from support.waiting import DEADLINE_S, until
from support.web import ANY, serving


def call(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error of a command that ends by itself."""
    process = paceline(*arguments)
    out, err = process.communicate(timeout=DEADLINE_S)
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
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(client: httpx.Client) -> httpx.Client:
    """The real REST server over SQLite and a real bus."""
    return client


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def url(server: httpx.Client) -> str:
    return str(server.base_url).rstrip("/")


def the_run(server: httpx.Client) -> dict[str, object]:
    (run,) = server.get("/api/v1/runs").json()["items"]
    document: dict[str, object] = run
    return document


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


def test_what_only_some_plans_and_pages_need_is_not_imported_at_the_start() -> None:
    code = (
        "import sys\n"
        "import paceline_dashboard\n"
        "from paceline import policies\n"
        "from paceline_backend.api import web\n"
        "from paceline_backend.control import worker\n"
        "policies.names()\n"
        "heavy = {'torch', 'sklearn', 'scipy.optimize', 'dash', 'plotly'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("package", ["paceline_backend", "sqlalchemy"])
def test_missing_server_packages_are_named(package: str) -> None:
    code = (
        "import sys; sys.argv[1:] = ['server', '--port', '1']; sys.modules['fastapi'] = None\n"
        f"sys.modules[{package!r}] = None\n"
        "from paceline.cli import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 3
    assert "pip install 'paceline[server]'" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_commands_whose_packages_are_missing_are_listed() -> None:
    code = (
        "import sys; sys.argv[1:] = ['--help']; sys.modules['paceline_backend.cli'] = None\n"
        "from paceline.cli import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0
    added = typer.Typer()
    register(added)
    lines = [line for line in ended.stdout.splitlines() if "'paceline[server]'" in line]
    missing = [line.strip("│ ").split()[0] for line in lines]
    assert sorted(missing) == sorted(typer.main.get_command(added).commands)


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
        "out 0 ['--nproc', '9'] ['PACELINE_ATTEMPT', 'PACELINE_CHECKPOINTS', 'PACELINE_EMULATE', "
        "'PACELINE_FIRST_ATTEMPT', 'PACELINE_MEMORY', 'PACELINE_PLACEMENT']\n"
        '{"a_s": [0.5, 1.5], "b_s": [2.0, 2.0]}\n'
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
def test_a_restart_says_why_and_variables_are_given(main: Main, data: Path, tmp_path: Path) -> None:
    text = """
        import os, sys
        print(os.environ["GREETING"], flush=True)
        if os.environ["PACELINE_ATTEMPT"] == "0" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
    """
    path = script(tmp_path, text)
    options = ("--nproc", "2", "--max-restarts", "1", "--env", "GREETING=hello")
    code, out, err = call("run", "--data", str(data), *options, path)
    assert code == 0, err
    assert out.splitlines()[-1] == "hello"
    assert "paceline: rank 1 was killed by SIGKILL; log: " in err
    assert "paceline: restarting all ranks: attempt 1\n" in err
    code, _, err = main("run", "--data", str(data), "--env", "NO_SUCH_VARIABLE", path)
    assert code == 2 and "--env NO_SUCH_VARIABLE: give NAME=VALUE" in err


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
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    wait_gone(everyone)


@pytest.mark.ranks
def test_killed_run_leaves_no_process(data: Path, tmp_path: Path) -> None:
    process = paceline("run", "--data", str(data), "--nproc", "2", script(tmp_path, SLEEP))
    until(lambda: len(ranks(family(process.pid))) == 2, "both ranks")
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
    said = process.stdout.readline()
    assert said == "rank 0 of 1\n", process.communicate()
    run = str(the_run(server)["id"])
    stop = {"force": True, "why": "an operator asked"}
    server.post(f"/api/v1/runs/{run}/stop", json=stop, headers=ANY).raise_for_status()
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "paceline: stopped over the API" in err
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
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
        assert "`paceline agent` with the same --data delivers them" in err
        bus.start()
        agent = paceline("agent", *where)
        try:
            # The agent reports on its node's stream, the run did on its own.
            until(
                lambda: any(s.state == "finished" for s in states(bus.url, run)),
                "the end to be reported",
            )
        finally:
            agent.terminate()
            agent.communicate(timeout=DEADLINE_S)
    store.close()


@pytest.mark.parametrize("command", ["run", "agent"])
def test_server_of_another_protocol(command: str, main: Main, data: Path, tmp_path: Path) -> None:
    rest = [script(tmp_path, "")] if command == "run" else []
    with web({"version": "9.9", "protocol": 99, "id": "c", "bus": "redis://127.0.0.1:9"}) as other:
        code, _, err = main(command, "--server", other, "--data", str(data), *rest)
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
            "key": "00" * 32,
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
                _, err = agent.communicate(timeout=DEADLINE_S)
    assert agent.returncode == 0, err
    place = bus_url.rpartition("@")[2].partition("/")[0]
    assert f"the bus is now {place}" in err
    assert bus_url.split("/")[2] not in err  # its password
    assert broken.with_suffix(".bad").exists()


def test_server_that_is_none_of_ours(data: Path, tmp_path: Path, main: Main) -> None:
    path = script(tmp_path, "")
    for answer, status in ((["hello"], 200), ({"detail": "Not Found"}, 404), ("boom", 500)):
        with web(answer, status) as other:
            code, _, err = main("run", "--server", other, "--data", str(data), path)
        assert code == 3, err
        assert "is not a Paceline server" in err or "the server failed" in err


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("answer", "status", "kind", "words"),
    [
        ({"error": "who are you"}, 401, "application/json", "is not a Paceline server (401 Unauth"),
        ("boom", 500, "application/json", "is not a Paceline server (500 Internal"),
        ({"title": "", "detail": "bolted"}, 401, "application/problem+json", "requires a token"),
        (
            {"title": "", "detail": "bolted"},
            403,
            "application/problem+json",
            "rejected the request: bolted",
        ),
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
        command = (
            "from paceline import cli; from paceline.commands import options; "
            f"options.DEFAULT_SERVER = {other!r}; cli.main()"
        )
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
    code, out, _ = main("switch", run, "rna", "--yes", *where)
    assert code == 0 and "THIS CHANGES THE TRAINING" in out
    code, out, _ = main("switch", run, "paceline", "--param", "mode=free", "--yes", *where)
    assert code == 0 and "other samples" in out
    code, out, _ = main("switch", run, "chronica", "--yes", *where)
    assert code == 0 and "THIS CHANGES THE TRAINING" not in out
    assert the_run(server)["policy"] == "chronica"
    assert main("switch", run[:7], "sata", "--yes", *where)[0] == 0
    assert the_run(server)["policy"] == "sata"
    code, _, err = main("switch", run, "bsp", "--param", "nonsense=1", "--yes", *where)
    assert code == 2
    assert "nonsense" in err
    code, _, err = main("switch", "nobody", "bsp", "--yes", *where)
    assert code == 2
    assert "nobody" in err
    assert main("stop", run, "--force", "--yes", *where)[0] == 0


def test_backends(server: httpx.Client, main: Main, tmp_path: Path) -> None:
    where = ("--server", url(server))
    known = {each["name"]: each for each in json.loads(main("backends", "--json", *where)[1])}
    engines = [name for name, each in known.items() if each["engine"]]
    assert engines == ["kubernetes", "ray", "slurm"]
    assert "partition" in known["slurm"]["options"]["properties"]
    assert "slurm" in main("backends", *where)[1]

    path = script(tmp_path, "")
    code, _, err = main("run", *where, "--backend-option", "partition=gpu", path)
    assert code == 2
    assert "--backend" in err
    code, _, err = main("run", *where, "--backend", "slrum", path)
    assert code == 2
    assert "known: kubernetes, local, ray, simulated, slurm" in err
    code, _, err = main("run", *where, "--backend", "slurm", "--backend-option", "time=1", path)
    assert code == 2
    assert "backend_options" in err
    assert "time_limit" in err


def test_a_node_whose_run_nobody_knows_ends(
    server: httpx.Client, data: Path, main: Main, tmp_path: Path
) -> None:
    code, _, err = main(
        *("node", "--run", "nobody", "--slot", "1.0", "--server", url(server)),
        *("--data", str(data)),
    )
    assert code == 1
    assert "nobody" in err


def test_changes_are_listed_with_their_reasons(server: httpx.Client, main: Main) -> None:
    where = ("--server", url(server))
    body = {"script": "train.py", "nproc": 1, "launch": False}
    run, other = (server.post("/api/v1/runs", json=body).json()["id"] for _ in range(2))
    assert main("switch", run, "chronica", "--why", "rank 3 is slow", "--yes", *where)[0] == 0
    assert main("auto", run, *where)[1] == f"run {run}: auto is set to off\n"
    asked = main("auto", run[:7], "recommend", "--relaxed", "--yes", *where)
    assert asked[1] == f"run {run}: auto is set to recommend, relaxed presets too\n"
    assert main("stop", run, "--why", "done", "--yes", *where)[0] == 0
    page = json.loads(main("audit", run[:7], "--json", *where)[1])
    assert [(row["action"], row["why"], row["revision"]) for row in page["items"]] == [
        ("run.stop", "done", 3),
        ("run.auto", "", 2),
        ("run.policy", "rank 3 is slow", 1),
        ("run.create", "", 0),
    ]
    assert [row["via"] for row in page["items"]] == ["cli", "cli", "cli", ""]
    assert {row["who"] for row in page["items"]} == {"configured"}, "the token's name"
    assert {row["run"] for row in page["items"]} == {run}
    (line,) = (row for row in main("audit", run, *where)[1].splitlines() if "run.policy" in row)
    assert all(words in line for words in (run, "chronica", "rank 3 is slow", "cli"))
    whole = json.loads(main("audit", "--json", *where)[1])["items"]
    assert {row["run"] for row in whole} == {run, other}
    created = main("audit", "--action", "run.create", "--limit", "1", "--json", *where)[1]
    assert [row["run"] for row in json.loads(created)["items"]] == [other]
    assert main("audit", "nobody", *where)[0] == 2


def test_a_target_is_set_and_told(server: httpx.Client, main: Main) -> None:
    where = ("--server", url(server))
    body = {"script": "train.py", "nproc": 1, "launch": False}
    run = server.post("/api/v1/runs", json=body).json()["id"]
    assert main("target", run[:7], *where)[1] == f"run {run}: no target is set\n"
    said = main("target", run, "accuracy >= 0.9", "--why", "to ship", "--yes", *where)[1]
    assert said == f"run {run}: accuracy >= 0.9 is not met yet\n"
    shown = json.loads(main("target", run, "val/loss<=1e-3", "--json", "--yes", *where)[1])
    assert (shown["metric"], shown["direction"], shown["value"]) == ("val/loss", "<=", 0.001)
    for wrong in ("accuracy=0.9", "accuracy>0.9", ">=0.9", "accuracy>=high"):
        code, _, err = main("target", run, wrong, *where)
        assert (code, "give a metric, >= or <=, and a number" in err) == (2, True), wrong
    assert main("target", run, "a>=1", "--remove", *where)[0] == 2
    assert main("target", run, "a>=nan", "--yes", *where)[0] == 2
    assert main("target", run, "--remove", "--yes", *where)[1] == f"run {run}: no target is set\n"
    page = json.loads(main("audit", run, "--action", "run.target", "--json", *where)[1])
    assert [(row["why"], row["via"]) for row in page["items"]] == [
        *(("", "cli"), ("", "cli"), ("to ship", "cli"))
    ]


def test_a_change_at_the_same_moment_is_told(
    server: httpx.Client, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"script": "train.py", "nproc": 1, "launch": False}
    run = server.post("/api/v1/runs", json=body).json()["id"]
    call = Client.call

    def overtaken(client: Client, method: str, path: str, *rest: Any, **options: Any) -> Any:
        if method == "POST":  # another operator is faster
            stopped = server.put(f"/api/v1/runs/{run}/auto", json={"mode": "switch"}, headers=ANY)
            assert stopped.is_success
        return call(client, method, path, *rest, **options)

    monkeypatch.setattr(Client, "call", overtaken)
    code, _, err = main("switch", run, "chronica", "--yes", "--server", url(server))
    assert code == 2
    assert f"run {run} was changed by" in err
    assert "(run.auto)" in err
    assert the_run(server)["version"] == 0


def test_ids_are_whole_on_any_terminal(
    server: httpx.Client, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"script": "a/rather/long/name/of/a/script.py", "nproc": 1, "launch": False}
    run = server.post("/api/v1/runs", json=body).json()["id"]
    for columns in ("20", "40", "80"):
        monkeypatch.setenv("COLUMNS", columns)
        assert run in main("runs", "--server", url(server))[1]
