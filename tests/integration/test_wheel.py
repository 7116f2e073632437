"""The wheel: each part alone in an empty environment, started there as a user starts it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.waiting import DEADLINE_S, TRAINING_S, until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "frameworks"
PIP = ["-m", "pip", "--disable-pip-version-check", "--quiet"]
ADAPTERS = ("accelerate", "lightning", "ray", "transformers")
OF_SERVER = {"alembic", "dash", "fastapi", "scikit-learn", "sqlalchemy", "uvicorn"}
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
PLAIN = """
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
# Imports every module of the packages given, and prints the errors as JSON.
MODULES = """
import importlib, json, pkgutil, sys, warnings
warnings.simplefilter("ignore", FutureWarning)  # of the paths that have moved
errors = {}
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    assert package.__file__.startswith(sys.prefix), package.__file__
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        try:
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
        except ImportError as error:
            errors[module.name] = str(error)
print(json.dumps(errors))
"""
OF_RAY = "from paceline.ray import PacelineConfig; print(PacelineConfig(backend='gloo').backend)"


class Installed:
    """An environment that has one part of the wheel.

    PyTorch is that of the tests' environment, by links, because it has hundreds of megabytes. Its
    metadata are there, too, so pip installs what it needs.

    Args:
        folder: for the environment; made.
        wheel: what is installed.
        extra: of it; empty: the library.
        by_pip: pip resolves and downloads the requirements, as for a user, which takes minutes.
            Otherwise they are links, too: to what the tests' environment has of them.
    """

    def __init__(self, folder: Path, wheel: Path, extra: str, by_pip: bool) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        (self.site,) = (folder / "lib").glob("python*/site-packages")
        for name in {"torch"} if by_pip else required(wheel, extra):
            _link(importlib.metadata.distribution(name), self.site)
        options = ["-c", str(ROOT / "constraints.txt")] if by_pip else ["--no-deps", "--no-index"]
        part = f"{wheel}[{extra}]" if extra else str(wheel)
        # The tests' pip: an environment gets none of its own, which saves seconds.
        pip = [sys.executable, *PIP, "--python", str(self.bin / "python"), "install"]
        subprocess.run([*pip, *options, part], check=True)

    @property
    def packages(self) -> set[str]:
        installed = importlib.metadata.distributions(path=[str(self.site)])
        return {canonicalize_name(distribution.name) for distribution in installed}

    def unimportable(self, *packages: str) -> dict[str, str]:
        """The error of each module of these packages that cannot be imported."""
        errors: dict[str, str] = json.loads(self.run("python", "-c", MODULES, *packages))
        return errors

    def run(self, program: str, *arguments: str, code: int = 0) -> str:
        """Standard output of a program of the environment; that and its errors if it fails."""
        done = subprocess.run(
            [str(self.bin / program), *arguments],
            env=self._environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=3 * TRAINING_S,
            check=False,
        )
        assert done.returncode == code, done.stderr[-3000:]
        return done.stderr if code else done.stdout

    @contextmanager
    def running(self, *arguments: str) -> Iterator[Callable[[], str]]:
        """A command that goes on until the end of the block; gives what it has printed."""
        log = self.folder / f"{arguments[0]}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(self.bin / "paceline"), *arguments],
                env=self._environment,
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

        def printed() -> str:
            assert process.poll() is None, log.read_text()[-3000:]
            return log.read_text()

        try:
            yield printed
            process.send_signal(signal.SIGTERM)
            process.wait(DEADLINE_S)
        finally:
            process.kill()
            process.wait()

    @property
    def _environment(self) -> dict[str, str]:
        """Nothing of this checkout, nor of this session's servers."""
        others = ("PACELINE_", "PYTHON", "COVERAGE", "XDG_")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(others)}
        return kept | {
            "HOME": str(self.folder.parent / "home"),  # of all environments of a test
            "PATH": f"{self.bin}:{os.defpath}",
            "HF_HUB_OFFLINE": "1",
        }


def required(wheel: Path, extra: str) -> set[str]:
    """The distributions that an extra of the wheel requires, by what the tests' have declared."""
    with zipfile.ZipFile(wheel) as opened:
        (metadata,) = (name for name in opened.namelist() if name.endswith("/METADATA"))
    ours = importlib.metadata.PathDistribution(zipfile.Path(wheel, metadata).parent)
    seen: set[tuple[str, str]] = set()

    def add(distribution: importlib.metadata.Distribution, extras: set[str]) -> None:
        name = canonicalize_name(distribution.name)
        new = {(name, wanted) for wanted in extras | {""}} - seen
        seen.update(new)
        for requirement in map(Requirement, distribution.requires or () if new else ()):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": wanted}) for _, wanted in new):
                if canonicalize_name(requirement.name) == "paceline":  # an extra of extras
                    add(ours, requirement.extras)
                else:
                    add(importlib.metadata.distribution(requirement.name), requirement.extras)

    add(ours, {extra})
    return {name for name, _ in seen} - {"paceline"}


def _link(distribution: importlib.metadata.Distribution, site: Path) -> None:
    names = {Path(str(file)).parts[0] for file in distribution.files or ()}
    for name in names - {"..", "__pycache__"}:
        if not (site / name).exists():  # a namespace of several distributions
            (site / name).symlink_to(Path(str(distribution.locate_file(name))))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([sys.executable, *PIP, *build], check=True)
    (made,) = folder.glob("paceline-*.whl")
    return made


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
            assert "is sound" in server.run("paceline", "db", "check", *data)
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
