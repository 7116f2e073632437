"""Whatever happens to a run, its row changes only as the state machine allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from paceline.wire import RunState, State
from paceline.wire.states import (
    REPORTED,
    WAITING,
    ImpossibleTransitionError,
    Rendezvous,
    TransitionCause,
)
from paceline_backend.store import (
    Connection,
    Store,
    StoreRefusedError,
    jobs,
    new_runs,
    nodes,
    runs,
    telemetry,
)
from paceline_backend.store.audit import RequestedChange, Requester, record_change
from paceline_backend.store.new_runs import NewRun
from paceline_backend.store.nodes import run_nodes, spares
from paceline_backend.store.upkeep import administration
from support.records import hello

ME = Requester("me")
_names = (f"run-{number}" for number in count())
_quiet = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def made(store: Store, **fields: Any) -> str:
    with store.write() as connection:
        new = NewRun("drawn", "train.py", 2, "bsp", **fields)
        return new_runs.create(connection, new, "me", next(_names))


def state_of(store: Store, run: str) -> State:
    with store.read() as connection:
        return State(runs.statuses(connection, [run])[run].state)


def first_attempt(connection: Connection, run: str) -> int:
    return runs.terms(connection, [run])[run].first_attempt


def reports(store: Store, run: str, state: State) -> None:
    with store.read() as connection:
        attempt = first_attempt(connection, run)
    telemetry.write(store, [(run, RunState(state, time.time(), "n", attempt))])


def greets(store: Store, run: str, _: State) -> None:
    with store.read() as connection:
        attempt = first_attempt(connection, run)
    telemetry.write(store, [(run, hello(attempt=attempt))])


def queues(store: Store, run: str, _: State) -> None:
    with store.write() as connection:
        for each in jobs.open_runs(connection, ["slurm"]):
            if each.id == run:
                assert jobs.queue(connection, each, "waits") or each.state not in WAITING[:1]


def cancels(store: Store, run: str, _: State) -> None:
    with store.write() as connection:
        for each in jobs.open_runs(connection, ["slurm"]):
            if each.id == run:
                jobs.cancelled(connection, each)


def ends(store: Store, run: str, state: State, *, lost: bool = False) -> None:
    before = state_of(store, run)
    with store.write() as connection:
        if state not in (State.FAILED, State.STOPPED):
            with pytest.raises(ImpossibleTransitionError):
                runs.end(connection, run, state, "over")
            return
        ended = runs.end(connection, run, state, "over", lost=lost)
    assert ended == TransitionCause.END.allows(before, state)


def is_lost(store: Store, run: str, state: State) -> None:
    ends(store, run, state, lost=True)


def is_silent(store: Store, run: str, _: State) -> None:
    with store.write() as connection:
        for each in runs.unfinished(connection):
            if each.id == run:
                assert runs.end_silent(connection, each, "silent")


def asks_for_the_stop(store: Store, run: str, _: State) -> None:
    with store.write() as connection:
        record_change(connection, RequestedChange(run, ME), "run.stop")


def resumes(store: Store, run: str, _: State) -> None:
    before = state_of(store, run)
    with store.write() as connection:
        new, _ = new_runs.stored(connection, run)
        if before.final:
            record_change(connection, RequestedChange(run, ME), "run.resume")
            new_runs.resume(connection, run, new)
        else:
            with pytest.raises(ImpossibleTransitionError):
                new_runs.resume(connection, run, new)


Happens = Callable[[Store, str, State], None]
CAUSES: dict[Happens, tuple[TransitionCause, ...]] = {
    reports: (TransitionCause.REPORT, TransitionCause.REVIVE, TransitionCause.STOP_REQUESTED),
    greets: (TransitionCause.REPORT,),
    queues: (TransitionCause.QUEUE,),
    cancels: (TransitionCause.JOB_CANCELLED,),
    ends: (TransitionCause.END,),
    is_lost: (TransitionCause.END,),
    is_silent: (TransitionCause.END,),
    asks_for_the_stop: (),
    resumes: (TransitionCause.RESUME,),
}


@_quiet
@given(
    happens=st.lists(st.tuples(st.sampled_from([*CAUSES]), st.sampled_from(REPORTED)), max_size=12)
)
def test_a_run_changes_only_as_its_causes_allow(
    store: Store, happens: list[tuple[Happens, State]]
) -> None:
    run = made(store, backend="slurm", has_jobs=True)
    for what, state in happens:
        before = state_of(store, run)
        what(store, run, state)
        after = state_of(store, run)
        if after is not before:
            assert any(cause.allows(before, after) for cause in CAUSES[what]), (what, before, after)


@pytest.mark.parametrize("state", WAITING)
def test_a_node_cannot_report_what_only_the_control_plane_knows(store: Store, state: State) -> None:
    run = made(store)
    runs_before = runs.get(store, run)
    with pytest.raises(StoreRefusedError, match=f"RunState.state is {state}: a node reports"):
        telemetry.write(store, [(run, RunState(state, 5.0, "n"))])
    assert runs.get(store, run) == runs_before


def stands(store: Store, run: str) -> run_nodes.MultiNodeRun:
    with store.read() as connection:
        group = run_nodes.group(connection, run)
    assert group is not None
    return group


@_quiet
@given(phases=st.lists(st.sampled_from(Rendezvous), max_size=12))
def test_a_rendezvous_is_lost_and_relaunched_in_order(
    store: Store, phases: list[Rendezvous]
) -> None:
    """And what was read before somebody else's step changes nothing."""
    run = made(store, nodes_min=1, nodes_max=2, nodes=["n1", "n2"])
    telemetry.write(store, [(run, RunState(State.STARTING, time.time(), "n1"))])
    for to in phases:
        read = stands(store, run)
        place = ("n1", "10.0.0.1:4001") if to is Rendezvous.READY else (None, None)
        with store.write() as connection:
            try:
                read.rendezvous.check(to)
            except ImpossibleTransitionError:
                with pytest.raises(ImpossibleTransitionError):
                    if to is Rendezvous.RELAUNCH:
                        relaunch(connection, run)
                    else:
                        run_nodes.advance(connection, read, to, *place)
                continue
            if to is Rendezvous.RELAUNCH:
                relaunch(connection, run)
            else:
                assert run_nodes.advance(connection, read, to, *place)
                assert not run_nodes.advance(connection, read, to, *place)
            assert run_nodes.locked(connection, read) is None
        now = stands(store, run)
        assert (now.rendezvous, now.host, now.address) == (to, *place)
        assert (now.first_attempt > read.first_attempt) == (to is Rendezvous.RELAUNCH)


def relaunch(connection: Connection, run: str) -> None:
    new, _ = new_runs.stored(connection, run)
    new_runs.resume(connection, run, new, TransitionCause.RELAUNCH)


def test_a_run_that_has_ended_is_not_relaunched(store: Store) -> None:
    run = made(store, nodes_min=1, nodes_max=2, nodes=["n1", "n2"])
    with store.write() as connection:
        assert runs.end(connection, run, State.STOPPED, "stopped")
        with pytest.raises(ImpossibleTransitionError, match="stopped cannot become pending"):
            relaunch(connection, run)


ACTIVE_RUNS = {
    "unfinished": runs.unfinished,
    "launched": nodes.launched,
    "spares": spares.held,
    "active_runs": administration.active_runs,
}


@pytest.mark.parametrize("name", ACTIVE_RUNS)
def test_queries_for_active_runs_use_the_index_on_states(tmp_path: Path, name: str) -> None:
    """SQLite uses no index for the complement of the final states."""
    with Store.open(f"sqlite:///{tmp_path / 'paceline.db'}") as store, store.read() as connection:
        statements: list[tuple[str, Any]] = []

        @event.listens_for(connection, "before_cursor_execute")
        def note(_connection: Any, _cursor: Any, text: str, values: Any, *_: Any) -> None:
            statements.append((text, values))

        ACTIVE_RUNS[name](connection)
        text, values = next(each for each in statements if "runs.state" in each[0])
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", values).all()
    steps = [str(row[-1]) for row in plan]
    assert any("ix_runs_state" in step for step in steps), steps
    assert "SCAN runs" not in steps
