"""`auto` over the simulator: it switches when that pays, and only then."""

from __future__ import annotations

import msgspec

from paceline.core.emulation import Emulation, Slowdown
from paceline_backend.insight.whatif.answer import Forecast
from paceline_backend.insight.whatif.auto import AUTO_STEPS, decide
from paceline_backend.insight.whatif.forecast import of_state
from paceline_backend.store.switches import Switch
from support.forecasts import Training, drawn


def steered(training: Training, upto: int, presets: tuple[str, ...]) -> list[Switch]:
    """Lets `auto` steer a simulation; its switches."""
    earlier: list[Forecast] = []
    switches = [Switch(0, training.policy, "api", 0)]
    while training.step < upto:
        training.train(training.step + AUTO_STEPS)
        forecast = of_state("run", training.state(), presets, replicates=2)
        decision = decide(forecast, earlier, switches, "switch")
        earlier.append(msgspec.structs.replace(forecast, decision=decision))
        if decision.decided in ("switch", "back"):
            assert decision.policy is not None
            training.switch(decision.policy)
            version = training.simulation.version
            switches.append(Switch(version, decision.policy, "auto", training.step))
    return switches


def test_it_leaves_bsp_once_when_a_rank_turns_slow() -> None:
    slow = Slowdown(ranks=[2], factor=3.0, first_step=250)
    devices = Emulation([1e-5] * 4, [0.005] * 4, slowdowns=[slow], noise=0.05)
    training = Training(drawn(4_000, 0.02), devices, global_batch=32)
    switches = steered(training, 900, ("bsp", "chronica", "paceline", "sata"))
    assert [switch.policy for switch in switches[:1]] == ["bsp"]
    assert len(switches) == 2
    assert switches[1].policy != "bsp"
    assert 300 < (switches[1].effective_step or 0) <= 250 + 3 * AUTO_STEPS


def test_equal_ranks_and_sizes_are_left_alone() -> None:
    for seed in range(2):  # benchmarks/whatif.py --noise has more
        devices = Emulation([1e-5] * 4, [0.005] * 4, noise=0.05, seed=seed)
        training = Training(drawn(640, 0.02, seed), devices, global_batch=16)
        assert len(steered(training, 400, ("chronica", "paceline"))) == 1, seed
