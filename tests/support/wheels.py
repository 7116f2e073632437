"""The wheel, and environments that have one part of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.waiting import DEADLINE_S, TRAINING_S

ROOT = Path(__file__).parents[2]
PIP = ["-m", "pip", "--disable-pip-version-check", "--quiet"]
# Imports every module of the packages given, and prints the errors as JSON.
MODULES = """
import importlib, json, pkgutil, sys
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


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this checkout into a folder; return its path."""
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([sys.executable, *PIP, *build], check=True)
    (made,) = folder.glob("paceline-*.whl")
    return made


class Installed:
    """An environment that has one part of the wheel.

    PyTorch is that of the tests' environment, by links, because it has hundreds of megabytes. Its
    metadata are there, too, so pip installs what it needs.

    Args:
        folder: for the environment; made.
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


if __name__ == "__main__":  # folder, wheel, extra
    Installed(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], by_pip=False)
