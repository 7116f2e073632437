"""`auto` over the simulator: it switches when that pays, and only then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from paceline.core.emulation import Emulation, Slowdown
from paceline_backend.control.advice import NextLook
from paceline_backend.insight.whatif.answer import Forecast
from paceline_backend.insight.whatif.auto import AUTO_STEPS, decide
from paceline_backend.insight.whatif.forecast import of_state
from paceline_backend.insight.whatif.simulate import Effort
from paceline_backend.simulator.scenario import Communication
from paceline_backend.store.switches import Switch
from support.forecasts import Training, drawn


def steered(
    training: Training, upto: int, presets: tuple[str, ...], *, relaxed: bool = False
) -> list[Switch]:
    """Lets `auto` steer a simulation, as if forecasts took no time; its switches."""
    earlier: list[Forecast] = []
    switches = [Switch(0, training.policy, "api", 0)]
    look = NextLook(0, relaxed)
    while look.step < upto:
        training.train(look.step + 1)
        options = look.presets or presets
        made = of_state(
            "run", training.state(), options, relaxed=relaxed, effort=Effort(replicates=2)
        )
        if made.step is None:
            look = look.after(None, training.step - 1, 0.0, 0.0)
            continue
        decision = decide(made, earlier, switches, "switch", relaxed=relaxed)
        earlier.append(replace(made, decision=decision))
        look = look.after(earlier[-1], training.step - 1, 0.0, 0.0)
        if decision.decided in ("switch", "back"):
            assert decision.policy is not None
            training.switch(decision.policy)
            version = training.simulation.version
            switches.append(Switch(version, decision.policy, "auto", training.step))
    return switches


def test_it_leaves_bsp_when_a_rank_turns_slow() -> None:
    slow = Slowdown(ranks=[2], factor=3.0, first_step=250)
    devices = Emulation([1e-5] * 4, [0.005] * 4, slowdowns=[slow], noise=0.05)
    training = Training(drawn(4_000, 0.02), devices, global_batch=32)
    switches = steered(training, 900, ("bsp", "chronica", "paceline", "sata"))
    assert switches[0].policy == "bsp"
    # Which of the others is best shows once the newest steps all have the slow rank.
    assert 2 <= len(switches) <= 3
    assert "bsp" not in {switch.policy for switch in switches[1:]}
    assert 300 < (switches[1].effective_step or 0) <= 250 + 1.5 * AUTO_STEPS


@pytest.fixture
def equal(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Training]:
    """A run of four equal ranks and a cheap all-reduce, of which rank 0 is slow at first."""
    monkeypatch.setattr("support.forecasts.COMMUNICATION_S", 0.0002)
    monkeypatch.setattr("support.forecasts.RING", Communication(bytes=1e5, bandwidth=3e9))

    def training(slow_steps: int) -> Training:
        slow = Slowdown(ranks=[0], factor=3.0, steps=slow_steps)
        devices = Emulation([1e-5] * 4, [0.02] * 4, slowdowns=[slow], noise=0.02)
        return Training(np.full(1_600, 100.0), devices, global_batch=16)

    return training


def test_slow_first_steps_do_not_change_the_training(equal: Callable[[int], Training]) -> None:
    """As those of a rank whose data is not cached yet. Relaxed presets save much in them."""
    switches = steered(equal(60), 400, ("paceline", "ad-psgd", "rna"), relaxed=True)
    assert {switch.policy for switch in switches} <= {"bsp", "paceline"}


def test_what_changes_the_training_is_left_once_it_saves_nothing(
    equal: Callable[[int], Training],
) -> None:
    switches = steered(equal(160), 600, ("bsp", "ad-psgd"), relaxed=True)
    assert [switch.policy for switch in switches] == ["bsp", "ad-psgd", "bsp"]
