"""Server, agent and ranks of this release and of the one before, in each mixture."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from paceline.core.errors import InputError
from paceline.node import tokens
from paceline_backend.server.stack import Stack
from support import skew_script
from support.e2e import PAUSE_S, all_steps
from support.node import paceline
from support.releases import build, downgrade, replace_server, stop_server, using
from support.waiting import DEADLINE_S, until

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.timeout(1200)]

WORLD = 2
EPOCHS = 10_000  # more than any test waits for: each run is stopped
TOKEN = "admin-of-tests-0123456789abcdef"
PARTS = ["snapshot", "workers", "steps", "segments", "coverage", "report", "attempts", "audit"]
EMULATE = json.dumps({"a_s": [0.0005, 0.001], "b_s": [0.2, 0.2]})


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("release"))


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """Nothing of it runs yet."""
    made = Stack(tmp_path / "data", 0)
    made.data.mkdir(0o700)
    yield made
    made.stop()


def launch(stack: Stack, **more: Any) -> str:
    body = {
        "script": skew_script.__file__,
        "args": [str(EPOCHS)],
        "nproc": WORLD,
        "policy": "paceline",
        "env": {"PACELINE_EMULATE": EMULATE},
    }
    return str(stack.api("POST", "/runs", {**body, **more})["id"])


def step_of(stack: Stack, run: str) -> int:
    now = stack.api("GET", f"/runs/{run}")
    assert now["state"] not in ("failed", "stopped"), now["message"]
    return -1 if now["step"] is None else int(now["step"])


def last_plan(stack: Stack, run: str) -> int:
    segments = stack.api("GET", f"/runs/{run}/segments?limit=5000")
    return max((s["first_step"] for s in segments if s["source"] == "controller"), default=-1)


def trains(stack: Stack, *runs: str) -> None:
    """Until each run has trained further."""
    before = [step_of(stack, run) for run in runs]
    for run, newest in zip(runs, before, strict=True):
        until(lambda: step_of(stack, run) > newest + 10, f"steps of {run}", 120, PAUSE_S)  # noqa: B023


def planned(stack: Stack, *runs: str) -> None:
    """Until each run has trained further, with plans of the server that works now."""
    before = [last_plan(stack, run) for run in runs]
    trains(stack, *runs)
    for run, newest in zip(runs, before, strict=True):
        until(lambda: last_plan(stack, run) > newest, f"a plan of {run}", 120, PAUSE_S)  # noqa: B023


def ranks(stack: Stack) -> set[int]:
    assert stack.agent is not None
    return {
        child.pid
        for child in psutil.Process(stack.agent.pid).children(recursive=True)
        if "skew_script" in " ".join(child.cmdline()) and "RANK" in child.environ()
    }


def complete(stack: Stack, run: str, *, force: bool = False) -> None:
    """Stops a run: nothing of it is missing."""
    stack.api("POST", f"/runs/{run}/stop", {"force": force})

    def over() -> Any:
        now = stack.api("GET", f"/runs/{run}")
        return now if now["state"] in ("finished", "failed", "stopped") else None

    now = until(over, f"the end of run {run}", 120, PAUSE_S)
    # Where the script came to its last line, the server of the release before says "finished".
    assert now["state"] in ("stopped", "stopped" if force else "finished"), now["message"]
    path = f"/runs/{run}"
    # A forced end leaves a step that not all ranks have finished.
    arrived = lambda: stack.api("GET", f"{path}/coverage")["exact"]  # noqa: E731
    until(arrived, f"all of run {run}: {stack.api('GET', f'{path}/coverage')}", DEADLINE_S, PAUSE_S)
    steps = all_steps(stack, run)["step"]
    assert steps == list(range(len(steps))), "a row is missing"
    assert len(steps) >= now["step"]
    assert [worker["missing"] for worker in stack.api("GET", f"{path}/workers")] == [0] * WORLD


def shown(stack: Stack, run: str) -> None:
    """Pages and REST of this release's server show a run."""
    token = tokens.kept(stack.url)
    assert token is not None
    headers = {"Authorization": f"Bearer {token}", "Accept": "text/html"}
    with httpx.Client(
        base_url=stack.url, headers=headers, timeout=DEADLINE_S, trust_env=False
    ) as http:
        calls = [f"/api/v1/runs/{run}", *(f"/api/v1/runs/{run}/{part}" for part in PARTS)]
        for path in ("/", f"/runs/{run}", "/metrics", "/api/v1/nodes", *calls):
            answer = http.get(path)
            assert answer.status_code == 200, (path, answer.text)


def refuses_to_resume(stack: Stack, folder: Path) -> None:
    (folder / "fails.py").write_text("raise SystemExit(1)")
    run = launch(stack, script=str(folder / "fails.py"), nproc=1, env={})
    failed = lambda: stack.api("GET", f"/runs/{run}")["state"] == "failed"  # noqa: E731
    until(failed, f"the failure of {run}", 120, PAUSE_S)
    with pytest.raises(InputError, match="its agent has no session"):
        stack.api("POST", f"/runs/{run}/resume")


def test_server_is_upgraded_and_taken_back_under_an_earlier_agent(
    stack: Stack, before: Path, tmp_path: Path
) -> None:
    with using(before):
        stack.start_server()
        stack.start_agent()
    first = launch(stack)
    planned(stack, first)
    processes = ranks(stack)
    assert len(processes) == WORLD

    replace_server(stack, None)
    planned(stack, first)
    shown(stack, first)
    second = launch(stack)
    stack.api("POST", f"/runs/{first}/policy", {"policy": "chronica"})
    planned(stack, first, second)
    assert stack.api("GET", f"/runs/{first}")["policy"] == "chronica"
    refuses_to_resume(stack, tmp_path)

    stop_server(stack)
    downgrade(stack)
    with using(before):
        stack.start_server()
    planned(stack, first, second)
    assert processes <= ranks(stack), "the same ranks train on"
    complete(stack, first)
    complete(stack, second)

    replace_server(stack, None)
    for run in (first, second):
        shown(stack, run)
        assert stack.api("GET", f"/runs/{run}/coverage")["exact"]


def test_server_is_upgraded_and_taken_back_under_an_agent_of_this_release(
    stack: Stack, before: Path
) -> None:
    with using(before):
        stack.start_server()
    stack.start_agent()
    first = launch(stack)
    planned(stack, first)
    processes = ranks(stack)

    replace_server(stack, None)
    planned(stack, first)
    until(lambda: session_of(stack), "a session of the agent", DEADLINE_S, PAUSE_S)
    second = launch(stack)
    planned(stack, first, second)
    assert processes <= ranks(stack)

    stop_server(stack)
    downgrade(stack)
    with using(before):
        stack.start_server()
    planned(stack, first)
    # The second run has a user of the bus and a key, which nobody of 0.1.0 knows: it goes on by
    # itself, and the agent delivers what its ranks spool.
    trains(stack, second)
    assert len(ranks(stack)) == 2 * WORLD
    complete(stack, first)
    complete(stack, second, force=True)


def test_an_earlier_agent_and_an_earlier_paceline_run_start_under_this_server(
    tmp_path: Path, before: Path
) -> None:
    stack = Stack(tmp_path / "data", 0, token=TOKEN)
    stack.data.mkdir(0o700)
    try:
        stack.start_server()
        with using(before):
            stack.start_agent()
        run = launch(stack)
        planned(stack, run)
        complete(stack, run)
        with using(before):
            foreground(stack, tmp_path, {"PACELINE_TOKEN": TOKEN})
    finally:
        stack.stop()


def test_paceline_run_of_this_release_under_an_earlier_server(
    stack: Stack, before: Path, tmp_path: Path
) -> None:
    with using(before):
        stack.start_server()
    foreground(stack, tmp_path, {})


def foreground(stack: Stack, folder: Path, environment: dict[str, str]) -> None:
    """Trains two epochs by `paceline run`: nothing is missing."""
    where = ("--server", stack.url, "--data", str(folder / "own"), "--nproc", str(WORLD))
    process = paceline("run", *where, skew_script.__file__, "2", env=environment)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    run = stack.api("GET", "/runs")["items"][0]
    arrived = lambda: stack.api("GET", f"/runs/{run['id']}/coverage")["exact"]  # noqa: E731
    until(arrived, "all of the run", DEADLINE_S, PAUSE_S)
    steps = all_steps(stack, run["id"])["step"]
    assert steps == list(range(2 * skew_script.PER_EPOCH))


def session_of(stack: Stack) -> bool:
    (node,) = stack.api("GET", "/nodes")
    return bool(node["alive"] and node.get("signed", True))
