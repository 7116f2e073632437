"""What a rank's emulated device takes for a step, for its micro-batches and for a trial."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from paceline.train.device import Device
from paceline.train.plan_shard import LocalStep

STEP = LocalStep(0, 7, 0, [1, 2], 4.0, 8.0, 2.0, 1.0, None, 0)
EMULATE = '{"a_s": [0.5, 1], "b_s": [3, 3], "delay_s": [10, 10]}'


def test_a_delay_counts_once_in_a_step_of_several_micro_batches() -> None:
    device = Device(EMULATE, 1, 2)
    assert device.begin(STEP) == pytest.approx(4 * 1 + 3 + 10)
    assert device.begin(replace(STEP, micro_index=1)) == pytest.approx(4 * 1 + 3)


@pytest.mark.parametrize(("overhead", "expected"), [(True, 2 * 3 * 0.5 + 3 + 10), (False, 3.0)])
def test_a_trial_may_leave_out_what_a_step_takes_besides_its_samples(
    overhead: bool, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0)
    Device(EMULATE, 0, 2).trial(0, (3.0, 9.0), overhead=overhead)(2, 100.0)
    assert slept == [pytest.approx(expected)]
