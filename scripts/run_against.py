"""Writes docs/backends/run-against.md: what ran against which engine, and when.

python scripts/run_against.py REPORT.xml…: takes pytest's reports (`--junitxml`) of the contract of
engines in. What they say replaces what docs/backends/run-against.json knew of the same case.
Without reports only the page is written.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "backends"
RESULTS = ("passed", "failed", "skipped")

HEAD = """# Run against

What ran against a real engine: cases of its [contract](writing-a-backend.md#its-tests), and cases
of two engines, each with the date of its last run. Made by `make run-against` from the reports of
`make test-engines`.
A dash: that case was not run since this table is kept.

"""
TAIL = """
On machines of the developers: Linux, network namespaces of one machine, gloo. Nodes with agents of
their own (`local`) have [tests of their own](../../tests/engines/test_local_contract.py).

Never run, by anybody we know of:

- NCCL over several nodes
- more than three nodes
- Slurm above 22.05; GPUs, accounting and federations of Slurm
- Kubernetes above 1.20 as a server; the JobSet and Trainer resources
- KubeRay
- a network that loses packets (netem)
"""

Known = dict[str, dict[str, Any]]  # engine → {version, cases: {case: {result, date}}}


def taken_in(known: Known, report: Path) -> None:
    """Add the results of a pytest report about engines."""
    root = ElementTree.parse(report).getroot()
    for suite in root.iter("testsuite"):
        date = suite.get("timestamp", "")[:10]
        cases = [(case, named) for case in suite.iter("testcase") for named in _engines(case)]
        for case, (name, version) in cases:
            of = known.setdefault(name, {"version": version, "cases": {}})
            if version:
                of["version"] = version
            of["cases"][_words(case)] = {"result": _result(case), "date": date}


def _engines(case: ElementTree.Element) -> list[tuple[str, str]]:
    """Name and version of each engine that a case ran on, as the case noted them."""
    noted = [each for each in case.iter("property") if each.get("name") == "engine"]
    words = [str(each.get("value")).partition(" ") for each in noted]
    return [(name, version) for name, _, version in words]


def _words(case: ElementTree.Element) -> str:
    return str(case.get("name")).removeprefix("test_").replace("_", " ")


def _result(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def page(known: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page in Markdown: a row for each case, a column for each engine."""
    names = sorted(known)
    cases = sorted({case for of in known.values() for case in of["cases"]})
    heads = [f"{name} {known[name]['version']}" for name in names]
    lines = [_row("case", *heads), _row(*["---"] * (1 + len(names)))]
    for case in cases:
        said = (known[name]["cases"].get(case) for name in names)
        lines.append(_row(case, *("–" if each is None else _said(each) for each in said)))
    return HEAD + "\n".join(lines) + "\n" + TAIL


def _said(each: Mapping[str, str]) -> str:
    return f"{each['result']}, {each['date']}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main(folder: Path, reports: list[Path]) -> None:
    """Read reports, and write the page."""
    path = folder / "run-against.json"
    known: Known = json.loads(path.read_text()) if path.exists() else {}
    for report in reports:
        taken_in(known, report)
    path.write_text(json.dumps(known, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    (folder / "run-against.md").write_text(page(known))


if __name__ == "__main__":
    main(FOLDER, [Path(name) for name in sys.argv[1:]])
