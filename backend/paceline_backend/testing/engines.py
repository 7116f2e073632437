"""Contract of engines: pytest cases that run against a real engine through a small harness.

The test module of an engine defines a fixture `harness` and imports the cases:

    from paceline_backend.testing.engines import ControlPlane, EngineContract

    class TestMyEngine(EngineContract):
        pass

See `docs/backends/writing-a-backend.md`. Cases that take minutes have the mark `long`.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest

from paceline.wire import ENDED
from paceline.wire.states import WAITING
from paceline_backend.testing.control_plane import TestedServer, until

SCRIPT = Path(__file__).parent / "training.py"
WAIT_S = 300.0


class Harness(Protocol):
    """A control plane next to a real engine, which has two nodes for the runs of one test.

    A `ControlPlane` can serve as `cluster`.
    """

    cluster: TestedServer
    backend: str

    def options(self) -> dict[str, Any]:
        """Return `backend_options` for a run that writes only below `cluster.folder`."""

    def jobs(self) -> Sequence[str]:
        """Return the engine's names of all waiting and running jobs, without those of `occupy`."""

    def occupy(self) -> None:
        """Occupy all nodes, so that jobs of runs have to wait."""

    def free(self) -> None:
        """Release the nodes that `occupy` has taken."""

    def cancel(self, job: str) -> None:
        """Cancel a job with the engine's own tools, as a user would."""

    def duplicate(self, job: str) -> None:
        """Submit a job with the label of another job, as a disconnected worker process does."""

    def kill_nodes(self, job: str) -> None:
        """Kill all processes of a job by SIGKILL, as if its nodes had lost power."""

    def vanish(self) -> None:
        """Make the engine unreachable. Its jobs continue."""

    def come_back(self) -> None:
        """Make the engine reachable again."""

    def secrets_seen(self, job: str) -> str:
        """Return all text that other users see of a job: the engine's output and command lines."""


def start(harness: Harness, least: int, most: int, epochs: int = 1000) -> str:
    """Create a run with `least` to `most` nodes that trains up to `epochs` epochs; return its ID.

    The run ends earlier if the file ``enough`` appears in its folder.
    """
    folder = Path(tempfile.mkdtemp(prefix="shared-", dir=harness.cluster.folder))
    body = {
        "script": str(SCRIPT),
        "args": [str(folder), str(epochs), "2", "0.1"],
        "nproc": 1,
        "nodes_min": least,
        "nodes_max": most,
        "name": "several",
        "backend": harness.backend,
        "backend_options": harness.options(),
    }
    return str(harness.cluster.api("POST", "/runs", body)["id"])


def queued(harness: Harness, run: str) -> str:
    """Wait until the engine has queued a run's first job; return the engine's name of the job."""

    def job() -> str | None:
        shown = harness.cluster.run(run)
        assert shown["state"] in WAITING, shown["message"]
        ref: str | None = shown["backend_jobs"]["jobs"]["0"]
        return ref if shown["state"] == "queued" else None

    return str(until(job, f"{run} in the queue", WAIT_S, 0.1))


def gone(harness: Harness) -> None:
    """Wait until the engine has no waiting or running job."""
    until(lambda: not harness.jobs(), "the end of all jobs", WAIT_S, 0.2)


def assert_ends_exact(harness: Harness, run: str) -> dict[str, Any]:
    """End a run after its current epoch, and check that each epoch has used each sample once.

    Return the run as the REST API describes it.
    """
    Path(harness.cluster.run(run)["args"][0], "enough").touch()
    ended = harness.cluster.ends(run, WAIT_S)
    assert ended["state"] == "finished", ended["message"]
    covered = harness.cluster.api("GET", f"/runs/{run}/coverage")
    assert covered["epochs"]
    assert all(epoch["exact"] for epoch in covered["epochs"]), covered
    gone(harness)
    return ended


def kill_server(cluster: TestedServer) -> None:
    """Kill the control plane with SIGKILL; its child processes then end themselves."""
    assert cluster.server is not None
    assert cluster.server.stdout is not None
    cluster.server.kill()
    cluster.server.wait()
    cluster.server.stdout.close()


def forget_job(cluster: TestedServer, run: str) -> None:
    """Delete the control plane's record of a run's first job.

    The database is then as if the worker process had been killed after submitting the job.
    """
    database = cluster.folder / "server" / "paceline.db"
    with sqlite3.connect(database) as connection:
        asked = json.dumps({"launch": 0, "jobs": {"0": None}})
        query = "UPDATE runs SET backend_jobs = ?, state = 'pending', message = NULL WHERE id = ?"
        assert connection.execute(query, (asked, run)).rowcount == 1
    connection.close()


class EngineContract:
    """Cases of the contract. Each case notes the engine and its version in pytest's report.

    The option ``--junitxml`` writes the report to a file.
    """

    @pytest.fixture(autouse=True)
    def _note_engine(self, harness: Harness, request: pytest.FixtureRequest) -> None:
        [backend] = _backends(harness)
        named = f"{backend['name']} {backend['version'] or ''}"
        request.node.user_properties.append(("engine", named))

    def test_a_run_trains_exactly_on_two_nodes(self, harness: Harness) -> None:
        run = start(harness, 2, 2)
        harness.cluster.reaches(run, 10, 2)
        nodes = harness.cluster.api("GET", f"/runs/{run}/nodes")
        assert len({node["node"] for node in nodes}) == 2
        [job] = harness.jobs()
        [token] = [each for each in harness.cluster.api("GET", "/tokens") if each["run"] == run]
        assert token["scope"] == "agent"
        assert f"pl_{token['id']}" not in harness.secrets_seen(job)
        assert assert_ends_exact(harness, run)["world"] == 2
        until(lambda: _revoked(harness, run), "the end of the nodes' token", WAIT_S, 0.2)

    @pytest.mark.long
    def test_a_run_waits_and_the_engine_goes_away_for_a_while(self, harness: Harness) -> None:
        harness.occupy()
        run = start(harness, 1, 1)
        job = queued(harness, run)
        until(
            lambda: job in str(harness.cluster.run(run)["message"]),
            "the reason why the run waits",
            WAIT_S,
            0.1,
        )
        harness.vanish()
        away = "does not answer"
        until(lambda: away in str(harness.cluster.run(run)["message"]), "the outage", WAIT_S, 0.1)

        def is_shown_away() -> bool:
            # The control plane caches this answer for a few seconds.
            [backend] = _backends(harness)
            return not backend["reachable"] and bool(backend["problem"])

        until(is_shown_away, "the engine to be reported unreachable", WAIT_S, 0.1)
        harness.come_back()
        until(
            lambda: away not in str(harness.cluster.run(run)["message"]),
            "the end of the outage",
            WAIT_S,
            0.1,
        )
        harness.free()
        harness.cluster.reaches(run, 4, 1)
        assert harness.cluster.run(run)["message"] is None
        assert_ends_exact(harness, run)

    def test_a_run_is_stopped_while_it_waits(self, harness: Harness) -> None:
        harness.occupy()
        run = start(harness, 2, 2)
        queued(harness, run)
        harness.cluster.api("POST", f"/runs/{run}/stop")
        gone(harness)
        assert harness.cluster.run(run)["state"] == "stopped"
        harness.free()

    def test_a_run_whose_job_somebody_cancels_is_stopped(self, harness: Harness) -> None:
        harness.occupy()
        run = start(harness, 2, 2)
        job = queued(harness, run)
        harness.cancel(job)
        ended = harness.cluster.ends(run, WAIT_S)
        assert ended["state"] == "stopped"
        assert job in ended["message"]
        harness.free()

    @pytest.mark.long
    def test_a_run_is_stopped_while_it_trains(self, harness: Harness) -> None:
        run = start(harness, 2, 2)
        harness.cluster.reaches(run, 4, 2)
        harness.cluster.api("POST", f"/runs/{run}/stop", {"force": True})
        assert harness.cluster.ends(run, WAIT_S)["state"] == "stopped"
        gone(harness)

    @pytest.mark.long
    def test_nobody_submits_a_run_twice(self, harness: Harness) -> None:
        """Check that a job is submitted once, even if the worker is killed before recording it."""
        harness.occupy()
        run = start(harness, 1, 1)
        job = queued(harness, run)
        kill_server(harness.cluster)
        forget_job(harness.cluster, run)
        harness.duplicate(job)
        assert len(harness.jobs()) == 2
        harness.cluster.start_server()
        until(lambda: list(harness.jobs()) == [job], "only the first job", WAIT_S, 0.2)
        assert queued(harness, run) == job
        harness.free()
        harness.cluster.reaches(run, 4, 1)
        kill_server(harness.cluster)
        harness.cluster.start_server()
        harness.cluster.reaches(run, 12, 1)
        assert list(harness.jobs()) == [job]
        assert_ends_exact(harness, run)

    @pytest.mark.long
    def test_a_node_is_lost_and_another_joins(self, harness: Harness) -> None:
        run = start(harness, 1, 2)
        harness.cluster.reaches(run, 8, 2)
        jobs = harness.cluster.run(run)["backend_jobs"]["jobs"]
        assert set(harness.jobs()) == set(jobs.values())
        harness.kill_nodes(jobs["1"])
        step = harness.cluster.run(run)["step"]
        harness.cluster.reaches(run, step + 4, 1)
        until(lambda: list(harness.jobs()) == [jobs["0"]], "the lost job's end", WAIT_S, 0.2)

        def is_known() -> bool:
            rows = harness.cluster.api("GET", f"/runs/{run}/nodes")
            return sum(row["state"] not in ENDED for row in rows) == 1

        until(is_known, "the control plane to record that the node has ended", WAIT_S, 0.2)
        harness.cluster.api("POST", f"/runs/{run}/nodes", {"nodes": 1})
        harness.cluster.reaches(run, harness.cluster.run(run)["step"] + 4, 2)
        assert_ends_exact(harness, run)

    @pytest.mark.long
    def test_a_run_grows_and_shrinks(self, harness: Harness) -> None:
        run = start(harness, 1, 2)
        harness.cluster.reaches(run, 4, 2)
        self._remove_node(harness, run)
        harness.cluster.reaches(run, harness.cluster.run(run)["step"] + 4, 1)
        harness.cluster.api("POST", f"/runs/{run}/nodes", {"nodes": 1})
        harness.cluster.reaches(run, harness.cluster.run(run)["step"] + 4, 2)
        self._remove_node(harness, run)
        harness.cluster.reaches(run, harness.cluster.run(run)["step"] + 4, 1)
        assert_ends_exact(harness, run)

    @staticmethod
    def _remove_node(harness: Harness, run: str) -> None:
        rows = harness.cluster.api("GET", f"/runs/{run}/nodes")
        leaves = next(row for row in rows if row["state"] == "running" and not row["host"])
        harness.cluster.api("DELETE", f"/runs/{run}/nodes/{leaves['node']}")
        until(lambda: len(harness.jobs()) == 1, "the end of the leaving job", WAIT_S, 0.2)

    @pytest.mark.long
    def test_a_run_whose_job_is_lost_fails_and_goes_on(self, harness: Harness) -> None:
        run = start(harness, 1, 1)
        harness.cluster.reaches(run, 8, 1)
        [job] = harness.jobs()
        harness.kill_nodes(job)
        ended = harness.cluster.ends(run, WAIT_S)
        assert ended["state"] == "failed"
        assert job in ended["message"]
        harness.cluster.api("POST", f"/runs/{run}/resume")
        until(lambda: harness.cluster.run(run)["attempt"] > 0, "the next attempt", WAIT_S, 0.1)
        assert_ends_exact(harness, run)

    def test_options_are_checked(self, harness: Harness) -> None:
        [backend] = _backends(harness)
        assert backend["reachable"]
        assert "server" in backend["options"]["properties"]


def _backends(harness: Harness) -> list[dict[str, Any]]:
    known = harness.cluster.api("GET", "/backends")
    return [each for each in known if each["name"] == harness.backend]


def _revoked(harness: Harness, run: str) -> bool:
    tokens = harness.cluster.api("GET", "/tokens")
    return all(token["revoked_at"] for token in tokens if token["run"] == run)
