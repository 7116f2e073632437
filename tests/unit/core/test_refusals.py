"""Refusals are counted, and told once a minute."""

from __future__ import annotations

import logging

import pytest

from paceline.core.outage import REPORT_INTERVAL_S, Refusals


def test_a_flood_of_refusals_is_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 1_000.0
    refusals = Refusals(logging.getLogger("test"), "a forged command", clock=lambda: now)
    for _ in range(500):
        refusals.add("no MAC")
    now += REPORT_INTERVAL_S
    refusals.add("a wrong MAC")
    assert refusals.count == 501
    assert [record.getMessage() for record in caplog.records] == [
        "a forged command: no MAC (refused so far: 1)",
        "a forged command: a wrong MAC (refused so far: 501)",
    ]
