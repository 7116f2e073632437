"""The states of a run, and the order in which they may follow each other."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """The state of a run. States only go forward; a final state stays."""

    # Recorded; no process of the run was seen yet.
    PENDING = "pending"
    # Submitted to an engine, which has no nodes for the run yet.
    QUEUED = "queued"
    # Processes are starting.
    STARTING = "starting"
    # Ranks train.
    RUNNING = "running"
    # The script reached its end.
    FINISHED = "finished"
    # A process ended with an error, or the run stopped sending signs of life.
    FAILED = "failed"
    # An operator ended the run.
    STOPPED = "stopped"

    @property
    def final(self) -> bool:
        """True if the run is over."""
        return self in _FINAL

    def may_become(self, other: State) -> bool:
        """Return True if `other` may follow this state, directly or after further states."""
        return not self.final and (other.final or _ORDER.index(other) > _ORDER.index(self))

    @property
    def predecessors(self) -> tuple[State, ...]:
        """The states that this state may follow."""
        return tuple(state for state in State if state.may_become(self))


_ORDER = (State.PENDING, State.QUEUED, State.STARTING, State.RUNNING)
_FINAL = (State.FINISHED, State.FAILED, State.STOPPED)

# Names of the final states.
ENDED = tuple(state.value for state in _FINAL)
