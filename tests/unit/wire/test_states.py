"""Which states of a run are final, and which may follow each other."""

from __future__ import annotations

from paceline.wire import ENDED, State

LEGAL = {
    State.PENDING: {"starting", "running", "finished", "failed", "stopped"},
    State.STARTING: {"running", "finished", "failed", "stopped"},
    State.RUNNING: {"finished", "failed", "stopped"},
    State.FINISHED: set(),
    State.FAILED: set(),
    State.STOPPED: set(),
}


def test_states_only_go_forward_and_final_ones_stay() -> None:
    for state in State:
        assert {other for other in State if state.may_become(other)} == LEGAL[state], state


def test_predecessors_are_the_same_arrows_backwards() -> None:
    for state in State:
        assert set(state.predecessors) == {other for other in State if state in LEGAL[other]}


def test_final_states_are_those_without_followers() -> None:
    assert set(ENDED) == {state for state in State if state.final}
    assert set(ENDED) == {state for state, followers in LEGAL.items() if not followers}
