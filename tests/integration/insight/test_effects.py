"""What a switch changed: one answer for REST, page and command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import sqlalchemy as sa

from paceline.wire import StepBatch
from paceline_backend.insight import effects
from paceline_backend.insight.whatif.answer import Current, Forecast, PresetForecast
from paceline_backend.store import Store, forecasts, telemetry
from paceline_backend.store.schema import switches
from support.records import add_run, hello, record
from support.web import serving


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 'paceline.db'}") as opened:
        yield opened


@pytest.fixture
def client(store: Store, bus_url: str) -> Iterator[httpx.Client]:
    with serving(store, bus_url) as opened:
        yield opened


def trained(store: Store, times_s: np.ndarray, loads: np.ndarray | None = None) -> int:
    """A run of two ranks whose steps take so long; the key of it."""
    key = add_run(store, "r", nproc=2)
    loads = np.full(len(times_s), 40.0) if loads is None else loads
    rows = [
        record(step, rank, load=float(loads[step]), step_s=float(times_s[step]))
        for step in range(len(times_s))
        for rank in (0, 1)
    ]
    telemetry.write(store, [("r", hello()), ("r", StepBatch(rows))])
    return key


def switch(store: Store, key: int, version: int, step: int | None, policy: str) -> None:
    with store.write() as connection:
        values: dict[str, Any] = {
            "run": key,
            "version": version,
            "policy": policy,
            "parameters": {},
            "requested_at": 0.0,
            "requested_by": "test",
            "effective_step": step,
        }
        connection.execute(sa.insert(switches).values(**values))


def noisy(*parts: tuple[int, float]) -> np.ndarray:
    rng = np.random.default_rng(1)
    times = np.concatenate([np.full(count, seconds) for count, seconds in parts])
    return np.asarray(times * (1 + 0.05 * rng.standard_normal(len(times))))


def test_learning_is_left_out(store: Store, client: httpx.Client) -> None:
    """The first 20 steps of the new policy are slow, and no part of its effect."""
    key = trained(store, noisy((60, 0.4), (20, 0.8), (60, 0.2)))
    switch(store, key, 0, 0, "bsp")
    switch(store, key, 1, 60, "paceline")
    [effect] = client.get("/api/v1/runs/r/effects").json()
    assert (effect["version"], effect["policy"], effect["first_step"]) == (1, "paceline", 60)
    assert (effect["before_steps"], effect["after_steps"]) == (40, 60)
    assert effect["known"]
    assert effect["low"] < 0.5 < effect["high"]
    assert effect["saving"] == pytest.approx(0.5, abs=0.02)
    assert effect["words"].startswith("Steps take 5")
    assert "less time for the same load" in effect["words"]


def test_a_larger_load_is_no_effect(store: Store) -> None:
    loads = np.where(np.arange(140) < 60, 40.0, 80.0)
    key = trained(store, noisy((60, 0.4), (80, 0.8)), loads)
    switch(store, key, 1, 60, "paceline")
    with store.read() as connection:
        [effect] = effects.effects_of(connection, key)
    assert not effect.known
    assert effect.saving == pytest.approx(0.0, abs=0.03)
    assert effect.words.startswith("Its effect is not known yet: between ")


def test_few_steps_tell_nothing(store: Store, client: httpx.Client) -> None:
    key = trained(store, noisy((60, 0.4), (25, 0.2)))
    switch(store, key, 1, 60, "paceline")
    switch(store, key, 2, None, "lbb")  # asked for, and has planned nothing yet
    [effect] = client.get("/api/v1/runs/r/effects").json()
    assert (effect["known"], effect["saving"], effect["after_steps"]) == (False, None, 5)
    assert effect["words"] == (
        "Its effect is not known yet: it needs 20 steps to learn and 8 more."
    )


def test_what_will_never_be_known_is_said(store: Store) -> None:
    key = trained(store, noisy((24, 0.4), (60, 0.2), (60, 0.3)))
    switch(store, key, 1, 24, "paceline")
    switch(store, key, 2, 50, "lbb")
    with store.read() as connection:
        first, _ = effects.effects_of(connection, key)
    assert first.words == (
        "Its effect cannot be known: only 4 steps before it count, 8 are needed."
    )


def test_each_switch_is_compared_with_the_policy_before_it(store: Store) -> None:
    key = trained(store, noisy((60, 0.4), (60, 0.2), (60, 0.3)))
    switch(store, key, 1, 60, "paceline")
    switch(store, key, 2, 120, "lbb")
    with store.read() as connection:
        first, second = effects.effects_of(connection, key)
    assert first.saving == pytest.approx(0.5, abs=0.02)
    assert second.saving == pytest.approx(-0.5, abs=0.06)
    assert "more time for the same load" in second.words


def test_the_forecast_stands_beside_the_outcome(store: Store) -> None:
    key = trained(store, noisy((60, 0.4), (80, 0.2)))
    switch(store, key, 1, 60, "paceline")
    preset = PresetForecast("paceline", {}, 0.2, 0.19, 0.21, 0.5, 0.47, 0.53, "…", False)
    with store.write() as connection:
        for step, saving in ((30, 0.9), (50, 0.5), (100, 0.1)):
            made = Forecast(
                "r",
                float(step),
                Current("bsp", {}, 0),
                step=step,
                forecasts=[msgspec.structs.replace(preset, saving=saving)],
            )
            forecasts.add(connection, key, msgspec.to_builtins(made))
    with store.read() as connection:
        [effect] = effects.effects_of(connection, key)
    assert effect.forecast is not None
    assert effect.forecast.saving == 0.5
    assert effect.words.endswith("The forecast said 50 % less time ± 3.")


def test_a_run_without_switches_has_no_effects(store: Store, client: httpx.Client) -> None:
    trained(store, noisy((40, 0.4)))
    assert client.get("/api/v1/runs/r/effects").json() == []
    assert client.get("/api/v1/runs/s/effects").status_code == 404
