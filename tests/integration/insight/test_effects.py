"""What a switch changed: one answer for REST, page and command line."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import sqlalchemy as sa

from paceline.wire import StepBatch
from paceline_backend.control.advice import Effects
from paceline_backend.insight import document, effects
from paceline_backend.insight.document import page
from paceline_backend.insight.whatif.answer import Forecast, LeftOut, PolicyInForce
from paceline_backend.store import Store, telemetry
from paceline_backend.store.outcomes import forecasts
from paceline_backend.store.outcomes.effects import RUN_SETTLE_S
from paceline_backend.store.schema import effects as kept
from paceline_backend.store.schema import forecasts as forecasts_table
from paceline_backend.store.schema import leases, runs, worker_steps
from paceline_backend.store.schema import steps as steps_table
from support.forecasts import BSP, preset
from support.records import add_run, hello, put_switch, record


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


def switch(
    store: Store, key: int, version: int, step: int | None, policy: str, **parameters: Any
) -> None:
    with store.write() as connection:
        values: dict[str, Any] = {
            "run": key,
            "version": version,
            "policy": policy,
            "parameters": parameters,
            "requested_at": 0.0,
            "requested_by": "test",
            "effective_step": step,
        }
        put_switch(connection, values)


def noisy(*parts: tuple[int, float]) -> np.ndarray:
    rng = np.random.default_rng(1)
    times = np.concatenate([np.full(count, seconds) for count, seconds in parts])
    return np.asarray(times * (1 + 0.05 * rng.standard_normal(len(times))))


def test_learning_is_left_out(store: Store, client: httpx.Client) -> None:
    """The first 20 steps of the new policy are slow, and no part of its effect."""
    key = trained(store, noisy((60, 0.4), (20, 0.8), (60, 0.2)))
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
    assert effects.words_of(effect).startswith("Its effect is not known yet: between ")


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
    assert effects.words_of(first) == (
        "Its effect cannot be measured: only 4 steps before the switch count, 8 are needed."
    )


def test_each_switch_is_compared_with_the_policy_before_it(store: Store) -> None:
    key = trained(store, noisy((60, 0.4), (60, 0.2), (60, 0.3)))
    switch(store, key, 1, 60, "paceline")
    switch(store, key, 2, 120, "lbb")
    with store.read() as connection:
        first, second = effects.effects_of(connection, key)
    assert first.saving == pytest.approx(0.5, abs=0.02)
    assert second.saving == pytest.approx(-0.5, abs=0.06)
    assert "more time for the same load" in effects.words_of(second)


def test_the_forecast_stands_beside_the_outcome(store: Store) -> None:
    key = trained(store, noisy((60, 0.4), (80, 0.2)))
    switch(store, key, 1, 60, "paceline")
    option = preset("paceline", 0.5, 0.47, 0.53)
    with store.write() as connection:
        for step, saving in ((30, 0.9), (50, 0.5), (100, 0.1)):
            made = Forecast(
                "r",
                float(step),
                BSP,
                step=step,
                forecasts=[replace(option, saving=saving)],
                left_out=[LeftOut("rna", "planning takes too long")],
            )
            forecasts.add(connection, key, msgspec.to_builtins(made))
        # `auto` has looked at another option by itself, and the watch of nodes at a slow node:
        # that says nothing of this option.
        in_force = replace(option, policy="bsp", in_force=True)
        alone = Forecast("r", 55.0, BSP, step=55, option="lbb")
        node = Forecast("r", 56.0, BSP, step=56, forecasts=[in_force])
        for narrow in (alone, node):
            forecasts.add(connection, key, msgspec.to_builtins(narrow))
    with store.read() as connection:
        [effect] = effects.effects_of(connection, key)
    content = document.read(store, "r")
    assert content.forecast is not None
    assert content.forecast.step == 100
    assert not page.advice(content), "the policy that it recommends is in force by now"
    assert effect.forecast is not None
    assert effect.forecast.saving == 0.5
    assert effects.words_of(effect).endswith("The forecast was 50 % less time ± 3.")


def test_a_run_without_switches_has_no_effects(store: Store, client: httpx.Client) -> None:
    trained(store, noisy((40, 0.4)))
    assert client.get("/api/v1/runs/r/effects").json() == []
    assert client.get("/api/v1/runs/s/effects").status_code == 404


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({}, {}),
        ({"mode": "exact"}, {}),
        ({"window": 32}, {"mode": "exact", "window": 32}),
    ],
)
def test_a_switch_to_the_same_policy_is_not_scored(
    store: Store, client: httpx.Client, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """A drift across it is no effect; defaults may be given or not."""
    key = trained(store, noisy((60, 0.4), (60, 0.4), (80, 0.3), (60, 0.4)))
    switch(store, key, 1, 60, "paceline", **first)
    switch(store, key, 2, 120, "paceline", **second)
    switch(store, key, 3, 200, "paceline", window=16)
    said(
        store,
        key,
        0.2,
        step=100,
        current=replace(BSP, policy="paceline", parameters=first, version=1),
    )
    begin(store, key, state="finished", ended_at=time.time() - 2 * RUN_SETTLE_S)
    for _ in range(2):  # computed, and from the row that is kept
        effects_ = {each["version"]: each for each in client.get("/api/v1/runs/r/effects").json()}
        same = effects_[2]
        assert (same["unchanged"], same["saving"], same["forecast"]) == (True, None, None)
        assert same["complete"]
        assert same["words"] == "Policy and parameters stayed the same, so no effect is measured."
        assert effects_[3]["saving"] is not None
        assert not effects_[3]["unchanged"]
        look(store)
    assert {row["version"]: row["unchanged"] for row in rows(store)} == {
        1: False,
        2: True,
        3: False,
    }


def test_a_forecast_for_another_pair_of_policies_is_not_shown(store: Store) -> None:
    """Forecasts compare with the policy in force: that of `bsp` says nothing of `lbb`."""
    key = trained(store, noisy((60, 0.4), (60, 0.3), (80, 0.2), (60, 0.2), (60, 0.1)))
    switch(store, key, 1, 60, "lbb")
    switch(store, key, 2, 120, "paceline")
    said(store, key, 0.9, step=50)
    with store.read() as connection:
        _, second = effects.effects_of(connection, key)
    assert second.forecast is None
    said(store, key, 0.4, step=100, current=replace(BSP, policy="lbb", version=1))
    said(store, key, 0.8, step=110)  # of another pair once more
    with store.read() as connection:
        _, second = effects.effects_of(connection, key)
    assert second.forecast is not None
    assert second.forecast.saving == 0.4


def test_no_difference_is_said_once_no_later_step_counts(store: Store) -> None:
    key = trained(store, noisy((100, 0.4), (230, 0.4)))
    switch(store, key, 1, 100, "paceline")
    with store.read() as connection:
        [effect] = effects.effects_of(connection, key)
    assert (effect.known, effect.complete) == (False, True)
    assert effects.words_of(effect).startswith("It made no clear difference: between ")


@pytest.fixture
def either(database_url: str) -> Iterator[Store]:
    """The database in both kinds."""
    with Store.open(database_url) as opened:
        yield opened


def said(
    store: Store, key: int, saving: float, *, step: int = 50, current: PolicyInForce = BSP
) -> None:
    """A forecast: `paceline` saves so much, ± 3 %, compared with `bsp` or another policy."""
    bounds = (saving - 0.03, saving + 0.03)
    option = preset("paceline", saving, *bounds)
    made = Forecast("r", float(step), current, step=step, forecasts=[option])
    with store.write() as connection:
        forecasts.add(connection, key, msgspec.to_builtins(made))


def rows(store: Store) -> list[dict[str, Any]]:
    """Each row with the fields of its effect."""
    with store.read() as connection:
        rows = [dict(row) for row in connection.execute(sa.select(kept)).mappings()]
    return [{**row, **row["body"]} for row in rows]


def look(store: Store) -> None:
    Effects(store, "worker").look(threading.Event())


def begin(store: Store, key: int, **values: Any) -> None:
    with store.write() as connection:
        connection.execute(sa.update(runs).where(runs.c.key == key).values(**values))


def test_an_effect_is_kept_once_it_is_known(either: Store) -> None:
    """It survives its steps and its run, with the forecast that stood beside it."""
    key = trained(either, noisy((60, 0.4), (20, 0.8), (60, 0.2)))
    begin(either, key, state="running")
    switch(either, key, 1, 60, "paceline")
    said(either, key, 0.5)
    look(either)
    [row] = rows(either)
    assert (row["run"], row["version"], row["policy"], row["known"]) == ("r", 1, "paceline", True)
    assert not row["complete"]  # up to 200 steps count
    assert row["saving"] == pytest.approx(0.5, abs=0.02)
    assert row["forecast"]["saving"] == 0.5
    with either.write() as connection:
        for table in (steps_table, worker_steps, forecasts_table):
            connection.execute(sa.delete(table).where(table.c.run == key))
    with either.read() as connection:
        [effect] = effects.effects_of(connection, key)
    assert effect.saving == row["saving"]
    assert effect.forecast is not None
    with either.write() as connection:
        connection.execute(sa.delete(runs).where(runs.c.key == key))
    assert rows(either) == [row]


def test_what_is_not_known_is_kept_at_the_end_only(either: Store) -> None:
    key = trained(either, noisy((60, 0.4), (60, 0.4)))
    begin(either, key, state="running")
    switch(either, key, 1, 60, "paceline")
    look(either)
    assert rows(either) == []
    begin(either, key, state="finished", ended_at=time.time())
    look(either)
    [row] = rows(either)
    assert (row["known"], row["complete"], row["after_steps"]) == (False, False, 40)
    look(either)
    assert rows(either) == [row]  # nothing is due until the last telemetry has arrived
    begin(either, key, ended_at=time.time() - RUN_SETTLE_S)
    with either.write() as connection:
        connection.execute(sa.update(kept).values(noted_at=time.time() - RUN_SETTLE_S - 1))
    look(either)
    [again] = rows(either)
    assert again["noted_at"] > row["noted_at"] - RUN_SETTLE_S
    look(either)
    assert rows(either) == [again]


def test_a_complete_effect_is_not_computed_again(store: Store) -> None:
    key = trained(store, noisy((60, 0.4), (60, 0.2), (60, 0.3)))
    begin(store, key, state="running")
    switch(store, key, 1, 60, "paceline")
    switch(store, key, 2, 120, "lbb")
    look(store)
    first, second = sorted(rows(store), key=lambda row: int(row["version"]))
    assert (first["complete"], second["complete"]) == (True, False)
    with store.write() as connection:
        connection.execute(sa.delete(worker_steps))
        connection.execute(sa.delete(steps_table))
    with store.read() as connection:
        [complete, _] = effects.effects_of(connection, key)
    assert complete.saving == first["saving"]


def test_another_workers_runs_are_left_alone(store: Store) -> None:
    key = trained(store, noisy((60, 0.4), (60, 0.2)))
    begin(store, key, state="running")
    switch(store, key, 1, 60, "paceline")
    with store.write() as connection:
        row = {"purpose": "plan", "run": key, "owner": "another"}
        row["expires_at"] = time.time() + 600
        connection.execute(sa.insert(leases).values(row))
    look(store)
    assert rows(store) == []
