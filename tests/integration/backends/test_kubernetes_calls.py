"""What the engine makes of the API server's answers: a server that a test makes up."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from paceline_backend import backends
from paceline_backend.backends.kubernetes import Kubernetes, KubernetesOptions, access
from paceline_backend.backends.kubernetes.manifests import LABEL

ORDER = backends.Order(
    label="paceline.plane.run.0.0",
    run="run",
    nodes=2,
    nproc=1,
    cwd="/app",
    options=KubernetesOptions(image="i"),
    server="http://head:8000",
    token="pl_1_secret",
)
JOB = "/apis/batch/v1/namespaces/ns/jobs/paceline-run-0-0"


class Answers(http.server.BaseHTTPRequestHandler):
    """Answers each request as `known` says, else with an empty object."""

    known: ClassVar[dict[str, tuple[int, Any]]] = {}
    asked: ClassVar[list[tuple[str, str, str]]] = []  # request, Authorization, body

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
        path = self.path.partition("?")[0]
        self.asked.append((f"{self.command} {path}", self.headers.get("authorization", ""), body))
        status, said = self.known.get(f"{self.command} {path}", (200, {"metadata": {}}))
        content = said if isinstance(said, bytes) else json.dumps(said).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815 - as the base class calls them

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The API server that KUBECONFIG names."""
    Answers.known, Answers.asked = {}, []
    job = {"metadata": {"name": "paceline-run-0-0", "uid": "u", "labels": {LABEL: ORDER.label}}}
    Answers.known[f"POST {JOB.rpartition('/')[0]}"] = (201, job)
    Answers.known[f"GET {JOB}"] = (200, job)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.02,))
        thread.start()
        configure(tmp_path, f"http://127.0.0.1:{made.server_port}", {"token": "t"})
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        monkeypatch.delenv("PACELINE_KUBERNETES_NAMESPACES", raising=False)
        yield
        made.shutdown()
        thread.join()
    access.forget()


def configure(folder: Path, url: str, user: dict[str, Any]) -> None:
    content = {
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "ns"}}],
        "current-context": "x",
    }
    (folder / "config").write_text(yaml.safe_dump(content))


def requests() -> list[str]:
    return [request for request, _, _ in Answers.asked]


def refused(status: int, message: str) -> tuple[int, Any]:
    return status, {"kind": "Status", "status": "Failure", "message": message}


def test_a_job_is_submitted() -> None:
    assert Kubernetes().submit(ORDER) == "ns/paceline-run-0-0"
    assert requests() == [
        "POST /api/v1/namespaces/ns/secrets",
        "POST /apis/batch/v1/namespaces/ns/jobs",
        "PATCH /api/v1/namespaces/ns/secrets/paceline-run-0-0",
    ]
    assert {sent for _, sent, _ in Answers.asked} == {"Bearer t"}
    secret, job, owner = (body for _, _, body in Answers.asked)
    assert "pl_1_secret" in secret
    assert "pl_1_secret" not in job
    assert json.loads(owner)["metadata"]["ownerReferences"][0]["uid"] == "u"


def test_a_job_is_submitted_once_more() -> None:
    """A worker was killed after it had made Secret and Job."""
    Answers.known["POST /api/v1/namespaces/ns/secrets"] = refused(409, "exists")
    Answers.known["POST /apis/batch/v1/namespaces/ns/jobs"] = refused(409, "exists")
    assert Kubernetes().submit(ORDER) == "ns/paceline-run-0-0"
    assert f"GET {JOB}" in requests()


def test_a_job_of_somebody_else() -> None:
    Answers.known["POST /apis/batch/v1/namespaces/ns/jobs"] = refused(409, "exists")
    Answers.known[f"GET {JOB}"] = (200, {"metadata": {"name": "paceline-run-0-0", "uid": "u"}})
    with pytest.raises(backends.EngineRefusedError, match="exists already"):
        Kubernetes().submit(ORDER)


@pytest.mark.parametrize(
    "answer, raised, words",
    [
        (refused(403, "exceeded quota: team"), backends.EngineRefusedError, "exceeded quota: team"),
        (refused(422, 'Job "x" is invalid'), backends.EngineRefusedError, "is invalid"),
        (refused(404, 'namespaces "ns" not found'), backends.EngineRefusedError, "not found"),
        (refused(401, "Unauthorized"), backends.EngineAwayError, "Unauthorized"),
        (refused(429, "slow down"), backends.EngineAwayError, "slow down"),
        (refused(500, "etcdserver: request timed out"), backends.EngineAwayError, "timed out"),
        ((503, b"no backend"), backends.EngineAwayError, "no backend"),
        ((200, b"<html>"), backends.EngineAwayError, "not JSON"),
    ],
)
def test_what_the_api_server_says(
    answer: tuple[int, Any], raised: type[Exception], words: str
) -> None:
    Answers.known["POST /apis/batch/v1/namespaces/ns/jobs"] = answer
    with pytest.raises(raised, match=words):
        Kubernetes().submit(ORDER)
    # The Secret of a Job that may be there stays.
    left = raised is backends.EngineAwayError
    assert left == ("DELETE /api/v1/namespaces/ns/secrets/paceline-run-0-0" not in requests())


def test_a_look_that_is_not_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is concluded from it."""
    monkeypatch.setenv("PACELINE_KUBERNETES_NAMESPACES", "ns, other")
    Answers.known["GET /apis/batch/v1/namespaces/ns/jobs"] = (200, {"items": []})
    Answers.known["GET /api/v1/namespaces/ns/pods"] = (200, {"items": []})
    Answers.known["GET /apis/batch/v1/namespaces/other/jobs"] = refused(403, "forbidden")
    with pytest.raises(backends.EngineAwayError, match="forbidden"):
        Kubernetes().look("paceline.")


def test_a_job_without_pods_says_why() -> None:
    """From its events, which are asked for only where pods are lacking, and if that is allowed."""
    about = {
        "metadata": {"name": "j", "namespace": "ns", "uid": "u", "labels": {LABEL: "paceline.a"}}
    }
    Answers.known["GET /apis/batch/v1/namespaces/ns/jobs"] = (200, {"items": [about]})
    Answers.known["GET /api/v1/namespaces/ns/pods"] = (200, {"items": []})
    events = "GET /api/v1/namespaces/ns/events"
    said = {"involvedObject": {"uid": "u"}, "reason": "FailedCreate", "message": "exceeded quota"}
    Answers.known[events] = (200, {"items": [said]})
    [job] = Kubernetes().look("paceline.")
    assert (job.state, job.reason) == ("queued", "FailedCreate: exceeded quota")
    Answers.known[events] = refused(403, "events is forbidden")
    [job] = Kubernetes().look("paceline.")
    assert job.reason == "it has no pod yet"
    meta = {"name": "p", "namespace": "ns", "labels": {"job-name": "j"}}
    there = {"items": [{"metadata": meta, "status": {"phase": "Running"}}]}
    Answers.known["GET /api/v1/namespaces/ns/pods"] = (200, there)
    Answers.asked.clear()
    assert Kubernetes().look("paceline.")[0].state == "running"
    assert events not in requests()


def test_jobs_that_have_gone_are_stopped_once_more() -> None:
    Answers.known[f"DELETE {JOB}"] = refused(404, "not found")
    Answers.known["DELETE /api/v1/namespaces/ns/secrets/paceline-run-0-0"] = refused(404, "none")
    Kubernetes().stop(["ns/paceline-run-0-0"])
    Kubernetes().stop([])
    assert requests()[0] == f"DELETE {JOB}"


def test_names_are_no_paths() -> None:
    Kubernetes().stop(["ns/../../secrets/other"])
    assert requests()[0].endswith("/jobs/..%2F..%2Fsecrets%2Fother")


def test_facts(tmp_path: Path) -> None:
    Answers.known["GET /version"] = (200, {"gitVersion": "v1.30.1"})
    assert Kubernetes().availability() == backends.Availability(True, "v1.30.1")
    Answers.known["GET /apis/batch/v1/namespaces/ns/jobs"] = refused(403, "may not list jobs")
    assert "may not list jobs" in str(Kubernetes().availability().problem)
    configure(tmp_path, "http://127.0.0.1:9", {"token": "t"})
    found = Kubernetes().availability()
    assert not found.reachable
    assert "http://127.0.0.1:9" in str(found.problem)


def test_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once, until its credential is worthless; it sees none of our secrets."""
    plugin = tmp_path / "plugin"
    plugin.write_text(
        "#!/bin/sh\n"
        f"env > {tmp_path}/env; echo once >> {tmp_path}/times\n"
        """echo '{"kind": "ExecCredential", "status": {"token": "of the plugin"}}'\n"""
    )
    plugin.chmod(0o755)
    monkeypatch.setenv("PACELINE_TOKEN", "the admin's")
    version = "client.authentication.k8s.io/v1"
    variables = [{"name": "REGION", "value": "north"}]
    run = {"command": "./plugin", "args": ["a"], "apiVersion": version, "env": variables}
    url = yaml.safe_load((tmp_path / "config").read_text())["clusters"][0]["cluster"]["server"]
    configure(tmp_path, url, {"exec": run})
    for _ in range(2):
        Kubernetes().submit(ORDER)
    assert {sent for _, sent, _ in Answers.asked} == {"Bearer of the plugin"}
    env = (tmp_path / "env").read_text()
    assert "PACELINE" not in env
    assert "REGION=north" in env
    assert "interactive" in env
    assert (tmp_path / "times").read_text().count("once") == 1
    Answers.known["POST /apis/batch/v1/namespaces/ns/jobs"] = refused(401, "Unauthorized")
    with pytest.raises(backends.EngineAwayError):
        Kubernetes().submit(ORDER)
    Kubernetes().availability()
    assert (tmp_path / "times").read_text().count("once") == 2


@pytest.mark.parametrize(
    "script, words",
    [("echo no login >&2; exit 3", "exited with 3: no login"), ("echo '{}'", "status")],
)
def test_a_plugin_that_fails(tmp_path: Path, script: str, words: str) -> None:
    (tmp_path / "plugin").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "plugin").chmod(0o755)
    run = {"command": "./plugin", "apiVersion": "client.authentication.k8s.io/v1"}
    configure(tmp_path, "http://127.0.0.1:9", {"exec": run})
    assert words in str(Kubernetes().availability().problem)


def test_cordons() -> None:
    Answers.known["GET /api/v1/nodes/gpu7"] = (200, {"metadata": {}, "spec": {}})
    Kubernetes().cordon("gpu7", "slow: 1.8 times")
    [body] = [json.loads(body) for request, _, body in Answers.asked if "PATCH" in request]
    assert body["spec"] == {"unschedulable": True}
    assert "slow: 1.8 times" in str(body["metadata"])
    Answers.asked.clear()
    Kubernetes().cordon_as("a1", "gpu7", "slow")
    [body] = [json.loads(body) for request, _, body in Answers.asked if "PATCH" in request]
    assert body["metadata"]["annotations"]["paceline-cordoned-by"] == "a1"


@pytest.mark.parametrize("reason", ["slow", None])
def test_somebody_elses_cordon_stays(reason: str | None) -> None:
    node = {"metadata": {}, "spec": {"unschedulable": True}}
    Answers.known["GET /api/v1/nodes/gpu7"] = (200, node)
    Kubernetes().cordon("gpu7", reason)
    assert requests() == ["GET /api/v1/nodes/gpu7"]


@pytest.mark.parametrize("host", ["../secrets", "a b", "", "gpu7/status"])
def test_what_is_no_machine(host: str) -> None:
    with pytest.raises(backends.EngineRefusedError, match="not a valid machine name"):
        Kubernetes().cordon(host, "slow")
    assert not Answers.asked


def test_a_cordon_that_is_not_allowed() -> None:
    Answers.known["GET /api/v1/nodes/gpu7"] = refused(403, "nodes is forbidden")
    with pytest.raises(backends.EngineRefusedError, match="nodes is forbidden"):
        Kubernetes().cordon("gpu7", "slow")
