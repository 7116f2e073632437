"""The wheel, installed into an empty environment with what the library alone declares."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.waiting import TRAINING_S

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
