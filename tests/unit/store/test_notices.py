"""What is said of a run that shows no steps, or takes no policy."""

from __future__ import annotations

import time
from typing import Any

import pytest

from paceline_backend.store import runs

LONG_AGO = time.time() - 10 * runs.NO_STEPS_S


def said(**row: Any) -> str:
    usual = {"policy": "bsp", "attempt": None, "backend": "local", "state": "running"}
    return runs.notice_of({**usual, "started_at": LONG_AGO, **row}) or ""


@pytest.mark.parametrize("state", ["running", "finished"])
def test_a_script_without_a_session(state: str) -> None:
    assert "paceline observe" in said(state=state)


def test_an_observed_script_that_wraps_no_model() -> None:
    assert "DistributedDataParallel" in said(policy="observed", state="finished")


def test_an_observed_run_takes_no_policy() -> None:
    assert "no policy can be in force" in said(policy="observed", attempt=0)


@pytest.mark.parametrize(
    "row",
    [
        {"attempt": 0},
        {"started_at": 2e9 + time.time()},  # it may load for a while
        {"state": "pending", "started_at": None},
        {"state": "failed"},  # its message says why
        {"state": "finished", "backend": "simulated"},
    ],
)
def test_of_others_there_is_nothing_to_say(row: dict[str, Any]) -> None:
    assert said(**row) == ""
