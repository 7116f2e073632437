"""Verdicts and advice of runs that somebody made up who had read the documentation alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline_backend.insight.verdict import facts_of, judge
from paceline_backend.simulator import Scenario
from support.marks import some_long
from support.timings import simulated, written

FILE = Path(__file__).parents[3] / "benchmarks" / "scenarios" / "advice.yaml"
RUNS: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())
NEAR = 10  # steps by which a beginning or an end may be off
MISSES = {"v05 two causes that equalise each other": "rank 3 is called 1.11 × slower; it is 2 ×"}


@pytest.mark.parametrize("name", some_long(RUNS, 7))
def test_the_verdict_and_its_advice(name: str, request: pytest.FixtureRequest) -> None:
    expected = RUNS[name]
    if name in MISSES:
        request.applymarker(pytest.mark.xfail(reason=MISSES[name], strict=True))
    if "rows" in expected:
        seen = written(expected["rows"])
    else:
        seen = simulated(Scenario.of(expected["scenario"]))
    facts = facts_of(judge(seen))
    assert facts["level"] in expected["levels"], facts["words"]
    causes = {cause["kind"]: cause for cause in facts["causes"]}
    assert set(causes) == {each["kind"] for each in expected["causes"]}, facts["words"]
    if "first" in expected:
        assert facts["causes"][0]["kind"] == expected["first"], facts["words"]
    for each in expected["causes"]:
        _check_cause(causes[each["kind"]], each)
    words = [facts["words"], *(cause["words"] for cause in facts["causes"])]
    _check_text(" ".join(words), expected.get("words", {}))
    to_do = [cause["to_do"] or "" for cause in facts["causes"]]
    _check_text(" ".join(to_do), expected.get("to_do", {}))


def _check_cause(cause: dict[str, Any], expected: dict[str, Any]) -> None:
    ranks = expected["ranks_any"] if "ranks_any" in expected else [expected["ranks"]]
    assert list(cause["ranks"]) in ranks, cause["words"]
    if "hidden" in expected:
        assert cause["hidden"] == expected["hidden"], cause["words"]
    for when in ("since", "until"):
        if when in expected and expected[when] is None:  # from the beginning, to the end
            assert not cause[when], cause["words"]
        elif when in expected:
            near = expected.get(f"{when}_within", NEAR)
            assert cause[when] == pytest.approx(expected[when], abs=near), cause["words"]
    if "period" in expected:
        assert cause["period"] == expected["period"], cause["words"]
    if "factor" in expected:
        low, high = expected["factor"]
        assert low <= cause["factor"] <= high, cause["words"]


def _check_text(text: str, expected: dict[str, list[str]]) -> None:
    for pattern in expected.get("must", ()):
        assert re.search(pattern, text, re.IGNORECASE), text
    for pattern in expected.get("never", ()):
        assert not re.search(pattern, text, re.IGNORECASE), text
