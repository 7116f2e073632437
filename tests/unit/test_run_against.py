"""The table of what ran against which engine."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]

REPORT = """<testsuites><testsuite timestamp="{date}T10:00:00">
<testcase name="test_a_run_trains"><properties><property name="engine" value="slurm 22.05.8"/>
</properties></testcase>
<testcase name="test_it_is_lost"><properties><property name="engine" value="slurm 22.05.8"/>
</properties><{result}/></testcase>
<testcase name="test_of_no_engine"/>
<testcase name="test_it_moves"><properties><property name="engine" value="slurm 22.05.8"/>
<property name="engine" value="mine "/></properties></testcase>
<testcase name="test_a_run_trains"><properties><property name="engine" value="mine "/></properties>
</testcase></testsuite></testsuites>"""


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_against", ROOT / "scripts/run_against.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reports_are_taken_in(tmp_path: Path) -> None:
    """The newest run of a case counts; what was not run says so."""
    for date, result in (("2026-01-01", "failure"), ("2026-01-02", "skipped")):
        report = tmp_path / f"{date}.xml"
        report.write_text(REPORT.format(date=date, result=result))
        script().main(tmp_path, [report])
    lines = (tmp_path / "run-against.md").read_text().splitlines()
    assert "| case | mine  | slurm 22.05.8 |" in lines
    assert "| a run trains | passed, 2026-01-02 | passed, 2026-01-02 |" in lines
    assert "| it is lost | – | skipped, 2026-01-02 |" in lines
    assert "| it moves | passed, 2026-01-02 | passed, 2026-01-02 |" in lines
    assert not [line for line in lines if "of no engine" in line]


def test_the_page_is_made_of_what_is_known() -> None:
    folder = ROOT / "docs" / "backends"
    known = json.loads((folder / "run-against.json").read_text())
    assert (folder / "run-against.md").read_text() == script().page(known)
