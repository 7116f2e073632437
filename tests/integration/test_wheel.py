"""Each part of the wheel, installed into an empty environment with what it declares alone."""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from support.waiting import DEADLINE_S, TRAINING_S, until

pytestmark = [pytest.mark.long, pytest.mark.ranks, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
PIP = ["-m", "pip", "--disable-pip-version-check", "--quiet"]
STEP = """
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


class Installed:
    """An environment that has one part of the wheel.

    PyTorch is that of the tests' environment, by links, because it has hundreds of megabytes. Its
    metadata are there, too, so pip installs what it needs.
    """

    def __init__(self, folder: Path, wheel: Path, extra: str) -> None:
        self.bin = folder / "env" / "bin"
        subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
        (site,) = (folder / "env" / "lib").glob("python*/site-packages")
        distribution = importlib.metadata.distribution("torch")
        owned = {Path(str(file)).parts[0] for file in distribution.files or ()} - {".."}
        for name in owned - {"__pycache__"}:
            (site / name).symlink_to(Path(str(distribution.locate_file(name))))
        part = f"{wheel}[{extra}]" if extra else str(wheel)
        self.run("python", *PIP, "install", "-c", str(ROOT / "constraints.txt"), part)
        self.folder = folder

    def run(self, program: str, *arguments: str, code: int = 0) -> str:
        """Standard output and error of a program of the environment."""
        done = subprocess.run(
            [str(self.bin / program), *arguments],
            env=environment(),
            cwd=self.bin.parent,
            capture_output=True,
            text=True,
            timeout=3 * TRAINING_S,
            check=False,
        )
        assert done.returncode == code, done.stderr[-3000:]
        return done.stdout + done.stderr

    @property
    def packages(self) -> set[str]:
        listed = self.run("python", *PIP, "list", "--format", "freeze")
        return {line.partition("==")[0].lower() for line in listed.splitlines()}


def environment() -> dict[str, str]:
    """Nothing of this checkout, nor of this session's servers."""
    others = ("PACELINE_", "PYTHON", "COVERAGE")
    return {name: value for name, value in os.environ.items() if not name.startswith(others)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([sys.executable, *PIP, *build], check=True)
    (made,) = folder.glob("paceline-*.whl")
    return made


def test_the_library_alone(wheel: Path, tmp_path: Path) -> None:
    library = Installed(tmp_path, wheel, "")
    assert not library.packages & {"fastapi", "sqlalchemy", "dash", "scikit-learn", "accelerate"}
    script = tmp_path / "train.py"
    script.write_text(STEP)
    data = ("--data", str(tmp_path / "data"))
    assert "trained 2 steps on 2 ranks" in library.run(
        "paceline", "run", "--nproc", "2", *data, str(script)
    )
    assert "no problems found" in library.run("paceline", "doctor", str(script))
    assert "pip install 'paceline[server]'" in library.run("paceline", "server", code=3)
    version = importlib.metadata.version("paceline")
    assert library.run("paceline", "--version") == f"paceline {version}\n"


def test_the_server(wheel: Path, tmp_path: Path) -> None:
    server = Installed(tmp_path, wheel, "server")
    log = tmp_path / "server.log"
    arguments = ["server", "--port", "0", "--data", str(tmp_path / "data")]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(server.bin / "paceline"), *arguments],
            env=environment() | {"XDG_STATE_HOME": str(tmp_path / "state")},
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        ready = until(lambda: re.search(r"http://[\d.:]+", log.read_text()), "the server's address")
        until(lambda: _answers(f"{ready[0]}/readyz"), "the server to be ready", 3 * DEADLINE_S)
        page = httpx.get(ready[0], follow_redirects=True)
        assert page.status_code == 401 or "login" in str(page.url), page
        assert _answers(f"{ready[0]}/login")
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0, log.read_text()[-3000:]


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=DEADLINE_S).status_code == 200
    except httpx.TransportError:
        time.sleep(0.2)
        return False


@pytest.mark.parametrize("framework", ["accelerate", "transformers", "lightning"])
def test_an_adapter(wheel: Path, tmp_path: Path, framework: str) -> None:
    adapter = Installed(tmp_path, wheel, framework)
    assert not adapter.packages & {"fastapi", "sqlalchemy", "dash", "scikit-learn"}
    example = str(ROOT / "examples" / "frameworks" / f"with_{framework}.py")
    data = ("--data", str(tmp_path / "data"))
    out = adapter.run("paceline", "run", "--nproc", "2", *data, example, "--epochs", "1")
    assert "held-out" in out or "train_loss" in out, out
