"""The wheel: each part alone in an empty environment, started there as a user starts it."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import httpx
import pytest

from support.waiting import DEADLINE_S, until
from support.wheels import Installed, build_wheel

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "frameworks"
ADAPTERS = ("accelerate", "lightning", "ray", "transformers")
OF_SERVER = {"alembic", "dash", "fastapi", "sqlalchemy", "uvicorn"}
FOLDERS = {  # of the checkout, and what they are in the wheel
    "agent/paceline": "paceline",
    "backend/paceline_backend": "paceline_backend",
    "dashboard/paceline_dashboard": "paceline_dashboard",
    "migrations": "paceline_backend/_migrations",
    "examples/plaid": "paceline_backend/_examples/plaid",
}
STEPS = """
import torch, torch.distributed as dist, paceline
dist.init_process_group("gloo")
data = [(torch.randn(3), float(i)) for i in range(8)]
session = paceline.Session(data, sizes=[1.0] * 8, global_batch=4)
loader, model = session.loader(), session.wrap(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for x, y in loader:
    (model(x).squeeze(1) - y).square().mean().backward()
    optimizer.step()
print("trained", session.step + 1, "steps on", session.world, "ranks")
session.close()
dist.destroy_process_group()
"""
# torch 2.13 itself aborts some processes at their end ("terminate called without an active
# exception", 1 of 25 on a busy machine), so this script leaves before, once all has been delivered.
PLAIN = """
import atexit, os
atexit.register(os._exit, 0)
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 3))
for (x,) in torch.utils.data.DataLoader(data, batch_size=4):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
OF_RAY = "from paceline.ray import PacelineConfig; print(PacelineConfig(backend='gloo').backend)"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


Install = Callable[[str], Installed]


@pytest.fixture(scope="module", params=["linked", pytest.param("pip", marks=pytest.mark.long)])
def install(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Install:
    """Installs an extra, once for all tests."""
    folder = tmp_path_factory.mktemp("environments")
    (folder / "home").mkdir()
    return cache(
        lambda extra: Installed(
            folder / (extra or "library"), wheel, extra, by_pip=request.param == "pip"
        )
    )


def test_the_wheel_has_all_files(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        packed = {name for name in opened.namelist() if ".dist-info/" not in name}
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    expected = {
        name.replace(folder, inside, 1)
        for folder, inside in FOLDERS.items()
        for name in listed
        if name.startswith(f"{folder}/")
    }
    assert packed == expected  # what .gitignore names is left out, even if it is in git


def test_the_library_and_its_messages(install: Install, tmp_path: Path) -> None:
    library = install("")
    assert not library.packages & (OF_SERVER | set(ADAPTERS))
    version = importlib.metadata.version("paceline")
    assert library.run("paceline", "--version") == f"paceline {version}\n"
    script = tmp_path / "train.py"
    script.write_text(STEPS)
    data = ("--data", str(tmp_path / "data"))
    printed = library.run("paceline", "run", "--nproc", "2", *data, str(script))
    assert "trained 2 steps on 2 ranks" in printed
    assert "no problems found" in library.run("paceline", "doctor", str(script))
    for command in ("server", "db", "token"):
        assert "pip install 'paceline[server]'" in library.run("paceline", command, code=3)
    assert "pip install 'paceline[demo]'" in library.run("paceline", "demo", code=3)
    errors = library.unimportable("paceline")
    assert set(errors) == {f"paceline.{name}" for name in ADAPTERS}
    for name in ADAPTERS:
        assert f"pip install 'paceline[{name}]'" in errors[f"paceline.{name}"]


def test_the_servers_packages(install: Install) -> None:
    server = install("server")
    assert not server.packages & {*ADAPTERS, "sktime", "pytest"}
    errors = server.unimportable("paceline", "paceline_backend", "paceline_dashboard")
    of_testers = "paceline_backend.testing.engines"  # runs in the tests of who writes an engine
    assert set(errors) == {of_testers, *(f"paceline.{name}" for name in ADAPTERS)}
    assert "pip install 'paceline[demo]'" in server.run("paceline", "demo", code=3)


@pytest.mark.long
def test_the_server_and_a_node(install: Install, tmp_path: Path) -> None:
    server, node = install("server"), install("")
    data = ("--data", str(tmp_path / "data"))
    planned, plain = tmp_path / "planned.py", tmp_path / "plain.py"
    planned.write_text(STEPS)
    plain.write_text(PLAIN)
    with server.running("server", "--port", "0", *data) as printed:
        url = until(lambda: re.search(r"Paceline on (http\S+)", printed()), "the server")[1]
        link = server.run("paceline", "open", "--server", url).strip()
        with httpx.Client(base_url=url, follow_redirects=True, timeout=DEADLINE_S) as browser:
            parts = browser.get("/readyz").json()
            assert parts == {"database": "ok", "bus": "ok", "worker": "ok"}
            assert "has no faults" in server.run("paceline", "db", "check", *data)
            _look_at(browser, link)
            here = ("--server", url, "--data", str(tmp_path / "node"))
            with node.running("agent", *here) as said:
                until(lambda: said() and browser.get("/api/v1/nodes").json(), "the node")
                run = ("run", "--nodes", "1", "--nproc", "2", "--server", url, str(planned))
                node.run("paceline", *run)
            torchrun = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
            node.run("paceline", "observe", *here, "--", *torchrun, "2", str(plain))
            runs = browser.get("/api/v1/runs").json()["items"]
        assert [(run["state"], run["nproc"]) for run in runs] == [("finished", 2)] * 2
        assert all(run["step"] is not None for run in runs)


def _look_at(browser: httpx.Client, link: str) -> None:
    """The first page, and all files that it names."""
    page = browser.get(link)
    assert page.status_code == 200, page
    files = r'"(/(?:assets|_dash-component-suites)/[^"]+\.(?:js|css|svg))'
    named = set(re.findall(files, page.text))
    assert len(named) > 50
    for path in named:
        assert browser.get(path).status_code == 200, path


@pytest.mark.long
@pytest.mark.parametrize("framework", ADAPTERS)
def test_an_adapter(wheel: Path, tmp_path: Path, framework: str) -> None:
    (tmp_path / "home").mkdir()
    adapter = Installed(tmp_path / "environment", wheel, framework, by_pip=True)
    others = {"accelerate"} if framework == "transformers" else set()
    assert not adapter.packages & (OF_SERVER | set(ADAPTERS) - {framework} - others)
    if framework == "ray":  # `make test-engines` trains with it
        assert adapter.run("python", "-c", OF_RAY) == "gloo\n"
        return
    for name in ("text.py", f"with_{framework}.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    run = ("run", "--nproc", "2", "--data", str(tmp_path / "data"))
    script = (str(tmp_path / f"with_{framework}.py"), "--epochs", "1")
    printed = adapter.run("paceline", *run, *script)
    assert "held-out" in printed or "train_loss" in printed, printed
