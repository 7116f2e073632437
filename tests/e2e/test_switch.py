"""Four real ranks, a switch in mid-run, and everything that must hold across it."""

from __future__ import annotations

import statistics

import pytest

from paceline_backend.insight.replay import replay
from paceline_backend.server.stack import Stack
from paceline_backend.store import Store
from support.e2e import all_steps, start_training, wait_for_end, wait_for_step

pytestmark = pytest.mark.ranks


def test_switch_in_mid_run(stack: Stack) -> None:
    run = start_training(stack, epochs=5)
    wait_for_step(stack, run, 19)  # in the middle of the second epoch of 14 steps
    stack.api("POST", f"/runs/{run}/policy", {"policy": "chronica", "by": "test"})
    wait_for_end(stack, run)

    first, second = stack.api("GET", f"/runs/{run}/switches")
    assert (first["policy"], first["effective_step"]) == ("bsp", 0)
    effective = second["effective_step"]
    assert 19 < effective < 40

    steps = all_steps(stack, run)
    assert steps["step"] == list(range(5 * 14))

    coverage = stack.api("GET", f"/runs/{run}/coverage")
    assert coverage["exact"] is True
    assert [e["used"] for e in coverage["epochs"]] == [859] * 5

    before = statistics.median(steps["se"][:effective])
    after = statistics.median(steps["se"][effective + 14 :])
    assert after < before / 2

    losses = steps["loss"]
    assert statistics.mean(losses[-14:]) < 0.8 * statistics.mean(losses[:14])

    segments = stack.api("GET", f"/runs/{run}/segments")
    planned = [s for s in segments if s["source"] == "controller"]
    assert len(planned) > 0.8 * len(segments), "the controller planned most segments"
    # One policy at each step, in one order: bsp, then chronica from the switch's step on.
    assert all((s["first_step"] >= effective) == (s["version"] == 1) for s in segments)

    store = Store.open(f"sqlite:///{stack.data / 'paceline.db'}")
    try:
        again = replay(store, run)
    finally:
        store.close()
    assert again.first_difference is None
    assert again.identical == len(planned)
