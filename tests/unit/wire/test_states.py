"""The states of a run, and which may follow which."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from paceline import wire
from paceline.wire import ENDED, RunState, State, WireError


def test_a_run_goes_forward_until_it_is_over() -> None:
    path = [State.PENDING, State.STARTING, State.RUNNING, State.FINISHED]
    for before, after in pairwise(path):
        assert before.may_become(after)
        assert not after.may_become(before)
        assert not before.may_become(before)
    assert State.PENDING.may_become(State.FAILED)
    for state in State:
        assert state.final == (state in ENDED)
        assert not any(State(over).may_become(state) for over in ENDED)


@pytest.mark.parametrize("state", State)
def test_states_travel_by_name(state: State) -> None:
    fields = wire.encode(RunState(state, 1.0, "n"), "r")
    assert msgspec.msgpack.decode(fields[b"data"])["state"] == state.name.lower()
    assert wire.decode(fields) == ("r", RunState(state, 1.0, "n"))


def test_a_state_that_does_not_exist_is_refused() -> None:
    fields = wire.encode(RunState(State.RUNNING, 1.0, "n"))
    fields[b"data"] = fields[b"data"].replace(b"running", b"resting")
    with pytest.raises(WireError, match="state: invalid enum value 'resting'"):
        wire.decode(fields)


def test_predecessors_are_the_same_arrows_backwards() -> None:
    for state in State:
        assert set(state.predecessors) == {other for other in State if other.may_become(state)}
