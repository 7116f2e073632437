"""What a rank says that it has been doing for long, and what it is doing."""

from __future__ import annotations

from paceline.train.long_phases import LONG_PHASE_S, PhaseMonitor
from paceline.train.plan_shard import LocalStep
from paceline.train.timing import CpuClock, RunningStep
from paceline.wire import Phase

STEP = LocalStep(0, 7, 3, [1], 1.0, 1.0, 1.0, 1.0, None, 0)


def test_only_what_takes_long_is_told_and_told_again() -> None:
    clock, does = [0.0], [(7, Phase.DATA)]
    monitor = PhaseMonitor(2, 1, lambda: does[0], lambda: clock[0])

    def at(time_s: float) -> tuple[int, Phase, float] | None:
        clock[0] = time_s
        seen = monitor.look()
        return None if seen is None else (seen.step, seen.phase, seen.since_s)

    assert [at(0), at(LONG_PHASE_S - 1)] == [None, None]
    assert at(LONG_PHASE_S) == (7, Phase.DATA, LONG_PHASE_S)
    assert at(LONG_PHASE_S + 1) is None
    assert at(2 * LONG_PHASE_S) == (7, Phase.DATA, 2 * LONG_PHASE_S)
    does[0] = (8, Phase.COMPUTE)
    assert [at(2 * LONG_PHASE_S + 1), at(3 * LONG_PHASE_S)] == [None, None]
    assert at(3 * LONG_PHASE_S + 1) == (8, Phase.COMPUTE, LONG_PHASE_S)


def test_a_step_goes_through_its_phases() -> None:
    running = RunningStep(STEP, CpuClock(), 0.0, None)
    seen = [running.phase]
    for event in (running.gradients_ready, running.reduced, running.body_done):
        event()
        seen.append(running.phase)
    assert seen == [Phase.COMPUTE, Phase.SYNC, Phase.COMPUTE, Phase.DATA]
    with running.waiting():
        assert running.phase is Phase.SYNC
    assert running.phase is Phase.DATA


class Device(CpuClock):
    """Passes stamps when it is told to."""

    def __init__(self) -> None:
        self.done = 0.0
        self.count = 0

    def stamp(self) -> float:
        self.count += 1
        return float(self.count)

    def passed(self, stamp: float) -> bool:
        return stamp <= self.done


def test_a_device_that_is_behind_its_host_counts() -> None:
    device = Device()
    running = RunningStep(STEP, device, 0.0, None)
    running.gradients_ready()
    running.reduced()
    running.body_done()
    seen = []
    for device.done in (0.0, 1.0, 2.0, 4.0):
        seen.append(running.phase)
    assert seen == [Phase.COMPUTE, Phase.COMPUTE, Phase.SYNC, Phase.DATA]
