"""The images' containers with a real Postgres and Redis: commands, variables, users and folders
are read from docker/, and so is what of the file system can be written."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from paceline.wire import ENDED
from support.containers import Image, Volume, volume_of
from support.ports import free_port
from support.postgres import Postgres
from support.waiting import DEADLINE_S, TRAINING_S, until
from support.wheels import build_wheel

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
DOCKERS_TMPFS = "noexec,nosuid,nodev,mode=1777"  # options of Docker's, unless others are given
SCRIPT = """
import torch, torch.distributed as dist, paceline
dist.init_process_group("gloo")
data = [(torch.randn(3), float(i)) for i in range(64)]
session = paceline.Session(data, sizes=[1.0 + i % 7 for i in range(64)], global_batch=8)
loader, model = session.loader(), session.wrap(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        (model(x).squeeze(1) - y).square().mean().backward()
        optimizer.step()
session.close()
dist.destroy_process_group()
"""
# Fails if a kernel had to be compiled, which is what a cache is for.
KERNELS = """
import gc
from numba.core.dispatcher import Dispatcher
from paceline import policies
policies.warm_up()
kernels = [each for each in gc.get_objects() if isinstance(each, Dispatcher)]
compiled = [each.py_func.__qualname__ for each in kernels if each.stats.cache_misses]
assert kernels and not compiled, compiled
"""
TOKENS = {
    "PACELINE_TOKEN": "a-token-for-this-test",
    "PACELINE_AGENT_TOKEN": "an-agents-token-for-this-test",
    "PACELINE_VIEWER_TOKEN": "a-viewers-token-for-this-test",
}
ADMIN, AGENT, VIEWER = ({"Authorization": f"Bearer {token}"} for token in TOKENS.values())
rooted = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("setpriv"),
    reason="mount namespaces need root and setpriv",
)


def test_secrets_go_where_they_are_needed_only() -> None:
    """The agent reaches the bus's port: neither that password nor the admin token is for it."""
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services = compose["services"]
    assert "requirepass ${REDIS_PASSWORD:?" in compose["configs"]["redis"]["content"]
    for name in ("agent", "prometheus", "grafana"):
        text = json.dumps(services[name])
        assert not re.search(r"\$\{(PACELINE_TOKEN|REDIS_PASSWORD|POSTGRES_PASSWORD)\b", text), name
        given = {
            compose["secrets"][secret]["environment"]
            for secret in services[name].get("secrets", [])
        }
        assert "PACELINE_TOKEN" not in given, name
    assert services["postgres"]["networks"] == ["database"]
    assert "networks" not in services["agent"]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Image]]:
    """Both images, by the names that compose.yaml and the manifests give them."""
    folder = tmp_path_factory.mktemp("images")
    wheel = build_wheel(folder)
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(Image(name, folder / name, wheel))
            for name in ("control-plane", "agent")
        }


class Containers:
    """Containers of one deployment, on loopback; a context manager.

    Args:
        images: by name.
        folder: for volumes and logs.
        database: URL of an empty one.
        bus: URL.
    """

    def __init__(self, images: dict[str, Image], folder: Path, database: str, bus: str) -> None:
        self.port = free_port()
        self._images = images
        self._folder = folder
        self._bus, self._database = bus, database.replace("+psycopg", "")
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", headers=ADMIN, timeout=DEADLINE_S
        )

    def compose(self, service: str) -> None:
        """Start a service of compose.yaml."""
        described = COMPOSE[service]
        image = Path(described["build"]["dockerfile"]).name.removesuffix(".Dockerfile")
        values = {
            name: re.sub(r"\$\{(\w+)[^}]*\}", lambda matches: TOKENS.get(matches[1], ""), text)
            for name, text in described["environment"].items()
        }
        volumes = {
            each.partition(":")[2]: self._volume(service, "data", 10001, 10001, 0o755)
            for each in described["volumes"]
        }
        # The root of every container can only be read, also where compose.yaml does not ask for it.
        volumes |= {path: Volume(None, DOCKERS_TMPFS) for path in described.get("tmpfs", ["/tmp"])}
        self._start(service, image, self._images[image].file.command, values, volumes)

    def kubernetes(self, part: str) -> None:
        """Start the container of a Deployment of docker/kubernetes."""
        manifests = DOCKER / "kubernetes"
        pod = yaml.safe_load_all((manifests / f"{part}.yaml").read_text())
        spec = next(pod)["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        values: dict[str, str] = {}
        for name, key in (("settings.yaml", "data"), ("secret.example.yaml", "stringData")):
            values |= yaml.safe_load((manifests / name).read_text())[key]
        values |= {name: TOKENS[name] for name in values if name in TOKENS}
        group = spec["securityContext"]["fsGroup"]
        assert all("emptyDir" in each for each in spec["volumes"])
        volumes = {  # as kubelet makes them: the root user's, open to the group
            each["mountPath"]: self._volume(part, each["name"], 0, group, 0o2777)
            for each in container["volumeMounts"]
        }
        image = container["image"].removeprefix("paceline/").removesuffix(":latest")
        user = spec["securityContext"]["runAsUser"]
        assert str(user) == self._images[image].file.user
        self._start(part, image, container["args"], values, volumes, groups=[group])

    def _volume(self, name: str, volume: str, owner: int, group: int, mode: int) -> Volume:
        return volume_of(self._folder / f"{name}-{volume}", owner, group, mode)

    def _start(
        self,
        name: str,
        image: str,
        arguments: Sequence[str],
        values: dict[str, str],
        volumes: dict[str, Volume],
        groups: Sequence[int] = (),
    ) -> None:
        given = {
            "PACELINE_DATABASE": self._database,
            "PACELINE_BUS": self._bus,
            "PACELINE_SERVER": str(self.http.base_url),
        }
        with (self._folder / f"{name}.log").open("wb") as log:
            self._running[name] = self._images[image].start(
                [*self._images[image].file.entry, *self._moved(arguments)],
                {**values, **{key: text for key, text in given.items() if key in values}},
                volumes,
                log,
                groups=groups,
            )

    def _moved(self, words: Sequence[str]) -> list[str]:
        """A command whose address is this test's, as the containers share the machine's."""
        words = [word.replace(":8000/", f":{self.port}/") for word in words]
        return [{"8000": str(self.port), "0.0.0.0": "127.0.0.1"}.get(w, w) for w in words]

    def healthcheck(self, image: str) -> None:
        """Run the image's health check in a further container; it must succeed."""
        self.check(image, self._moved(self._images[image].file.healthcheck))

    def check(self, image: str, command: Sequence[str]) -> None:
        """Run a command in a further container; it must succeed."""
        tmp = {"/tmp": Volume(None, DOCKERS_TMPFS)}
        with (self._folder / "check.log").open("wb") as log:
            process = self._images[image].start(command, {}, tmp, log)
        assert process.wait(DEADLINE_S) == 0, (self._folder / "check.log").read_text()

    def until(self, path: str, good: Callable[[httpx.Response], object]) -> None:
        """Wait for an answer of the server while all containers run."""

        def answered() -> object:
            for name, process in self._running.items():
                assert process.poll() is None, self.log(name)
            try:
                return good(self.http.get(path))
            except httpx.TransportError:
                return None

        until(answered, path, TRAINING_S, 0.1)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def train(self) -> dict[str, Any]:
        """Train two ranks on the agent's node; return the run."""
        script = self._folder / "agent-data" / "train.py"
        script.write_text(SCRIPT)
        os.chown(script, 10001, 10001)
        body = {"script": "/data/train.py", "nproc": 2, "policy": "paceline"}
        created = self.http.post("/api/v1/runs", json=body)
        assert created.is_success, created.text
        run = f"/api/v1/runs/{created.json()['id']}"
        self.until(run, lambda answer: answer.json()["state"] in ENDED)
        ended: dict[str, Any] = self.http.get(run).json()
        return ended

    def __enter__(self) -> Containers:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        for process in reversed(self._running.values()):
            process.send_signal(signal.SIGTERM)
        ended = {name: process.wait(DEADLINE_S) for name, process in self._running.items()}
        assert set(ended.values()) <= {0, -signal.SIGTERM}, ended


@contextmanager
def containers(
    images: dict[str, Image], folder: Path, database: str, bus: str
) -> Iterator[Containers]:
    with Containers(images, folder, database, bus) as started:
        yield started
    for name in ("web", "worker", "control-plane", "agent"):
        if (folder / f"{name}.log").exists():
            said = started.log(name)
            refused = r"Traceback|Read-only file system|Permission denied|Operation not permitted"
            assert not re.search(refused, said), said


@rooted
@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.timeout(1800)
class TestContainers:
    def test_compose(
        self, images: dict[str, Image], tmp_path: Path, bus_url: str, _postgres: Postgres
    ) -> None:
        with containers(images, tmp_path, _postgres.database(), bus_url) as started:
            started.check("control-plane", ["python", "-c", KERNELS])
            started.compose("control-plane")
            started.until("/readyz", lambda answer: answer.is_success)
            started.healthcheck("control-plane")
            started.compose("agent")
            started.until("/api/v1/nodes", lambda a: any(node["alive"] for node in a.json()))
            run = started.train()
            assert run["state"] == "finished", (run, started.log("agent"))
            get = started.http.get
            assert httpx.get(started.http.base_url.join("/api/v1/runs")).status_code == 401
            assert get("/api/v1/runs", headers=AGENT).status_code == 403
            assert get("/metrics", headers=VIEWER).status_code == 200
            assert get("/api/v1/tokens", headers=VIEWER).status_code == 403

    def test_kubernetes(
        self, images: dict[str, Image], tmp_path: Path, bus_url: str, _postgres: Postgres
    ) -> None:
        with containers(images, tmp_path, _postgres.database(), bus_url) as started:
            started.kubernetes("web")
            started.until("/healthz", lambda answer: answer.is_success)
            started.kubernetes("worker")
            started.until("/readyz", lambda answer: answer.is_success)
            started.compose("agent")
            started.until("/api/v1/nodes", lambda a: any(node["alive"] for node in a.json()))
            run = started.train()
            assert run["state"] == "finished", (run, started.log("agent"))
