"""The advisor: which runs it looks at, and that it acts on what `auto` decides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa

from paceline.core.emulation import Emulation
from paceline.wire import SwitchRequested, decode, live
from paceline_backend.control.advice.advisor import PAUSE_S, Advisor, Looked
from paceline_backend.insight.whatif.answer import Current, Decided, Decision, Forecast
from paceline_backend.insight.whatif.auto import AUTO_STEPS
from paceline_backend.store import Store, audit, runs, schema
from paceline_backend.store import switches as switches_store
from paceline_backend.store.outcomes import forecasts
from support.forecasts import Training, drawn
from support.leading import new_run, working
from support.waiting import until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 'paceline.db'}") as opened:
        yield opened


@pytest.mark.timeout(700)  # forecasts have a low priority
def test_it_switches_a_run_that_allows_it(store: Store, bus_url: str) -> None:
    run = new_run(store)
    devices = Emulation([2e-5, 1e-5, 1e-5, 1e-5], [0.005] * 4, noise=0.02)
    training = Training(drawn(640, 1.0), devices, global_batch=16)
    training.train(150)
    training.store(store, run)
    with store.write() as connection:
        key = runs.key_of(connection, run)
        connection.execute(sa.update(schema.runs).values(state="running"))
        forecasts.set_auto(connection, run, "switch", "test", 1.0)
        forecasts.add(connection, key, {"made_at": 1.0, "step": 1, "speeds": "of another release"})

    def decided() -> dict[str, Any] | None:
        with store.read() as connection:
            return forecasts.decided(connection, key)

    with working(Advisor(store, bus_url, "worker", pause_s=0.0).run):
        until(decided, "the first decision", 300)
        first = decided()
        assert first is not None
        assert first["decision"]["decided"] == "wait"
        training.train(training.step + AUTO_STEPS)
        training.store(store, run)
        until(lambda: runs.get(store, run)["version"] == 1, "the switch", 300)
    asked = switches_store.rows(store, run)[-1]
    assert asked["requested_by"] == "auto"
    with store.read() as connection:
        [change], _ = audit.page(connection, run=run)
    assert (change["who"], change["action"], change["revision"]) == ("auto", "run.policy", 1)
    assert "would save" in change["why"]
    last = decided()
    assert last is not None
    assert (last["decision"]["decided"], last["decision"]["policy"]) == ("switch", asked["policy"])
    with redis.Redis.from_url(bus_url) as bus:
        messages = [decode(fields) for _, fields in bus.xrange(live(run))]
    assert messages == [(run, SwitchRequested(1, asked["policy"], asked["requested_at"]))]


def looks(step_s: float, decided: Sequence[Decided | None]) -> list[tuple[int, float]]:
    """Step and time of the looks at a run whose steps take `step_s`, and of the one after them."""
    last, step, at = Looked(), 0, []
    for what in [*decided, None]:
        while not last.due(step, step * step_s):
            step += 1
        now = step * step_s
        at.append((step, now))
        made = None
        if what is not None:
            made = Forecast("r", now, Current("bsp", {}, 0), step=step, decision=Decision(what, ""))
        last = last.then(step, now, made, PAUSE_S)
    return at


def test_it_looks_every_100_steps() -> None:
    assert [step for step, _ in looks(1.0, ["stay"] * 4)] == [24, 124, 224, 324, 424]


@pytest.mark.parametrize("decided", ["stay", "recommend", None])
def test_of_short_steps_it_looks_ever_less_often(decided: Decided | None) -> None:
    at = looks(0.001, [decided] * 7)
    gaps = [now - before for (_, before), (_, now) in itertools.pairwise(at)]
    assert gaps == pytest.approx([2, 4, 8, 16, 30, 30, 30])


def test_what_waits_to_be_confirmed_is_looked_at_without_a_longer_pause() -> None:
    assert [step for step, _ in looks(0.02, ["wait", "switch"])] == [24, 124, 224]
    _, first, second = (now for _, now in looks(0.001, ["stay", "wait"]))
    assert second - first == pytest.approx(2.0)


def test_a_switch_is_judged_after_a_short_pause() -> None:
    (_, before), (_, after) = looks(0.001, ["stay"] * 6 + ["switch"])[-2:]
    assert after - before == pytest.approx(1.0)


def test_whose_runs_it_looks_at(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database's clock tells which leases have expired."""
    active = {name: new_run(store) for name in ("mine", "other's", "nobody's", "off", "ended")}
    with store.write() as connection:
        keys = {name: runs.key_of(connection, run) for name, run in active.items()}
        connection.execute(sa.update(schema.runs).values(state="running"))
        for name, run in active.items():
            forecasts.set_auto(connection, run, "off" if name == "off" else "recommend", "me", 1.0)
        rows = [("mine", "me"), ("other's", "other"), ("off", "me"), ("ended", "me")]
        for name, owner in rows:
            row = {"run": keys[name], "owner": owner, "expires_at": 100.0}
            connection.execute(sa.insert(schema.leases).values(row))
        runs.end(connection, active["ended"], "stopped", "test")

        def watched(now: float) -> set[str]:
            monkeypatch.setattr(forecasts, "now", lambda _: now)
            watched_runs = forecasts.watched(connection, "me")
            assert {run.mode for run in watched_runs} == {"recommend"}
            return {name for name in active if keys[name] in {run.key for run in watched_runs}}

        assert watched(99.0) == {"mine", "nobody's"}
        assert watched(101.0) == {"mine", "other's", "nobody's"}
