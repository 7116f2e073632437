"""What Ray's API is asked, and what its answers mean: an API that a test makes up."""

from __future__ import annotations

import io
import json
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from paceline_backend import backends
from paceline_backend.backends import ray_api
from paceline_backend.backends.ray import Ray, RayOptions

ORDER = backends.Order(
    label="paceline.plane.3f9a1c07be52.0.0",
    run="3f9a1c07be52",
    nodes=2,
    nproc=4,
    cwd="/shared",
    options=RayOptions(
        cpus_per_node=8, gpus_per_node=1, resources={"rack": 0.5}, setup="module load 'x'"
    ),
    server="http://head:8000",
    token="pl_1_secret",
    avoid=("4f", "5e"),
)
REFUSED = (
    "Traceback …\nRuntimeError: Request failed with status code 400: Traceback …\nValueError: "
)


@dataclass
class Api:
    """What it answers, by the beginning of method and path; and what it was asked."""

    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    def body(self, request: str) -> bytes:
        """Of the only request that begins like this."""
        [body] = [body for line, _, body in self.asked if line.startswith(request)]
        return body


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    made = Api()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            line = f"{self.command} {self.path}"
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            made.asked.append((line, dict(self.headers), body))
            known = [value for start, value in made.answers.items() if line.startswith(start)]
            status, content = known[0] if known else (404, "nothing is here")
            text = content if isinstance(content, str) else json.dumps(content)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = do_PUT = answer  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "ray's")
        yield made
        server.shutdown()
        thread.join()


def row(number: int, status: str, **more: Any) -> dict[str, Any]:
    """A job of ours in Ray's list."""
    label = f"paceline.plane.run.0.{number}"
    return {"submission_id": label, "status": status, "metadata": {"paceline": label}, **more}


def group(number: int, state: str, **more: Any) -> dict[str, Any]:
    """Its placement group."""
    return {"name": f"paceline.plane.run.0.{number}", "state": state, **more}


def test_what_ray_gets(api: Api) -> None:
    """The nodes' token is in the package only, which only its owner reads on the nodes."""
    api.answers = {"PUT /api/packages/gcs/_ray_pkg_": (200, ""), "POST /api/jobs/": (200, {})}
    assert Ray().submit(ORDER) == ORDER.label
    assert all(headers["Authorization"] == "Bearer ray's" for _, headers, _ in api.asked)
    job = json.loads(api.body("POST /api/jobs/"))
    assert job["submission_id"] == job["metadata"]["paceline"] == ORDER.label
    assert job["runtime_env"]["working_dir"].startswith("gcs://_ray_pkg_")
    assert "secret" not in json.dumps(job)
    with zipfile.ZipFile(io.BytesIO(api.body("PUT /api/packages/gcs/_ray_pkg_"))) as package:
        modes = {file.filename: file.external_attr >> 16 for file in package.filelist}
        settings = json.loads(package.read("paceline_ray.json"))
    assert modes == {"paceline_ray.py": 0o100600, "paceline_ray.json": 0o100600}
    assert settings["bundle"] == {"CPU": 8, "GPU": 1, "rack": 0.5}
    assert settings["avoid"] == ["4f", "5e"]
    assert settings["env"]["PACELINE_TOKEN"] == "pl_1_secret"
    assert settings["env"]["OMP_NUM_THREADS"] == "2"
    assert settings["slot"] == "3f9a1c07be52.0.0"
    assert settings["script"].startswith("module load 'x'\nexec ")


def test_a_package_that_ray_has_is_not_sent_again(api: Api) -> None:
    api.answers = {"GET /api/packages/gcs/_ray_pkg_": (200, ""), "POST /api/jobs/": (200, {})}
    Ray().submit(ORDER)
    assert [line.partition(" ")[0] for line, _, _ in api.asked] == ["GET", "POST"]


@pytest.mark.parametrize(
    "status, said, raised",
    [
        (500, REFUSED + "the job is too large", backends.EngineRefusedError),
        (400, "entrypoint is missing", backends.EngineRefusedError),
        (500, "No available agent to submit job", backends.EngineAwayError),
        (503, "upstream is away", backends.EngineAwayError),
        (401, "Unauthorized", backends.EngineAwayError),
        (403, "Forbidden", backends.EngineAwayError),
    ],
)
def test_what_ray_says(api: Api, status: int, said: str, raised: type[Exception]) -> None:
    api.answers = {"PUT /api/packages/": (200, ""), "POST /api/jobs/": (status, said)}
    words = "RAY_AUTH_TOKEN" if status in (401, 403) else said[-20:]
    with pytest.raises(raised, match=words):
        Ray().submit(ORDER)


def test_ray_takes_a_job_once(api: Api) -> None:
    said = f"{REFUSED}Job with submission_id {ORDER.label} already exists. Please use another."
    api.answers = {"PUT /api/packages/": (200, ""), "POST /api/jobs/": (500, said)}
    assert Ray().submit(ORDER) == ORDER.label


def test_what_jobs_are(api: Api) -> None:
    log = "It failed with exit code 1, last available logs:\nNode 0 …\n"
    said = log + "nodes failed: node 1: exit code 7\nlate\n"
    driver = "JOB_ENTRYPOINT_COMMAND_ERROR"
    wants = {"unit_resources": {"CPU": 4.0, "GPU": 0.5}}
    rows = [
        row(0, "PENDING", message="It may wait for the runtime environment."),
        row(1, "RUNNING", message="It runs."),
        row(2, "RUNNING"),
        row(3, "RUNNING"),
        row(4, "RUNNING"),
        row(5, "STOPPED", message="It was stopped."),
        row(6, "FAILED", message=said, error_type=driver),
        row(7, "FAILED", message="setup failed:\nno pip. Full traceback:\n…", error_type="OTHER"),
        row(8, "FAILED", message=log, error_type=driver),
        {**row(8, "RUNNING"), "metadata": {"paceline": "paceline.other.run.0.8"}},
        {**row(9, "RUNNING"), "metadata": None},
        {**row(10, "RUNNING"), "submission_id": None},
    ]
    groups = [
        group(2, "PENDING", bundles=[wants] * 2, stats={"scheduling_state": "NO_RESOURCES"}),
        group(3, "CREATED"),
        group(4, "RESCHEDULING"),
    ]
    api.answers = {
        "GET /api/jobs/": (200, rows),
        "GET /api/v0/placement_groups?": (200, {"data": {"result": {"result": groups}}}),
    }
    jobs = Ray().look("paceline.plane.")
    assert [(job.ref[-1], job.state, job.reason) for job in jobs] == [
        ("0", "queued", "PENDING: It may wait for the runtime environment."),
        ("1", "queued", "RUNNING: It runs."),
        ("2", "queued", "NO_RESOURCES: 2 nodes with 4 CPU, 0.5 GPU"),
        ("3", "running", ""),
        ("4", "running", ""),
        ("5", "ended", "STOPPED: It was stopped."),
        ("6", "ended", "FAILED: nodes failed: node 1: exit code 7"),
        ("7", "ended", "FAILED: setup failed: no pip."),
        (
            "8",
            "ended",
            f"FAILED: It failed with exit code 1; see `ray job logs {jobs[8].ref}`",
        ),
    ]
    assert all(job.label == job.ref for job in jobs)
    assert [job.ref[-1] for job in jobs if job.cancelled] == ["5"]


def test_a_job_that_ray_does_not_know_is_stopped(api: Api) -> None:
    api.answers = {"POST /api/jobs/there/stop": (200, {"stopped": False})}
    Ray().stop(["gone", "there"])
    assert [line for line, _, _ in api.asked] == [
        "POST /api/jobs/gone/stop",
        "POST /api/jobs/there/stop",
    ]


@pytest.mark.parametrize("said", [{"jobs": []}, [1], 7, None, "<html>"])
def test_what_is_not_ray_is_away(api: Api, said: object) -> None:
    """Nothing else may come out of a look, nor where a question is refused."""
    api.answers = {"GET /api/jobs/": (200, said), "POST /api/jobs/": (400, "ValueError: no job")}
    for ask in (lambda: Ray().look("paceline."), lambda: Ray().stop(["there"])):
        with pytest.raises(backends.EngineAwayError):
            ask()


def test_facts(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    api.answers = {"GET /api/version": (200, {"ray_version": "2.60.0"})}
    assert Ray().availability() == backends.Availability(True, "2.60.0")
    for version in ("2.48.1", "1.13.0"):
        api.answers = {"GET /api/version": (200, {"ray_version": version})}
        why = f"Ray {version} is too old: 2.49 or newer is needed"
        assert Ray().availability() == backends.Availability(False, version, why)
    for version in ("2.49.0", "3.0.0.dev0", "nightly"):
        api.answers = {"GET /api/version": (200, {"ray_version": version})}
        assert Ray().availability() == backends.Availability(True, version)
    for answer in ({"version": 4}, "<html>"):
        api.answers = {"GET /api/version": (200, answer)}
        assert "is not Ray's API" in str(Ray().availability().problem)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://user:password@127.0.0.1:1")
    assert str(Ray().availability().problem).startswith("http://127.0.0.1:1: ")
    assert "set RAY" not in str(Ray().availability().problem)
    for address in ("http://127.0.0.1:1", "head:8265", "http://[", "ray://head:10001"):
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", address)
        found = Ray().availability()
        assert not found.reachable
        assert str(found.problem).startswith(f"{address}: ")


def test_nobody_says_where_ray_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_DASHBOARD_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ray_api, "_DEFAULT_ADDRESS", "http://127.0.0.1:1")
    assert "set RAY_API_SERVER_ADDRESS" in str(Ray().availability().problem)


def test_an_api_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # takes, is mute
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", address)
        monkeypatch.setattr(ray_api, "_TIMEOUT_S", 0.05)
        with pytest.raises(backends.EngineAwayError, match="timed out"):
            Ray().look("paceline.")
