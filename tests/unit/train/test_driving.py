"""What a driver hands on to ranks that it starts itself, without ranks."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import PacelineError
from paceline.train import driving
from paceline.train.driving import Whereabouts, of_driver, variables_of
from paceline.train.environment import Environment

RUN = {
    "PACELINE_RUN": "run-1",
    "PACELINE_BUS": "redis://user:word@bus.cluster:6379",
    "PACELINE_KEY": "ab" * 16,
    "PACELINE_SPOOL": "/data/runs/run-1/spool",
    "PACELINE_MEMORY": "/data/runs/run-1/memory",
    "PACELINE_CHECKPOINTS": "/data/runs/run-1/checkpoints",
    "PACELINE_CA_FILE": "/data/ca.pem",
    "PACELINE_FIRST_ATTEMPT": "3",
    "PACELINE_ATTEMPT": "3",
    "PACELINE_PLACEMENT": '["node-a"]',
    "PACELINE_EMULATE": '{"a_s": [1, 1], "b_s": [0, 0]}',
    "PACELINE_MAX_RESTARTS": "2",
}
HERE, AWAY = Whereabouts("host", True), Whereabouts("other", False)


@pytest.fixture(autouse=True)
def nothing_taken() -> Iterator[None]:
    driving._taken.clear()
    yield
    driving._taken.clear()


def driver(**more: str) -> dict[str, str]:
    return {**RUN, "PACELINE_DRIVER": str(os.getpid()), "PACELINE_TOKEN": "secret", **more}


def test_a_driver_hands_on_its_run() -> None:
    assert of_driver(driver(), "Config") == RUN


def test_only_the_first_of_a_process_has_the_run(caplog: pytest.LogCaptureFixture) -> None:
    of_driver(driver(), "Config")
    assert of_driver(driver(), "Config") == {"PACELINE_EMULATE": RUN["PACELINE_EMULATE"]}
    assert "first Config uses run run-1" in caplog.text


def test_a_process_that_the_driver_has_started_does_not_have_its_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert "PACELINE_RUN" not in (of_driver(driver(PACELINE_DRIVER="1"), "Config") or {})
    assert "run run-1 will not show these workers" in caplog.text
    assert "PACELINE_RUN" in (of_driver(driver(), "Config") or {})


def test_without_a_run_there_is_nothing_to_hand_on() -> None:
    assert of_driver({}, "Config") == {}


def test_an_observed_drivers_ranks_keep_their_variables() -> None:
    assert of_driver(driver(PACELINE_OBSERVE="1"), "Config") is None


def test_one_of_several_ranks_is_no_driver() -> None:
    rank = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"}
    with pytest.raises(PacelineError, match="start the script with `paceline run --driver`"):
        of_driver(rank, "Config")
    assert of_driver({"WORLD_SIZE": "2"}, "Config") == {}  # a worker of Ray Train


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(0, 2))
def test_each_rank_learns_its_attempt_and_all_places(beside: list[bool], starts: int) -> None:
    ranks = [HERE if each else AWAY for each in beside]
    variables = variables_of(RUN, ranks, starts)
    assert len(variables) == len(ranks)
    for of_rank, here in zip(variables, beside, strict=True):
        read = Environment.read(of_rank)
        assert (read.run, read.attempt, read.first_attempt) == ("run-1", 3 + starts, 3)
        assert read.placed(len(ranks)) == ["node-a" if each else "other" for each in beside]
        assert (read.spool is not None) == here  # who would read it elsewhere?
        assert ("PACELINE_CA_FILE" in of_rank) == here
        assert of_rank["PACELINE_KEY"] == RUN["PACELINE_KEY"]
        assert "PACELINE_MAX_RESTARTS" not in of_rank


def test_attempts_that_the_control_plane_would_refuse_are_not_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for of_rank in variables_of(RUN, [HERE, AWAY], 3):
        assert of_rank == {"PACELINE_EMULATE": RUN["PACELINE_EMULATE"]}
    assert "the number of restarts that the driver allows" in caplog.text


@pytest.mark.parametrize(
    ("ranks", "warns"), [([HERE, AWAY], True), ([HERE, HERE], False), ([AWAY, AWAY], True)]
)
def test_a_bus_that_other_nodes_cannot_reach_is_told_of(
    ranks: list[Whereabouts], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    local = RUN | {"PACELINE_BUS": "redis://127.0.0.1:6379"}
    with caplog.at_level(logging.WARNING):
        variables_of(local, ranks, 0)
    assert ("workers on other cannot reach the control plane" in caplog.text) == warns


def test_a_rank_forgets_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in RUN.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("PACELINE_BUS", "redis://other")
    for name in ("PACELINE_SPOOL", "PACELINE_MEMORY", "PACELINE_CHECKPOINTS"):
        monkeypatch.setenv(name, "/other")
    driving.set_variables({"PACELINE_EMULATE": "{}"})
    assert Environment.read(os.environ).run is None
    assert Environment.read(os.environ).emulate == "{}"
    assert json.loads(os.environ["PACELINE_EMULATE"]) == {}
    assert "/other" not in os.environ.values()
