"""The verdict at the end of scripted scenarios whose policy is switched on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from paceline_backend.insight.verdict import Observed, facts_of, judge
from paceline_backend.simulator import Scenario, Simulation, TrainedSegment
from support.marks import some_long

FILE = Path(__file__).parents[3] / "benchmarks" / "strangers" / "switches.yaml"
SCENARIOS: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())
NEAR = 10  # steps by which a beginning or an end may be off


def observed(ran: list[TrainedSegment]) -> Observed:
    """What the ranks of a simulation report."""

    def of(what: str) -> np.ndarray:
        return np.concatenate([getattr(each, what) for each in ran])

    def of_batches(what: str) -> np.ndarray:
        return np.concatenate([getattr(each.features, what) for each in ran]).astype(float)

    firsts = [each.segment.first_step for each in ran]
    versions = np.array([each.segment.version for each in ran])
    count = len(of("step_s"))
    return Observed(
        step=np.arange(count),
        samples=of_batches("samples"),
        load=of_batches("load"),
        squares=of_batches("squares"),
        longest=of_batches("longest"),
        data_s=of("data_s"),
        compute_s=of("compute_s"),
        sync_s=of("wait_s") + of("communication_s"),
        between_s=np.zeros(count),
        first=np.isin(np.arange(count), firsts),
        apart=np.zeros(count, bool),
        switched=[firsts[at] for at in np.flatnonzero(np.diff(versions)) + 1],
    )


@pytest.mark.parametrize("name", some_long(SCENARIOS, 3))
def test_the_verdict_at_the_end(name: str) -> None:
    expected = SCENARIOS[name]
    simulation = Simulation.of(Scenario.of(expected["scenario"] | {"name": name}))
    ran = []
    while not simulation.finished:
        ran.append(simulation.advance())
    facts = facts_of(judge(observed(ran)))
    assert facts["level"] in expected["levels"], facts["words"]
    causes = {(cause["kind"], tuple(cause["ranks"])): cause for cause in facts["causes"]}
    assert set(causes) == {(each["kind"], tuple(each["ranks"])) for each in expected["causes"]}
    for each in expected["causes"]:
        cause = causes[each["kind"], tuple(each["ranks"])]
        assert each["hidden"] in (None, cause["hidden"]), cause["words"]
        for when in ("since", "until"):
            if each.get(when) is not None:
                assert cause[when] == pytest.approx(each[when], abs=NEAR), cause["words"]
