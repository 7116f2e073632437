"""Runs that stand still, and what docs/rest.md and docs/training-scripts.md promise of them.

The runs of a module stand still at the same time, so that their ten seconds pass only once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from paceline_backend.server.stack import Stack
from support.command_line import Main, in_process
from support.reported import Plane
from support.waiting import TRAINING_S, until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).parents[2] / "support" / "hanging_script.py"
AFTER_S = 10
STEP = 8  # in which they stand still
ENDED = ("finished", "failed", "stopped")


@dataclass
class Runs:
    """Runs that stand still, by their way to do so."""

    stack: Stack
    folder: Path
    ids: dict[str, str] = field(default_factory=dict)

    def start(self, way: str, nproc: int = 2, **fields: Any) -> None:
        (self.folder / way).mkdir()
        body = {
            "script": str(SCRIPT),
            "args": [str(self.folder / way), way, str(STEP)],
            "nproc": nproc,
            "name": way,
        }
        self.ids[way] = self.stack.api("POST", "/runs", body | fields)["id"]

    def id(self, way: str) -> str:
        """The run's id; it is started if it has not been."""
        if way not in self.ids:
            self.start(way, **FIELDS.get(way, {}))
        return self.ids[way]

    def stop(self) -> None:
        for way in self.ids:
            if self.get(way)["state"] not in ENDED:
                self.stack.api("POST", f"/runs/{self.ids[way]}/stop", {"force": True})
                until(lambda way=way: self.get(way)["state"] in ENDED, f"the end of {way}", 60, 0.2)

    def asking(self, way: str) -> list[str]:
        return ["--after", str(AFTER_S), "--server", self.stack.url, self.id(way)]

    def let_go(self, way: str) -> None:
        (self.folder / way / "go").touch()

    def get(self, way: str, path: str = "") -> Any:
        return self.stack.api("GET", f"/runs/{self.id(way)}{path}")

    def look(self, way: str) -> dict[str, Any]:
        now = self.get(way)
        assert now["state"] not in ENDED, now["message"]
        said: dict[str, Any] = self.get(way, f"/hang?after_s={AFTER_S}")
        return said

    def hangs(self, way: str, *holding: int) -> dict[str, Any]:
        """What is said of it once it is said to hang for these ranks."""

        def said() -> dict[str, Any] | None:
            now = self.look(way)
            return now if now["hung"] and now["holding"] == [*holding] else None

        try:
            return until(said, f"{way} to hang", 180, 0.5)
        except AssertionError as error:
            raise AssertionError(f"{way}: {self.look(way)}") from error

    def since(self, way: str, seconds: float = 20) -> dict[str, Any]:
        """What is said of it once it has stood still for so long."""
        until(lambda: self.look(way)["since_s"] > seconds, f"{way} to stand still", 120, 0.5)
        return self.look(way)

    def stacks(self, way: str, rank: int) -> dict[str, Any]:
        [stack] = self.get(way, f"/stacks?rank={rank}")["stacks"]
        return dict(stack)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("hangs")
    with Stack(folder / "data", 0) as stack:
        yield Runs(stack, folder)


@pytest.fixture(scope="module")
def runs(started: Runs) -> Runs:
    started.start("loader and lock", 3)
    started.start("collective")
    started.start("suspended")
    started.start("all evaluate")
    return started


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    return in_process(monkeypatch, capsys)


def phases(said: dict[str, Any]) -> dict[int, str]:
    return {row["rank"]: row["phase"] for row in said["phases"]}


def line_of(function: str) -> str:
    """Matches a frame in one of the script's functions."""
    return rf"hanging_script\.py:\d+ in {function}\b"


def test_a_rank_in_its_loader_and_a_rank_in_a_lock(runs: Runs) -> None:
    said = runs.hangs("loader and lock", 1, 2)
    assert said["waiting"] == [0]
    assert phases(said) == {0: "sync", 1: "data", 2: "compute"}
    assert said["silent"] == []
    assert said["since_s"] >= AFTER_S
    assert "ank 0 is in the reduction of the gradients" in said["words"]
    assert "waiting for a batch" in said["words"]
    assert re.search(r"ranks? 1\b", said["words"]), said["words"]
    assert re.search(r"rank(s 1 and)? 2\b", said["words"]), said["words"]
    assert re.fullmatch(
        line_of("read_from_a_dead_disk"), runs.stacks("loader and lock", 1)["frame"]
    )
    assert re.fullmatch(line_of("take_the_lock"), runs.stacks("loader and lock", 2)["frame"])
    # Rank 0 is in C, where the gradients are all-reduced.
    assert "backward" in runs.stacks("loader and lock", 0)["text"]


def test_the_newest_step_is_the_last_one_that_all_ranks_have_told_of(runs: Runs) -> None:
    """Rank 1 waits for its batch of step 8; the others are in step 8, and have told of step 7."""
    said = runs.hangs("loader and lock", 1, 2)
    assert said["step"] == STEP - 2
    assert {row["rank"]: row["step"] for row in said["phases"]}[1] == STEP - 1


def test_a_rank_in_a_collective_that_the_other_does_not_enter(runs: Runs) -> None:
    said = runs.hangs("collective", 0)
    assert said["waiting"] == [1]
    assert phases(said) == {0: "compute", 1: "sync"}
    assert "Rank 1 is in the reduction of the gradients. It waits for rank 0" in said["words"]
    assert re.search(r"waits? for rank 0, which is in the loop's body", said["words"])
    stack = runs.stacks("collective", 0)
    assert re.fullmatch(line_of("stand_still"), stack["frame"])
    assert "barrier" in stack["text"]


def test_a_rank_that_is_suspended(runs: Runs) -> None:
    said = runs.hangs("suspended", 1)
    assert (said["waiting"], said["silent"]) == ([0], [1])
    assert "No reports from rank 1: suspended, or disconnected" in said["words"]
    stack = runs.stacks("suspended", 1)
    assert not stack["frame"]
    assert "suspended" in stack["problem"]
    assert runs.stacks("suspended", 0)["problem"] is None


def test_a_long_evaluation_of_all_ranks_is_no_hang(runs: Runs, main: Main) -> None:
    """Somebody asks for the stacks meanwhile, which harms nobody: the run goes on to its end."""
    until(lambda: len(runs.look("all evaluate")["phases"]) == 2, "both to evaluate", 90, 0.5)
    said = runs.look("all evaluate")
    assert not said["hung"]
    assert phases(said) == {0: "script", 1: "script"}
    assert (said["waiting"], said["holding"]) == ([], [])
    code, out, _ = main("hang", *runs.asking("all evaluate"))
    assert code == 0
    assert "Ranks 0 and 1 are in the script's own code outside of the loop" in out
    for rank in (0, 1):
        frame = runs.stacks("all evaluate", rank)["frame"]
        assert re.fullmatch(line_of("evaluate"), frame)
    runs.let_go("all evaluate")
    until(lambda: runs.get("all evaluate")["state"] in ENDED, "the run's end", TRAINING_S, 0.2)
    ended = runs.get("all evaluate")
    assert (ended["state"], ended["attempt"]) == ("finished", 0), ended["message"]
    assert not runs.get("all evaluate", "/hang")["hung"]
    assert runs.get("all evaluate", "/coverage")["exact"]
    code, _, err = main("stacks", "--server", runs.stack.url, runs.id("all evaluate"))
    assert (code, "has ended" in err) == (2, True)


def test_the_command_line_says_where_in_the_code_a_rank_is(runs: Runs, main: Main) -> None:
    runs.hangs("loader and lock", 1, 2)
    code, out, _ = main("hang", "--stacks", *runs.asking("loader and lock"))
    assert code == 4
    assert "rank 1" in out
    assert re.search(line_of("read_from_a_dead_disk"), out)
    assert re.search(line_of("take_the_lock"), out)
    of_rank = ["--rank", "1", "--server", runs.stack.url, runs.id("loader and lock")]
    code, out, err = main("stacks", *of_rank)
    assert code == 0, err
    assert re.search(": " + line_of("read_from_a_dead_disk"), out.splitlines()[0])


# What takes longer


# Fields of runs that need others than the default.
FIELDS: dict[str, dict[str, Any]] = {
    "one evaluates": {"restart_hung_s": 10, "max_restarts": 1},
    "warms up": {"restart_hung_s": 10, "max_restarts": 1},
    "resumed": {"max_restarts": 1},
    "first attempt": {"restart_hung_s": 10, "max_restarts": 1},
    "loader": {"restart_hung_s": 10},
    "both": {"restart_hung_s": 10, "max_restarts": 1},
    "slow": {"restart_hung_s": 10, "max_restarts": 1},
}


@pytest.fixture
def slow_runs(started: Runs, tmp_path: Path) -> Iterator[Runs]:
    """Runs that start when a test first asks for them, and end with the test.

    Side by side, their ranks would load a small machine so much that healthy runs seem to hang.
    """
    runs = Runs(started.stack, tmp_path)
    yield runs
    runs.stop()


@pytest.mark.long
def test_a_run_goes_on_when_its_lock_is_released(slow_runs: Runs) -> None:
    assert phases(slow_runs.hangs("lock", 1)) == {0: "sync", 1: "compute"}
    slow_runs.let_go("lock")
    until(lambda: slow_runs.get("lock")["state"] in ENDED, "the run's end", TRAINING_S, 0.2)
    ended = slow_runs.get("lock")
    assert (ended["state"], ended["attempt"]) == ("finished", 0), ended["message"]
    assert slow_runs.get("lock", "/coverage")["exact"]


@pytest.mark.long
def test_a_rank_that_evaluates_while_the_other_waits(slow_runs: Runs) -> None:
    """It is said to hang, and left alone."""
    said = slow_runs.hangs("one evaluates", 1)
    assert said["waiting"] == [0]
    assert phases(said)[1] == "script"
    slow_runs.since("one evaluates", 45)
    assert slow_runs.get("one evaluates")["attempt"] == 0
    assert "run.restart-hung" not in audited(slow_runs, "one evaluates")


@pytest.mark.long
def test_a_rank_that_is_suspended_while_the_other_saves(slow_runs: Runs) -> None:
    """Rank 0 waits in its checkpoint for what rank 1 has yet to say."""
    said = slow_runs.since("suspended, saving")
    assert "waiting for a batch" not in said["words"]
    assert (said["hung"], said["waiting"], said["holding"], said["silent"]) == (True, [0], [1], [1])


@pytest.mark.long
def test_ranks_that_save_for_long(slow_runs: Runs) -> None:
    """Each rank asks its objects for their states before any of them trains on."""
    said = slow_runs.since("saving")
    assert "Ranks 0 and 1 are saving a checkpoint" in said["words"]
    assert not said["hung"]


@pytest.mark.long
def test_a_rank_whose_first_batch_never_comes(slow_runs: Runs) -> None:
    said = slow_runs.hangs("first batch", 1)
    assert said["step"] is None
    assert phases(said)[1] == "data"
    assert said["waiting"] == [0]
    assert "waiting for a batch" in said["words"]


@pytest.mark.long
def test_a_data_loading_process_that_stands_still(slow_runs: Runs) -> None:
    said = slow_runs.hangs("worker", 1)
    assert (said["waiting"], phases(said)[1]) == ([0], "data")


@pytest.fixture
def before_wrapping(slow_runs: Runs) -> Runs:
    until(lambda: slow_runs.get("before wrapping")["state"] == "running", "its start", 90, 0.5)
    slow_runs.since("worker", 30)
    return slow_runs


@pytest.mark.long
@pytest.mark.xfail(strict=True, reason="nothing is said before the ranks have come to their loops")
def test_a_rank_that_does_not_come_to_wrap_its_model(before_wrapping: Runs) -> None:
    said = before_wrapping.look("before wrapping")
    assert said["words"]
    assert said["hung"]


@pytest.mark.long
def test_a_rank_that_does_not_come_to_its_loop_is_not_cut_off(slow_runs: Runs) -> None:
    said = slow_runs.hangs("before the loop", 1)
    assert (said["waiting"], said["step"]) == ([0], None)
    assert phases(said)[1] == "script"
    assert said["silent"] == []
    assert "disconnected" not in said["words"]


@pytest.mark.long
def test_time_before_the_loop_is_left_alone(slow_runs: Runs) -> None:
    slow_runs.since("warms up", 45)
    assert slow_runs.get("warms up")["attempt"] == 0
    assert "run.restart-hung" not in audited(slow_runs, "warms up")


@pytest.mark.long
def test_a_rank_that_sleeps_in_user_code_between_steps(slow_runs: Runs) -> None:
    said = slow_runs.hangs("user code", 1)
    assert phases(said) == {0: "sync", 1: "compute"}
    frame = slow_runs.stacks("user code", 1)["frame"]
    assert re.fullmatch(line_of("sleep_in_user_code"), frame)


@pytest.mark.long
def test_a_hang_after_a_restart(slow_runs: Runs) -> None:
    until(lambda: slow_runs.get("resumed")["attempt"] == 1, "the restart", TRAINING_S, 0.2)
    said = slow_runs.hangs("resumed", 1)
    assert (said["waiting"], said["step"]) == ([0], STEP - 1)


@pytest.mark.long
def test_a_hung_run_starts_again(slow_runs: Runs) -> None:
    def goes_on() -> bool:
        now = slow_runs.get("first attempt")
        return now["attempt"] == 1 and (now["step"] or 0) > STEP + 4

    until(goes_on, "steps of the second attempt", TRAINING_S, 0.2)
    rows = slow_runs.get("first attempt", "/audit")["items"]
    [row] = [row for row in rows if row["action"] == "run.restart-hung"]
    assert row["who"] == "the control plane"
    assert "rank 1" in row["why"].lower(), row
    log = slow_runs.get("first attempt", "/logs/1?output=stderr&attempt=0&tail=200")["text"]
    assert re.search(r"hanging_script\.py.* in take_the_lock", log)
    assert not slow_runs.look("first attempt")["hung"]


@pytest.mark.long
def test_a_hung_run_without_restarts_fails_and_says_how_it_hung(slow_runs: Runs) -> None:
    until(lambda: slow_runs.get("loader")["state"] in ENDED, "the end", TRAINING_S, 0.2)
    ended = slow_runs.get("loader")
    assert ended["state"] == "failed"
    assert re.search(r"rank 1\b.*waiting for a batch", ended["message"]), ended["message"]


@pytest.mark.long
def test_ranks_that_are_all_in_the_loops_body(slow_runs: Runs) -> None:
    """None waits for another in what the library sees; nobody ends what may be an evaluation."""
    until(lambda: len(slow_runs.look("both")["phases"]) == 2, "phases", 120, 0.5)
    assert "loop" in slow_runs.look("both")["words"]
    said = slow_runs.hangs("both")
    assert said["since_s"] >= 10 * AFTER_S
    assert said["waiting"] == []
    assert phases(said) == {0: "compute", 1: "compute"}
    assert "loop" in said["words"], said["words"]
    assert slow_runs.get("both")["attempt"] == 0
    assert "run.restart-hung" not in audited(slow_runs, "both")


@pytest.mark.long
def test_a_very_slow_run_that_moves_is_no_hang(slow_runs: Runs) -> None:
    seen = []

    def enough() -> bool:
        seen.append(slow_runs.look("slow"))
        return (slow_runs.get("slow")["step"] or 0) >= 5

    until(enough, "five steps", TRAINING_S, 0.5)
    assert not any(said["hung"] for said in seen[20:]), "its pace is known"
    assert slow_runs.get("slow")["attempt"] == 0


def audited(runs: Runs, way: str) -> list[str]:
    return [row["action"] for row in runs.get(way, "/audit")["items"]]


# Before and after


@pytest.mark.parametrize(("seconds", "status"), [(9, 422), (10, 201), (86_400, 201), (86_401, 422)])
def test_the_bounds_of_restart_hung(plane: Plane, seconds: float, status: int) -> None:
    answer = plane.start(launch=False, restart_hung_s=seconds)
    assert answer.status_code == status


def test_what_does_not_train_does_not_hang(plane: Plane) -> None:
    run = plane.start(launch=False).json()["id"]
    said = plane.get(f"runs/{run}/hang")
    assert (said["hung"], said["phases"], said["waiting"]) == (False, [], [])
    assert plane.ask("POST", f"runs/{run}/stop").status_code == 202
    assert not plane.get(f"runs/{run}/hang")["hung"]
    assert plane.ask("GET", f"runs/{run}/stacks").status_code == 409
    assert plane.ask("GET", "runs/nobody/hang").status_code == 404
    assert plane.ask("GET", f"runs/{run}/hang?after_s=-1").status_code == 422


def test_a_run_that_has_not_begun_is_said_to_wait(plane: Plane, main: Main) -> None:
    run = plane.start(launch=False).json()["id"]
    code, out, _ = main("hang", "--server", plane.url, run)
    assert code == 0
    assert "goes on" not in out
    assert "pending" in out or "not begun" in out


def test_stacks_are_not_for_viewers(plane: Plane) -> None:
    run = plane.start(launch=False).json()["id"]
    secret = plane.ask("POST", "tokens", name="v", scope="viewer").json()["token"]
    viewer = {"Authorization": f"Bearer {secret}"}
    assert plane.client.get(f"runs/{run}/stacks", headers=viewer).status_code == 403
    assert plane.client.get(f"runs/{run}/hang", headers=viewer).status_code == 200
