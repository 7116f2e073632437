"""All ranks are killed, an operator resumes the run, and it ends as an undisturbed one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from paceline_backend.server.stack import Stack
from support import resuming_script
from support.e2e import PAUSE_S
from support.node import paceline
from support.resuming_script import BATCH, SAMPLES
from support.waiting import DEADLINE_S, TRAINING_S, until

pytestmark = pytest.mark.ranks
WORLD, POLICY = 2, "paceline"
PER_EPOCH = -(-SAMPLES // BATCH)


def start(
    stack: Stack, directory: Path, epochs: int, every: int, kills: list[int], **more: Any
) -> str:
    directory.mkdir()
    args = [str(directory), str(epochs), str(every), json.dumps(kills)]
    run = {"script": resuming_script.__file__, "args": args, "nproc": WORLD, "policy": POLICY}
    return str(stack.api("POST", "/runs", {**run, **more})["id"])


def ended(stack: Stack, run: str) -> dict[str, Any]:
    def over() -> Any:
        now = stack.api("GET", f"/runs/{run}")
        return now if now["state"] in ("finished", "failed", "stopped") else None

    now: dict[str, Any] = until(over, f"the end of run {run}", TRAINING_S, PAUSE_S)
    return now


def survive(stack: Stack, directory: Path, epochs: int, every: int, kills: list[int]) -> str:
    """A run that is resumed after each kill but the first, of which its launcher recovers."""
    run = start(stack, directory, epochs, every, kills, max_restarts=1)
    for attempt in range(2, len(kills) + 1):
        now = ended(stack, run)
        assert (now["state"], now["attempt"]) == ("failed", attempt - 1), now["message"]
        again = stack.api("POST", f"/runs/{run}/resume", {"max_restarts": 0})
        assert again["first_attempt"] == attempt
    now = ended(stack, run)
    assert (now["state"], now["attempt"]) == ("finished", len(kills)), now["message"]
    return run


def check(stack: Stack, tmp_path: Path, epochs: int, every: int, kills: list[int]) -> None:
    calm = start(stack, tmp_path / "calm", epochs, every, [])
    assert ended(stack, calm)["state"] == "finished"
    run = survive(stack, tmp_path / "killed", epochs, every, kills)
    done = [
        tuple(json.loads(line))
        for rank in range(WORLD)
        for line in (tmp_path / "killed" / f"steps-{rank}").read_text().splitlines()
    ]
    for attempt, kill in enumerate(kills):
        assert max(step for number, step in done if number == attempt) == kill - 1
        first = min(step for number, step in done if number == attempt + 1)
        assert 0 <= kill - first <= every, f"after the kill in step {kill}"

    def settled() -> bool:
        return bool(stack.api("GET", f"/runs/{run}/coverage")["exact"])

    until(
        settled, f"exact coverage: {stack.api('GET', f'/runs/{run}/coverage')}", DEADLINE_S, PAUSE_S
    )
    coverage = stack.api("GET", f"/runs/{run}/coverage")
    assert [epoch["used"] for epoch in coverage["epochs"]] == [SAMPLES] * epochs
    attempts = stack.api("GET", f"/runs/{run}/attempts")
    assert [row["attempt"] for row in attempts] == list(range(len(kills) + 1))
    assert all(row["again"] <= every for row in attempts)
    losses = [float((tmp_path / name / "loss").read_text()) for name in ("calm", "killed")]
    assert losses[1] == pytest.approx(losses[0], rel=0, abs=1e-5)


@pytest.mark.timeout(1200)
def test_a_killed_run_is_resumed(stack: Stack, tmp_path: Path) -> None:
    """The first time its launcher starts it again, then an operator does."""
    check(stack, tmp_path, epochs=3, every=3, kills=[4, 16])


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_of_the_terminal_goes_on_there(stack: Stack, tmp_path: Path) -> None:
    data = ("--server", stack.url, "--data", str(tmp_path / "mine"))
    here = ("--nproc", "2", "--node", "here")
    arguments = (str(tmp_path), "2", "3", "[5]")
    process = paceline("run", *data, *here, resuming_script.__file__, *arguments)
    _, err = process.communicate(timeout=TRAINING_S)
    assert process.returncode == 137, err
    [run] = stack.api("GET", "/runs")["items"]
    other = ("--server", stack.url, "--data", str(tmp_path / "other"))
    early = paceline("resume", run["id"], "--yes", *other)
    _, err = early.communicate(timeout=DEADLINE_S)
    assert early.returncode == 2
    assert f"`paceline resume {run['id']}` on its machine" in err, "another directory of data"
    process = paceline("resume", run["id"][:6], "--yes", *data)
    _, err = process.communicate(timeout=TRAINING_S)
    assert process.returncode == 0, err
    assert f"run {run['id']} continues with attempt 1" in err
    assert "resuming from checkpoint" in err
    until(lambda: ended(stack, run["id"])["state"] == "finished", "its end", DEADLINE_S, PAUSE_S)
    now = stack.api("GET", f"/runs/{run['id']}")
    assert (now["attempt"], now["first_attempt"]) == (1, 1)
    again = paceline("resume", run["id"], "--yes", *data)
    _, err = again.communicate(timeout=DEADLINE_S)
    assert again.returncode == 2
    assert "has finished: nothing is left to train" in err


@pytest.mark.long
def test_a_driver_of_the_terminal_goes_on_as_one(stack: Stack, tmp_path: Path) -> None:
    data = ("--server", stack.url, "--data", str(tmp_path / "mine"))
    script = tmp_path / "driver.py"
    script.write_text("import os; print('DRIVER', os.environ['PACELINE_ATTEMPT']); os._exit(3)")
    process = paceline("run", "--driver", "--nproc", "2", *data, str(script))
    out, err = process.communicate(timeout=TRAINING_S)
    assert (process.returncode, out) == (3, "DRIVER 0\n"), err
    assert "it follows, including what the script prints for its ranks" in err
    [run] = stack.api("GET", "/runs?limit=1")["items"]
    ended(stack, run["id"])
    process = paceline("resume", run["id"], "--yes", *data)
    out, err = process.communicate(timeout=TRAINING_S)
    assert (process.returncode, out) == (3, "DRIVER 1\n"), err


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twenty_kills(stack: Stack, tmp_path: Path) -> None:
    steps, every = 30 * PER_EPOCH, 10
    kills = sorted(random.Random(12).sample(range(every, steps), 20))
    check(stack, tmp_path, epochs=30, every=every, kills=kills)
