"""The state machine of a run: which state may follow which, and who causes it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import wire
from paceline.wire import ENDED, RunState, State, WireError
from paceline.wire.states import (
    ACTIVE,
    REPORTED,
    TRANSITIONS,
    UNDER_WAY,
    WAITING,
    ImpossibleTransitionError,
    Rendezvous,
    TransitionCause,
)

LAUNCHES = (TransitionCause.RESUME, TransitionCause.RELAUNCH)
# The causes that may undo or correct an end.
CORRECTIONS = (
    TransitionCause.REVIVE,
    TransitionCause.STOP_REQUESTED,
    TransitionCause.JOB_CANCELLED,
)
_ORDER = {state: place for place, state in enumerate(ACTIVE)} | dict.fromkeys(ENDED, len(ACTIVE))

attempts = st.lists(
    st.tuples(st.sampled_from(TransitionCause), st.sampled_from(State)), max_size=60
)


def walked(
    attempts: list[tuple[TransitionCause, State]],
) -> list[tuple[State, TransitionCause, State]]:
    """The changes of a run for which these changes are attempted one after the other."""
    state = State.PENDING
    made: list[tuple[State, TransitionCause, State]] = []
    for cause, after in attempts:
        if cause.allows(state, after):
            made.append((state, cause, after))
            state = after
    return made


@given(attempts)
def test_a_launch_goes_forward(attempts: list[tuple[TransitionCause, State]]) -> None:
    for before, cause, after in walked(attempts):
        if cause not in (*LAUNCHES, TransitionCause.REVIVE):
            assert _ORDER[after] >= _ORDER[before]
        assert (after is State.PENDING) == (cause in LAUNCHES)


@given(attempts)
def test_an_end_stays_unless_it_is_corrected_or_the_run_resumed(
    attempts: list[tuple[TransitionCause, State]],
) -> None:
    for before, cause, after in walked(attempts):
        if before.final:
            assert cause in (*CORRECTIONS, TransitionCause.RESUME)
        if before is State.FINISHED:
            assert after in (State.PENDING, State.STOPPED)
        if after is State.FINISHED:
            assert cause in (TransitionCause.REPORT, TransitionCause.REVIVE), (
                "only a node knows that it is through"
            )


@given(attempts)
def test_a_run_that_has_begun_waits_again_only_for_another_launch(
    attempts: list[tuple[TransitionCause, State]],
) -> None:
    begun = False
    for _, cause, after in walked(attempts):
        begun = (begun or after in REPORTED) and cause not in LAUNCHES
        assert not (begun and after in WAITING)


@pytest.mark.parametrize("cause", TransitionCause)
def test_a_check_and_the_sources_say_the_same_as_the_table(cause: TransitionCause) -> None:
    for after in State:
        allowed = [before for before in State if after in TRANSITIONS[cause].get(before, ())]
        if allowed:
            assert list(cause.sources(after)) == allowed
        else:
            with pytest.raises(ImpossibleTransitionError, match=f"no run can become {after}"):
                cause.sources(after)
        for before in State:
            if before in allowed:
                cause.check(before, after)
            else:
                with pytest.raises(ImpossibleTransitionError, match=f"{before} cannot become"):
                    cause.check(before, after)


def test_each_state_can_be_reached_and_ended() -> None:
    reached, again = {State.PENDING}, True
    while again:
        further = {
            after
            for cause in TransitionCause
            for before, following in TRANSITIONS[cause].items()
            if before in reached
            for after in following
        }
        again = not further <= reached
        reached |= further
    assert reached == set(State)
    for state in ACTIVE:
        assert TransitionCause.END.allows(state, State.STOPPED)
        assert all(TransitionCause.REPORT.allows(state, end) for end in ENDED)


def test_the_groups_cover_the_states() -> None:
    assert set(ACTIVE) | set(ENDED) == set(State)
    assert (*WAITING, *UNDER_WAY) == ACTIVE
    for state in State:
        assert state.final == (state in ENDED) == (state not in ACTIVE)


@given(st.lists(st.sampled_from(Rendezvous), max_size=30))
def test_a_rendezvous_restarts_in_order(attempts: list[Rendezvous]) -> None:
    phase, passed = Rendezvous.WAITING, [Rendezvous.WAITING]
    for after in attempts:
        try:
            phase.check(after)
        except ImpossibleTransitionError as error:
            assert f"{phase} cannot become {after}" in str(error)
        else:
            phase = after
            passed.append(after)
    circle = list(Rendezvous) * len(passed)
    assert passed == circle[: len(passed)]
    assert [phase for phase in Rendezvous if phase.restarts] == [*Rendezvous][2:]


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
