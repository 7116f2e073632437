"""Forecasts: against what a switch then gives, what they rest on, and when there is none."""

from __future__ import annotations

import copy
import json
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import psutil
import pytest
import sqlalchemy as sa

from paceline import policies
from paceline.core.cost import Cost
from paceline.core.emulation import Emulation, Slowdown
from paceline.policies import Choice, Policy, Problem, UnknownPolicyError
from paceline.wire.synchronisation import Partial, PartialRules
from paceline_backend.api.forecasts import _kept
from paceline_backend.insight.whatif import cautions
from paceline_backend.insight.whatif.answer import FORECAST_STEPS, Forecast, kept
from paceline_backend.insight.whatif.command import from_database
from paceline_backend.insight.whatif.forecast import forecast, of_state, same_speeds
from paceline_backend.insight.whatif.simulate import Effort
from paceline_backend.store import Store, new_runs, runs, schema, switches, telemetry
from paceline_backend.store.new_runs import NewRun
from paceline_backend.store.outcomes import forecasts
from paceline_backend.store.runs import UnknownRunError
from support.forecasts import Training, drawn
from support.leading import new_run
from support.records import add_run
from support.waiting import until
from support.web import ANY, serving

PRESETS = ("bsp", "chronica", "paceline", "sata")
UNEVEN = [2e-5, 1e-5, 1e-5, 1.5e-5]


def devices(a_s: list[float] = UNEVEN, **more: Any) -> Emulation:
    return Emulation(a_s=a_s, b_s=[0.005] * len(a_s), **more)


def of(training: Training, *presets: str) -> Forecast:
    return of_state(
        "run", training.state(), presets or PRESETS, effort=Effort(replicates=3, budget_s=1e9)
    )


@pytest.mark.parametrize(
    ("sizes", "emulation"),
    [
        (drawn(6_000, 1.0), devices(noise=0.03)),
        (drawn(6_000, 0.2), devices(noise=0.05, data_s=[0.0, 0.0, 0.004, 0.0])),
        (drawn(1_000, 1.0), devices(c_s=[1e-4] * 4, noise=0.02)),
    ],
    ids=["uneven sizes", "a slow loader", "short epochs"],
)
def test_it_is_what_the_switch_then_gives(sizes: Any, emulation: Emulation) -> None:
    before = Training(sizes, emulation)
    before.train(100)
    answer = of(before)
    assert answer.reason is None
    assert (answer.left_out, answer.replicates, answer.steps) == ([], 3, before.step - 3)
    assert answer.fit_error is not None
    assert answer.fit_error < 0.03
    for preset in answer.forecasts:
        then = Training(sizes, emulation)
        then.train(before.step)
        if preset.policy != "bsp":
            then.switch(preset.policy)
        began = then.step
        then.train(began + 220)
        measured = then.time(began + 20, began + 220)
        assert preset.step_time_s == pytest.approx(measured, rel=0.035), preset.policy
        assert preset.low_s < preset.step_time_s < preset.high_s
        assert preset.saving_low <= preset.saving <= preset.saving_high
    savings = [preset.saving for preset in answer.forecasts]
    assert savings == sorted(savings, reverse=True)
    in_force = answer.of("bsp")
    assert in_force is not None
    assert (in_force.saving, in_force.saving_low, in_force.saving_high) == (0.0, 0.0, 0.0)
    assert in_force.words == "bsp is in force"
    best = answer.forecasts[0]
    assert best.words.startswith(f"{best.policy} would save {100 * best.saving:.0f} % ±")


def test_the_best_variant_of_a_preset_stands_beside_its_defaults() -> None:
    """Batches that are composed save where the longest sample of a batch holds all ranks up."""
    sizes = np.where(np.arange(4_000) % 16 == 0, 4_000.0, 100.0)
    training = Training(sizes, devices([1e-5] * 4, noise=0.02), global_batch=16)
    training.train(100)
    answer = of_state("run", training.state(), effort=Effort(budget_s=0.0))
    named = [preset.label for preset in answer.forecasts]
    assert len(set(named)) == len(named)
    exact, free = answer.of("paceline"), answer.of("paceline", {"mode": "free"})
    assert exact is not None and free is not None
    assert free.saving > exact.saving + 0.01
    assert (free.changes, free.label) == ("batches", "paceline (mode free)")
    assert free.words.startswith("paceline (mode free) would save")
    assert free.words.endswith("with other samples in a batch")
    for preset in answer.forecasts:
        defaults = answer.of(preset.policy)
        assert defaults is not None
        assert not preset.parameters or preset.step_time_s < 0.99 * defaults.step_time_s
    began = training.step
    then = copy.deepcopy(training)
    then.simulation.switch(policies.make("paceline", {"mode": "free"}))
    then.train(began + 220)
    assert free.step_time_s == pytest.approx(then.time(began + 20, began + 220), rel=0.05)


def test_a_variant_that_is_in_force_is_not_forecast_again() -> None:
    training = Training(drawn(2_000, 1.0), devices())
    training.simulation.switch(policies.make("paceline", {"mode": "free"}))
    training.policy, training.parameters = "paceline", {"mode": "free", "window": 64}
    training.train(60)
    answer = of_state("run", training.state(), effort=Effort(budget_s=0.0))
    ours = [preset for preset in answer.forecasts if preset.policy == "paceline"]
    assert [(preset.in_force, preset.parameters) for preset in ours if preset.in_force] == [
        (True, {"mode": "free", "window": 64})
    ]
    assert len(ours) == 2


def test_parameters_of_the_policy_in_force_are_the_runs_own() -> None:
    training = Training(drawn(3_000, 1.0), devices(noise=0.02))
    training.train(80)
    training.parameters = {"window": 8}
    answer = of(training, "chronica")
    bsp, chronica = answer.of("bsp", {"window": 8}), answer.of("chronica")
    assert bsp is not None
    assert chronica is not None
    assert (bsp.parameters, chronica.parameters) == ({"window": 8}, {})
    assert answer.current.parameters == {"window": 8}


def test_a_rank_that_turned_slow_counts_as_it_is_now() -> None:
    slow = Slowdown(ranks=[0], factor=3.0, first_step=80)
    training = Training(drawn(6_000, 0.3), devices([1e-5] * 4, slowdowns=[slow], noise=0.03))
    training.train(112)
    answer = of(training, "chronica")
    assert answer.reason is None
    assert answer.first_step is not None
    assert 76 <= answer.first_step <= 88
    assert answer.speeds[0] / answer.speeds[1] == pytest.approx(
        2.6, rel=0.15
    )  # b does not scale so
    saving = answer.forecasts[0].saving
    assert answer.forecasts[0].policy == "chronica"
    assert 0.3 < saving < 0.65
    early = Training(drawn(6_000, 0.3), devices([1e-5] * 4, slowdowns=[slow], noise=0.03))
    early.train(86)
    assert of(early).reason is not None
    assert "since a rank's speed changed" in str(of(early).reason)


def test_passing_slowdowns_stay_in_the_forecast() -> None:
    """A rank that is slow in every fifth step or so: no policy saves that, none is blamed."""
    passing = Slowdown(ranks=[0, 1, 2, 3], factor=2.0, chance=0.06)
    training = Training(drawn(6_000, 0.05), devices([1e-5] * 4, slowdowns=[passing]))
    training.train(100)
    answer = of(training, "chronica")
    assert answer.first_step is not None
    assert answer.steps >= 64
    began = training.step
    training.train(began + 200)
    bsp = answer.of("bsp")
    assert bsp is not None
    assert bsp.step_time_s == pytest.approx(training.time(began, began + 200), rel=0.08)
    chronica = answer.of("chronica")
    assert chronica is not None
    assert abs(chronica.saving) < 0.05


def test_random_delays_are_no_change_of_speed() -> None:
    """As in RNA, up to 50 ms on 43: the medians of some of many ranks' blocks are far apart."""
    for seed in range(4):
        emulation = Emulation([1e-5] * 32, [0.04] * 32, delay_s=(0.0, 0.05), seed=seed)
        training = Training(drawn(2_000, 0.02, seed), emulation)
        training.train(64)
        answer = of_state("run", training.state(), (), effort=Effort(replicates=1))
        assert answer.reason is None
        assert answer.steps >= 56, seed


def test_a_change_of_speed_shows_among_delays() -> None:
    ratio = np.random.default_rng(0).uniform(0.6, 1.4, (64, 32))
    assert same_speeds(ratio) == 0
    ratio[:24, 5] /= 3
    assert same_speeds(ratio) == 24
    ratio[:, 7] = np.nan  # it had no samples
    assert same_speeds(ratio) == 24


def test_noise_makes_no_saving() -> None:
    """Equal ranks, sizes alike, 5 % noise: no lower bound above the margin of `auto`, ever."""
    for seed in range(20):
        training = Training(
            drawn(640, 0.02, seed), devices([1e-5] * 4, noise=0.05, seed=seed), global_batch=16
        )
        training.train(64)
        preset = ("chronica", "paceline")[seed % 2]
        answer = of_state("run", training.state(), (preset,), effort=Effort(replicates=1))
        assert answer.reason is None
        assert max(forecast.saving_low for forecast in answer.forecasts) < 0.02, seed


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Training(drawn(500, 1.0), devices([1e-5])), "only one rank"),
        (lambda: Training(drawn(500, 1.0), devices()), "complete, 16 are needed"),
    ],
)
def test_why_there_is_none(make: Any, reason: str) -> None:
    training = make()
    training.train(8)
    answer = of(training)
    assert reason in str(answer.reason)
    assert (answer.forecasts, answer.current.step_time_s) == ([], None)


def test_unknown_speeds_and_policies() -> None:
    training = Training(drawn(500, 1.0), devices())
    training.train(40)
    state = training.state()
    assert state.measured is not None
    assert state.window is not None
    idle = state.measured.features.samples.copy()
    idle[:, 2] = 0
    features = state.measured.features._replace(samples=idle)
    empty = Training(drawn(500, 1.0), devices()).simulation.window
    unknown = replace(state, measured=replace(state.measured, features=features), window=empty)
    assert "ranks [2] is unknown" in str(of_state("run", unknown, PRESETS).reason)
    elsewhere = replace(state, policy="elsewhere")
    assert "no policy 'elsewhere'" in str(of_state("run", elsewhere, PRESETS).reason)


def test_a_preset_that_cannot_be_simulated_costs_only_its_own_forecast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Misjudges:
        def choose(self, feedback: Any, world: int, memory: Any) -> Choice:
            return Choice(Partial(PartialRules(probes=0, staleness=4, mean=True)))

    class Broken:
        def compose(self, problem: Problem, models: Any) -> Any:
            raise ZeroDivisionError("of nothing")

        def schedule(self, problem: Problem, models: Any) -> Any:
            raise AssertionError

    training = Training(drawn(500, 1.0), devices())
    training.train(40)
    real = policies.make

    def make(name: str, parameters: Any = None) -> Policy:
        if name == "lbb":
            raise ImportError("a library is missing")
        policy = real(name, parameters)
        if name == "sata":
            return replace(policy, synchroniser=Misjudges())
        return replace(policy, scheduler=Broken()) if name == "chronica" else policy

    monkeypatch.setattr(policies, "make", make)
    answer = of(training, *PRESETS, "lbb")
    assert {forecast.policy for forecast in answer.forecasts} == {"bsp", "paceline"}
    assert {omitted.policy: omitted.reason for omitted in answer.left_out} == {
        "sata": "ValueError: policy: sata chose a synchronisation that 4 ranks cannot run: "
        "synchroniser 'partial': parameters.probes: expected `int` >= 1",
        "chronica": "ZeroDivisionError: of nothing",
        "lbb": "ImportError: a library is missing",
    }


def test_presets_that_plan_too_slowly_are_left_out() -> None:
    training = Training(drawn(500, 1.0), devices())
    training.train(40)
    effort = Effort(replicates=3, budget_s=1e9, preset_s=0.0)
    answer = of_state("run", training.state(), ["bsp", "sata"], effort=effort)
    reason = "the policy in force cannot be simulated: planning takes too long: 0 s for 0 steps"
    assert answer.reason == reason


def test_presets_for_which_no_time_is_left_are_named() -> None:
    training = Training(drawn(500, 1.0), devices())
    training.train(40)
    effort = Effort(replicates=3, budget_s=1e9, whole_s=0.0)
    answer = of_state("run", training.state(), ["bsp", "sata", "rna"], effort=effort)
    assert [forecast.policy for forecast in answer.forecasts] == ["bsp"]
    assert [omitted.policy for omitted in answer.left_out] == ["sata", "rna"]
    assert {omitted.reason for omitted in answer.left_out} == {
        "no time was left: simulating other presets took 0 s"
    }


def trained(store: Store, steps: int = 80) -> tuple[str, Training]:
    run = new_run(store)
    training = Training(drawn(2_000, 1.0), devices(noise=0.02))
    training.train(steps)
    training.store(store, run)
    return run, training


def test_the_database_tells_what_memory_does(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(database_url) as store:
        run, training = trained(store)
        answer = forecast(store, run, presets=PRESETS, effort=Effort(replicates=3, budget_s=1e9))
        in_memory = of(training)
        assert (answer.step, answer.first_step) == (in_memory.step, in_memory.first_step)
        for from_store, from_memory in zip(answer.forecasts, in_memory.forecasts, strict=True):
            assert from_store.policy == from_memory.policy
            assert from_store.step_time_s == pytest.approx(from_memory.step_time_s, rel=0.01)
        assert answer.current.measured_s == pytest.approx(training.time(20, 84), rel=0.02)
        assert kept([msgspec.to_builtins(answer)]) == [answer]

        add_run(store, "young")
        with pytest.raises(UnknownRunError, match="nobody"):
            forecast(store, "nobody")
        with pytest.raises(UnknownPolicyError, match="nopolicy"):
            forecast(store, run, presets=["nopolicy"])
        legal = (
            r"'paceline \(mode fre\)' is not a variant of paceline; known: paceline, paceline \("
        )
        with pytest.raises(ValueError, match=legal):
            forecast(store, run, presets=["bsp", "paceline (mode fre)"])
        with pytest.raises(ValueError, match="steps: 3"):
            forecast(store, run, steps=3)
        empty = new_run(store)
        assert "not begun to train" in str(forecast(store, empty).reason)
        assert from_database(database_url, empty, as_json=False) == 0
        assert "no forecast: the run has not begun" in capsys.readouterr().out
        assert from_database(database_url, empty, as_json=True) == 0
        assert json.loads(capsys.readouterr().out)["forecasts"] == []
        telemetry.write(store, [(empty, training.hello)])
        assert "too few steps: 0 are complete" in str(forecast(store, empty).reason)


def test_old_forecasts_go_but_those_that_switched_stay(database_url: str) -> None:
    with Store.open(database_url) as store, store.write() as connection:
        key = runs.key_of(connection, new_run_in(connection))
        for at in range(forecasts.KEPT_FORECASTS + 5):
            decided = {"decided": "switch" if at == 1 else "stay"}
            body = {"made_at": float(at), "step": at, "decision": decided}
            forecasts.add(connection, key, body)
        kept = [body["step"] for body in forecasts.bodies(connection, key)]
        assert kept == [1, *range(5, forecasts.KEPT_FORECASTS + 5)]
        last = forecasts.decided(connection, key)
        assert last is not None
        assert last["step"] == forecasts.KEPT_FORECASTS + 4


def new_run_in(connection: Any) -> str:
    return new_runs.create(connection, NewRun("test", "train.py", 4, "bsp"), by="test")


def test_over_rest(store: Store, bus_url: str) -> None:
    """In a child process, which goes with the server; kept while nothing is new."""
    before = set(multiprocessing.active_children())
    run = new_run(store)
    training = Training(drawn(320, 1.0), devices([2e-5, 1e-5], noise=0.02), global_batch=16)
    training.train(80)
    training.store(store, run)
    empty = new_run(store)
    with serving(store, bus_url) as client:
        client.timeout = httpx.Timeout(120)

        def get(query: str = "") -> Any:
            return client.get(f"/api/v1/runs/{run}/whatif{query}")

        first = get().json()
        assert first["reason"] is None
        assert first["step"] == training.step - 1
        assert {"bsp", "chronica", "paceline"} <= {
            forecast["policy"] for forecast in first["forecasts"]
        }
        assert first["current"]["policy"] == "bsp"
        (child,) = set(multiprocessing.active_children()) - before
        assert psutil.Process(child.pid).nice() > 0

        with store.read() as connection:
            (kept,) = forecasts.bodies(connection, runs.key_of(connection, run))
        assert kept["made_at"] == first["made_at"]
        assert get().json() == first
        fresh = get("?refresh=true&steps=16").json()
        assert fresh["made_at"] > first["made_at"]
        assert fresh["steps"] == 16
        assert get().json() == first, "one of another length is not kept"

        young = client.get(f"/api/v1/runs/{empty}/whatif").json()
        assert young["reason"] == "the run has not begun to train"
        assert client.get("/api/v1/runs/nobody/whatif").status_code == 404
        refused = get("?steps=3")
        assert refused.status_code == 422
        assert refused.json()["errors"][0]["field"] == "steps"
    until(lambda: not set(multiprocessing.active_children()) - before, "the child to be gone")


def test_when_a_kept_forecast_holds(store: Store) -> None:
    run, training = trained(store)
    made = replace(of(training), all_presets=True)
    now = time.time()

    def kept(age_s: float, since: float = 0.0) -> bool:
        with store.write() as connection:
            key = runs.key_of(connection, run)
            body = replace(made, made_at=now - age_s)
            connection.execute(sa.delete(schema.forecasts))
            forecasts.add(connection, key, msgspec.to_builtins(body))
        return _kept(store, run, FORECAST_STEPS, since) is not None

    assert kept(500.0), "for 100 steps, however slow they are"
    assert not kept(500.0, since=now - 499.0), "asked for a newer one"
    training.train(training.step + 105)
    training.store(store, run)
    assert kept(50.0), "or for a minute, however fast they are"
    assert not kept(70.0)
    assert _kept(store, run, 32, 0.0) is None
    with store.write() as connection:
        switches.add(connection, run, "chronica", {}, "test")
    assert not kept(1.0), "another policy is in force"


def test_a_forecast_of_some_presets_answers_nobody_who_asks_for_all(store: Store) -> None:
    run, training = trained(store)
    some = of(training)
    every = of_state("run", training.state(), effort=Effort(budget_s=0.0))
    assert (some.all_presets, every.all_presets) == (False, True)
    with store.write() as connection:
        key = runs.key_of(connection, run)
        for made in (every, replace(some, made_at=every.made_at + 1)):
            forecasts.add(connection, key, msgspec.to_builtins(made))
    fresh = _kept(store, run, FORECAST_STEPS, 0.0)
    assert fresh is not None
    assert fresh.made_at == every.made_at


def test_auto_over_rest(store: Store, bus_url: str) -> None:
    run = new_run(store)
    with serving(store, bus_url) as client:
        path = f"/api/v1/runs/{run}/auto"
        off = {"mode": "off", "requested_at": None, "requested_by": None, "last": None}
        assert client.get(path).json() == off | {"relaxed": False, "revision": 0}
        made = client.put(path, json={"mode": "switch", "by": "me"}, headers=ANY).json()
        assert (made["mode"], made["requested_by"]) == ("switch", "configured")
        allowed = client.put(path, json={"mode": "switch", "relaxed": True}, headers=ANY)
        assert allowed.json()["relaxed"]
        kept = client.put(path, json={"mode": "recommend"}, headers=ANY).json()
        assert (kept["mode"], kept["relaxed"]) == ("recommend", True)
        decision = {"decided": "stay", "reason": "why", "policy": None, "parameters": {}}
        decision |= {"saving": None, "low": None, "high": None}
        with store.write() as connection:
            key = runs.key_of(connection, run)
            body = {"made_at": 5.0, "step": 3, "decision": decision}
            forecasts.add(connection, key, body)
        assert client.get(path).json()["last"] == {**decision, "at": 5.0}

        with store.write() as connection:
            runs.end(connection, run, "stopped", "test")
        assert client.put(path, json={"mode": "off"}, headers=ANY).status_code == 409
        assert np.isclose(made["requested_at"], client.get(path).json()["requested_at"], atol=60)


def test_warnings_before_a_switch(
    store: Store, bus_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Padded batches with some long samples: CHRONICA adds up sizes, and takes twice as long."""
    sizes = np.where(np.random.default_rng(0).random(2_000) < 0.1, 1000.0, 50.0)
    training = Training(
        sizes, devices([1e-5] * 4, noise=0.02, cost=Cost(padded=True)), global_batch=64
    )
    training.train(80)
    run, young = new_run(store), new_run(store)
    training.store(store, run)

    answer = forecast(store, run, presets=("bsp", "chronica", "paceline"))
    harmful = {preset.policy: preset.harmful for preset in answer.forecasts}
    assert harmful == {"bsp": False, "chronica": True, "paceline": False}
    chronica = answer.of("chronica")
    assert chronica is not None
    assert "batches are padded" in chronica.warnings[0]
    assert forecast(store, run, presets=["chronica"]).of("bsp") is not None  # in force

    assert from_database(f"sqlite:///{tmp_path / 'paceline.db'}", run, as_json=False) == 0
    assert "warning: chronica would take about" in capsys.readouterr().out

    with serving(store, bus_url) as client:

        def ask(policy: str, of: str = run, **more: Any) -> httpx.Response:
            path = f"/api/v1/runs/{of}/policy/warnings"
            return client.get(path, params={"policy": policy, **more})

        said = ask("chronica").json()["warnings"]
        assert "would take about" in said[0]
        assert "batches are padded" in said[0]
        assert ask("paceline").json() == {"warnings": []}
        free = ask("paceline", parameters='{"mode": "free"}').json()["warnings"]
        assert [words for words in free if "share a global batch" in words] == free
        assert ask("chronica", of=young).json()["warnings"] == said[1:]
        for wrong in ("[]", "{", '{"nope": 1}'):
            refused = ask("chronica", parameters=wrong)
            assert refused.status_code == 422
            assert refused.json()["errors"][0]["field"].startswith("parameters")
        assert ask("nopreset").status_code == 422
        assert ask("bsp", of="nobody").status_code == 404


def test_warnings_that_cannot_be_made_are_none(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> list[str]:
        raise RuntimeError("no model fits")

    monkeypatch.setattr(cautions, "of_run", failing)
    run = new_run(store)
    with serving(store, bus_url) as client:
        said = client.get(f"/api/v1/runs/{run}/policy/warnings", params={"policy": "rna"})
    assert (said.status_code, said.json()) == (200, {"warnings": []})
