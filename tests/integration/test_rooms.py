"""Each arrow between rooms is checked: import-linter names every import that breaks one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# A file, and what it must not import.
BROKEN = {
    "agent/paceline/wire/bus.py": "paceline.core.errors",
    "agent/paceline/core/terms.py": "paceline.node.rundir",
    "agent/paceline/core/cost.py": "torch",
    "agent/paceline/node/rundir.py": "paceline.train.profile",
    "agent/paceline/node/machine.py": "paceline_backend.server.settings",
    "backend/paceline_backend/api/monitoring.py": "paceline_backend.control.ingest",
    "backend/paceline_backend/control/ingest.py": "paceline_backend.api.monitoring",
    "backend/paceline_backend/insight/report.py": "sqlalchemy",
    "agent/paceline/planning/history.py": "paceline.train.plan.leader",
    "agent/paceline/policies/base.py": "paceline_backend.store.runs",
    "agent/paceline/policies/solve/minmax.py": "paceline_backend.simulator.sizes",
    "backend/paceline_backend/server/settings.py": "paceline_backend.store.runs",
    "backend/paceline_backend/store/meta.py": "paceline.policies.base",
    "backend/paceline_backend/api/models.py": "paceline_dashboard.columns",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the three packages and their contracts."""
    for folder in ("agent", "backend", "dashboard"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__*__"))
        for init in (ROOT / folder).rglob("__init__.py"):
            shutil.copy(init, tmp_path / init.relative_to(ROOT))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(tree: Path) -> subprocess.CompletedProcess[str]:
    folders = [str(tree / folder) for folder in ("agent", "backend", "dashboard")]
    return subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-logo", "--no-cache"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_broken_arrow_is_named(tree: Path) -> None:
    for file, imported in BROKEN.items():
        with (tree / file).open("a") as source:
            source.write(f"\nimport {imported}\n")
    done = lint(tree)
    assert done.returncode == 1
    for file, imported in BROKEN.items():
        importer = ".".join(Path(file).with_suffix("").parts[1:])
        assert f"{importer} -> {imported}" in done.stdout, done.stdout
