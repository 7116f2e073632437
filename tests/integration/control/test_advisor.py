"""The advisor: which runs it looks at, and that it acts on what `auto` decides."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa

from paceline.core.emulation import Emulation
from paceline.wire import RunChanged, decode, live
from paceline_backend.control.advice import Advisor
from paceline_backend.control.periodic import Periodic
from paceline_backend.insight.whatif.answer import Forecast
from paceline_backend.insight.whatif.auto import AUTO_STEPS, FIRST_STEP
from paceline_backend.insight.whatif.child import Forecaster
from paceline_backend.insight.whatif.forecast import of_state
from paceline_backend.insight.whatif.simulate import Effort
from paceline_backend.store import Store, StoreUnavailableError, audit, runs, schema
from paceline_backend.store import switches as switches_store
from paceline_backend.store.outcomes import forecasts
from support.forecasts import BSP, Training, drawn
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

    def decided() -> dict[str, Any] | None:
        with store.read() as connection:
            return forecasts.decided(connection, key)

    advisor, never = Advisor(store, bus_url, "worker", pause_s=0.0), threading.Event()
    with (
        Forecaster(store.url.render_as_string(hide_password=False)) as forecaster,
        working(Periodic("auto", 0.1, partial(advisor.scan, forecaster, never)).run),
    ):
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
        [change], _ = audit.page(connection, audit.ChangeFilter(run))
    assert (change["who"], change["action"], change["revision"]) == ("auto", "run.policy", 1)
    assert "would save" in change["why"]
    last = decided()
    assert last is not None
    assert (last["decision"]["decided"], last["decision"]["policy"]) == ("switch", asked["policy"])
    # The promise was looked at by itself.
    assert {row["label"] for row in last["forecasts"]} == {"bsp", last["option"]}
    with redis.Redis.from_url(bus_url) as bus:
        messages = [decode(fields) for _, fields in bus.xrange(live(run))]
    assert messages == [(run, RunChanged())]


def test_the_first_look_has_steps_enough() -> None:
    devices = Emulation([2e-5, 1e-5, 1e-5, 1e-5], [0.005] * 4, noise=0.02)
    training = Training(drawn(640, 1.0), devices, global_batch=16)
    training.train(FIRST_STEP + 1)
    made = of_state("run", training.state(), ("paceline",), effort=Effort(replicates=1))
    assert made.step is not None, made.reason


class Refusing(Forecaster):
    """Makes no forecast: of the run `away` because the database is away, of others without a word.

    Args:
        away: a run's id.
    """

    def __init__(self, away: str) -> None:
        super().__init__("")
        self._away = away
        self.asked: list[str] = []
        self.started = 0

    def start(self) -> None:
        self.started += 1
        raise OSError("no process can be started")

    def submit(self, run: str, *_: Any, **__: Any) -> Future[Forecast]:
        self.asked.append(run)
        made: Future[Forecast] = Future()
        if run == self._away:
            made.set_exception(StoreUnavailableError("the database is away"))
        else:
            made.set_result(Forecast(run, 0.0, BSP, reason="too few steps"))
        return made


def test_a_look_that_fails_holds_up_no_other_run(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a child that cannot be started end the worker."""
    ids = [new_run(store) for _ in range(2)]
    for run in ids:
        training = Training(drawn(640, 1.0), Emulation([1e-5] * 4, [0.005] * 4), global_batch=16)
        training.train(30)
        training.store(store, run)
    with store.write() as connection:
        connection.execute(sa.update(schema.runs).values(state="running"))
        for run in ids:
            forecasts.set_auto(connection, run, "switch", "test", 1.0)
    advisor, forecaster = Advisor(store, bus_url, "worker"), Refusing(away=ids[0])
    with pytest.raises(StoreUnavailableError):
        advisor.scan(forecaster, threading.Event())
    advisor.scan(forecaster, threading.Event())
    assert forecaster.asked == ids
    assert forecaster.started == 2
    advisor.scan(forecaster, threading.Event())
    assert forecaster.asked == ids  # neither is due again
    with store.write() as connection:
        connection.execute(sa.update(schema.runs).values(attempt=1))
    monkeypatch.setattr(forecasts, "newest_step", lambda *_: 30)
    with pytest.raises(StoreUnavailableError):
        advisor.scan(forecaster, threading.Event())
    assert forecaster.asked == [*ids, ids[0]]  # another attempt is


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
            row = {"purpose": "plan", "run": keys[name], "owner": owner, "expires_at": 100.0}
            connection.execute(sa.insert(schema.leases).values(row))
        runs.end(connection, active["ended"], "stopped", "test")

        def watched(now: float) -> set[str]:
            monkeypatch.setattr(forecasts, "now", lambda _: now)
            watched_runs = forecasts.watched(connection, "me")
            assert {run.mode for run in watched_runs} == {"recommend"}
            return {name for name in active if keys[name] in {run.key for run in watched_runs}}

        assert watched(99.0) == {"mine", "nobody's"}
        assert watched(101.0) == {"mine", "other's", "nobody's"}
