"""The states of a run, which of them are final, and which may follow each other."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a run is in its life. States only go forward; a final state stays."""

    PENDING = "pending"  # recorded; no process of it was seen yet
    QUEUED = "queued"  # its engine has it, and has no nodes for it yet
    STARTING = "starting"  # its processes start
    RUNNING = "running"  # it trains
    FINISHED = "finished"  # its script ended by itself
    FAILED = "failed"  # a process ended with an error, or nothing was heard of the run
    STOPPED = "stopped"  # somebody asked for its end

    @property
    def final(self) -> bool:
        """Whether the run is over."""
        return self in _FINAL

    def may_become(self, other: State) -> bool:
        """Whether `other` may follow this state, directly or with others between them."""
        return not self.final and (other.final or _ORDER.index(other) > _ORDER.index(self))

    @property
    def predecessors(self) -> tuple[State, ...]:
        """The states that this state may follow."""
        return tuple(state for state in State if state.may_become(self))


_ORDER = (State.PENDING, State.QUEUED, State.STARTING, State.RUNNING)
_FINAL = (State.FINISHED, State.FAILED, State.STOPPED)

ENDED = tuple(state.value for state in _FINAL)  # the names of the final states
