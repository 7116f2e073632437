"""Forecasts of relaxed synchronisers, and from segments that ran under them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as replaced

from paceline import policies
from paceline.core.cost import Features
from paceline.core.emulation import Emulation
from paceline.wire import Adopted, Fallback
from paceline.wire.synchronisation import convert
from paceline_backend.insight.whatif.answer import Forecast
from paceline_backend.insight.whatif.auto import AUTO_STEPS, decide
from paceline_backend.insight.whatif.forecast import forecast, of_state
from paceline_backend.insight.whatif.measured import steady_time
from paceline_backend.insight.whatif.simulate import Effort
from paceline_backend.insight.whatif.state import PlanningState, read
from paceline_backend.store import Store, runs, telemetry
from paceline_backend.store.switches import Switch
from support.forecasts import COMMUNICATION_S, Training, drawn
from support.leading import new_run

RELAXED = (
    "rna",
    "ssp",
    "backup-workers",
    "local-sgd",
    "osa",
    "flexrr",
    "ad-psgd",
    "rna-hierarchical",
)
PRESETS = ("bsp", "paceline", *RELAXED)
ALONE = {"local-sgd": 8, "osa": None, "ad-psgd": 1, "rna": 4, "rna-hierarchical": 4}
ALONE |= {"ssp": 3, "flexrr": None}
STALE = ("rna", "ssp", "flexrr", "rna-hierarchical")
SIZES = drawn(6_000, 0.5)
EQUAL = Emulation(a_s=[1e-5] * 4, b_s=[0.005] * 4, noise=0.03)
SLOW = Emulation(a_s=[1e-5, 1e-5, 1e-5, 3e-5], b_s=[0.005] * 4, noise=0.03)


def of(training: Training) -> Forecast:
    return of_state("run", training.state(), PRESETS, effort=Effort(replicates=3, budget_s=1e9))


@cache
def then(policy: str) -> float:
    """What steps under a preset take in the long run."""
    training = Training(SIZES, SLOW, policy=policy)
    training.train(600)
    return training.time(40, training.step)


@pytest.mark.parametrize("policy", ["bsp", *RELAXED])
def test_it_is_what_each_preset_takes(policy: str) -> None:
    """From whichever synchroniser the measured steps had."""
    before = Training(SIZES, SLOW, policy=policy)
    before.train(150)
    answer = of(before)
    assert answer.reason is None
    assert answer.left_out == []
    assert answer.fit_error is not None
    # Who trains what is decided as if ranks did not wait for each other in between: here they do.
    assert answer.fit_error < (0.05 if policy == "backup-workers" else 0.03)
    for preset in answer.forecasts:
        off = 0.06 if policy == "backup-workers" else 0.05
        assert preset.step_time_s == pytest.approx(then(preset.policy), rel=off), preset.policy
        assert preset.low_s < preset.step_time_s < preset.high_s
        assert preset.relaxed == policies.make(preset.policy).relaxed
        assert preset.alone == ALONE.get(preset.policy, 0)
        assert preset.stale == (preset.policy in STALE)
        if preset.policy != policy:
            assert ("but change the training" in preset.words) == preset.relaxed
    assert answer.current.measured_s == pytest.approx(then(policy), rel=0.05)


@pytest.mark.parametrize("devices", [SLOW, EQUAL], ids=["one slow", "equal"])
@pytest.mark.parametrize(
    "policy", ["rna", "backup-workers", "local-sgd", "ad-psgd", "rna-hierarchical"]
)
def test_what_is_measured_under_it(policy: str, devices: Emulation) -> None:
    """Nothing but waiting is in the simulated steps, and rounds take what they take."""
    training = Training(SIZES, devices, policy=policy)
    training.train(150)
    measured = training.state().measured
    assert measured is not None
    assert not measured.together.any()
    assert measured.rest_s == pytest.approx([0.0] * 4, abs=1e-9)
    assert measured.round_s == pytest.approx(COMMUNICATION_S)
    assert measured.remainder_s == pytest.approx([COMMUNICATION_S] * len(measured))
    assert measured.loading_s == pytest.approx([0.0] * 4), "waiting for a plan is no loading"
    cut = measured.since(10)
    assert [span.end - span.first for span in cut.relaxed_spans][1:] == [
        span.end - span.first for span in measured.relaxed_spans if span.first >= 10
    ][-len(cut.relaxed_spans) + 1 :]
    # What is left of the first segment is evened by itself.
    first = cut.relaxed_spans[0].end
    assert cut.evened_s[first:] == pytest.approx(measured.evened_s[10 + first :])
    assert cut.evened_load[first:] == pytest.approx(measured.evened_load[10 + first :])


def test_steps_after_a_switch_are_taken_as_they_were() -> None:
    """Half of the newest steps under an all-reduce, half under rounds; some end no segment."""
    training = Training(SIZES, SLOW)
    training.train(100)
    training.switch("rna")
    training.train(training.step + 30)
    state = training.state()
    measured = state.measured
    assert measured is not None
    both = measured.together
    assert both.any()
    assert not both.all()
    assert measured.rest_s == pytest.approx([0.0] * 4, abs=1e-9)
    answer = of(training)
    assert answer.reason is None
    assert answer.fit_error is not None
    assert answer.fit_error < 0.03
    assert newest_cut(state, 10).fit_error == pytest.approx(answer.fit_error, abs=0.03)
    last = measured.relaxed_spans[-1]
    unfinished = replace(
        measured, relaxed_spans=(*measured.relaxed_spans[:-1], replace(last, whole=False))
    )
    steady = ~both
    whole, count = steady_time(measured, steady)
    none, fewer = steady_time(unfinished, steady)
    assert (count, fewer) == (steady.sum(), count - (last.end - last.first))
    assert whole is not None
    assert none is None


def newest_cut(state: PlanningState, count: int) -> Forecast:
    """As if the newest steps had not been reported yet: the last segment has not ended."""
    measured = state.measured
    assert measured is not None
    *before, last = measured.relaxed_spans
    kept = Features(*(column[:-count] for column in measured.features))
    arrays = ("step", "compute_s", "data_s", "sync_s", "rank_step_s", "load", "several")
    cut = replace(
        measured,
        features=kept,
        relaxed_spans=(*before, replace(last, end=last.end - count, whole=False)),
        **{name: getattr(measured, name)[:-count] for name in arrays},
    )
    assert state.steady is not None
    known = replace(state, measured=cut, steady=state.steady[:-count])
    return of_state("run", known, ("bsp",), effort=Effort(replicates=1))


@pytest.mark.parametrize(
    "policy",
    [
        "rna",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("local-sgd", "ad-psgd", "rna-hierarchical")
        ),
    ],
)
def test_the_database_tells_what_memory_does(database_url: str, policy: str) -> None:
    training = Training(SIZES, SLOW, policy=policy)
    training.train(150)
    with Store.open(database_url) as store:
        run = new_run(store, policy)
        training.store(store, run)
        answer = forecast(store, run, presets=PRESETS, effort=Effort(replicates=3, budget_s=1e9))
    in_memory = of(training)
    assert answer.current.policy == policy
    assert answer.fit_error == pytest.approx(in_memory.fit_error, rel=1e-6)
    for from_store in answer.forecasts:
        from_memory = in_memory.of(from_store.policy)
        assert from_memory is not None
        assert from_store.step_time_s == pytest.approx(from_memory.step_time_s, rel=1e-3), (
            from_store.policy
        )


def test_auto_chooses_them_only_where_it_may() -> None:
    """However much they save."""
    delays = Emulation(a_s=[1e-5] * 4, b_s=[0.005] * 4, delay_s=(0.0, 0.05))
    training = Training(drawn(6_000, 0.1), delays)
    earlier: list[Forecast] = []
    decided: Any = []
    for at in (64, 64 + AUTO_STEPS):
        training.train(at)
        answer = of_state(
            "run", training.state(), ("bsp", "rna", "sata"), effort=Effort(replicates=2)
        )
        best = answer.forecasts[0]
        assert best.policy == "rna"
        assert best.saving_low > 0.05
        decided = [
            decide(answer, earlier, [Switch(0, "bsp", "api", 0)], "switch", relaxed=relaxed)
            for relaxed in (False, True)
        ]
        earlier.append(answer)
    refused, allowed = decided
    assert (allowed.decided, allowed.policy) == ("switch", "rna")
    assert (refused.decided, refused.policy) == ("stay", "sata")
    assert np.isclose(allowed.saving, best.saving)


@pytest.mark.parametrize("policy", ["rna", "flexrr"])
def test_segments_that_fell_back_count_as_all_reduced(database_url: str, policy: str) -> None:
    """Whatever the policy in force plans, its steps and its forecast are of an all-reduce."""
    training = Training(SIZES, SLOW)
    training.train(150)
    relaxed = convert("partial", {"probes": 2, "staleness": 4, "mean": True})
    for ran in training.ran:
        object.__setattr__(ran, "plan", replaced(ran.plan, synchroniser=relaxed))
    fallbacks = [Fallback(0, ran.plan.seq, "it has 2 optimisers") for ran in training.ran]
    with Store.open(database_url) as store:
        run = new_run(store, policy)
        training.store(store, run)
        telemetry.write(store, [(run, fallback) for fallback in fallbacks])
        with store.read() as connection:
            measured = read(connection, runs.key_of(connection, run), 64, 100_000).measured
        answer = forecast(store, run, presets=PRESETS, effort=Effort(replicates=3, budget_s=1e9))
    assert measured is not None
    assert measured.together.all()
    assert measured.relaxed_spans == ()
    assert measured.fallback == "it has 2 optimisers"
    assert answer.reason is None
    assert answer.fit_error is not None
    assert answer.fit_error < 0.03
    left_out = {item.policy: item.reason for item in answer.left_out}
    assert left_out == dict.fromkeys(
        {*RELAXED} - {policy},
        "gradients would be all-reduced, because it has 2 optimisers",
    )
    in_force = answer.of(policy)
    assert in_force is not None
    assert not in_force.relaxed
    assert in_force.step_time_s == pytest.approx(answer.current.measured_s, rel=0.05)
    for name in ("bsp", "paceline"):
        preset = answer.of(name)
        assert preset is not None
        assert preset.step_time_s == pytest.approx(then(name), rel=0.05)


def test_what_is_read_ahead_says_nothing_of_a_fallback(tmp_path: Path) -> None:
    """The newest relaxed segment that has begun tells whether the script suits."""
    training = Training(SIZES, SLOW, policy="rna")
    training.train(150)
    with Store.open(f"sqlite:///{tmp_path / 'p.db'}") as store:
        run = new_run(store, "rna")
        training.store(store, run)
        seq, step = training.ran[-1].plan.seq, training.step

        def known() -> str:
            with store.read() as connection:
                state = read(connection, runs.key_of(connection, run), 64, 100_000)
            assert state.measured is not None
            return state.measured.fallback

        telemetry.write(store, [(run, Fallback(0, seq, "first"))])
        assert known() == "first"
        ahead = replaced(training.ran[-1].plan, seq=seq + 1, first_step=step)
        telemetry.write(store, [(run, Adopted(0, ahead, 2.0))])
        assert known() == "first"


def test_a_fallback_before_the_measured_steps_is_remembered(tmp_path: Path) -> None:
    """Until a relaxed segment has none: the script suits by now."""
    training = Training(SIZES, SLOW)
    training.train(150)
    relaxed = convert("partial", {"probes": 2, "staleness": 4, "mean": True})
    early, *_, late = training.ran
    object.__setattr__(early, "plan", replaced(early.plan, synchroniser=relaxed))
    with Store.open(f"sqlite:///{tmp_path / 'p.db'}") as store:
        run = new_run(store, "bsp")
        training.store(store, run)
        telemetry.write(store, [(run, Fallback(0, early.plan.seq, "of the script"))])

        def known() -> str:
            with store.read() as connection:
                measured = read(connection, runs.key_of(connection, run), 16, 100_000).measured
            assert measured is not None
            assert measured.step[0] > early.plan.first_step + early.plan.steps
            return measured.fallback

        assert known() == "of the script"
        again = replaced(late.plan, seq=late.plan.seq + 1, synchroniser=relaxed)
        telemetry.write(store, [(run, Adopted(0, again, 2.0))])
        assert known() == ""
