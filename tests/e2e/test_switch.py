"""Four real ranks, a switch in mid-run, and everything that must hold across it."""

from __future__ import annotations

import statistics

import pytest

from paceline_backend.insight.replay import replay
from paceline_backend.server.stack import Stack
from paceline_backend.store import Store
from support.e2e import (
    PAUSE_S,
    all_steps,
    controllers_segments,
    planned_effect,
    start_training,
    stop,
    wait_for_step,
)
from support.waiting import TRAINING_S, until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


@pytest.mark.long
def test_switch_in_mid_run(stack: Stack) -> None:
    """The run goes on until the switch shows in what its ranks were assigned."""
    run = start_training(stack)
    wait_for_step(stack, run, 19)  # in the middle of the second epoch of 14 steps
    stack.api("POST", f"/runs/{run}/policy", {"policy": "chronica", "by": "test"})

    def effective_step() -> int | None:
        step: int | None = stack.api("GET", f"/runs/{run}/switches")[1]["effective_step"]
        return step

    effective = until(effective_step, "the switch", TRAINING_S, PAUSE_S)
    assert effective > 19
    wait_for_step(stack, run, effective + 28)
    before = statistics.median(planned_effect(stack, run)[:effective])

    def fallen() -> bool:
        latest = planned_effect(stack, run)[effective:][-14:]
        return len(latest) == 14 and statistics.median(latest) < before / 2

    until(fallen, "an epoch of steps with half the straggler effect", TRAINING_S, PAUSE_S)
    stop(stack, run)

    first, second = stack.api("GET", f"/runs/{run}/switches")
    assert (first["policy"], first["effective_step"]) == ("bsp", 0)
    assert second["policy"] == "chronica"

    steps = all_steps(stack, run)
    assert steps["step"] == list(range(len(steps["step"])))

    coverage = stack.api("GET", f"/runs/{run}/coverage")
    assert coverage["exact"] is True
    assert {epoch["used"] for epoch in coverage["epochs"][:-1]} == {859}

    losses = steps["loss"]
    assert statistics.mean(losses[-14:]) < 0.8 * statistics.mean(losses[:14])

    segments = stack.api("GET", f"/runs/{run}/segments")
    planned = controllers_segments(stack, run)
    assert any(segment["version"] == 1 for segment in planned), "a controller planned chronica"
    # One policy at each step, in one order: bsp, then chronica from the switch's step on.
    assert all((s["first_step"] >= effective) == (s["version"] == 1) for s in segments)

    with Store.open(f"sqlite:///{stack.data / 'paceline.db'}") as store:
        again = replay(store, run)
    assert again.first_difference is None
    assert again.identical == len(planned)
