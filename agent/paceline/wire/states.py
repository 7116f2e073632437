"""State machine of a run: its states, which of them are final, and the allowed transitions.

A run is recorded as PENDING, perhaps waits as QUEUED for an engine, starts, trains, and ends in one
of three final states::

    pending -> queued -> starting -> running -> finished, failed or stopped

Reports only move a run forward, and may skip states. Other changes are exceptions: an end may turn
out to be wrong, or to have been requested; a user may resume an ended run; and the control plane
relaunches a multi-node run that has lost the host of its rendezvous. `TransitionCause` names these
cases with the processes that cause them, and `TRANSITIONS` has the states before and after each.

The launch of a multi-node run also has a `Rendezvous` phase: its progress in choosing the host of
the rendezvous, and in relaunching the run after that host is lost.

Agents, ranks and clients only read states (`State.final`, `ENDED`). Only the control plane writes
them: its package `requests` (requests of users, and of the worker), the worker itself, and ingest
when messages from nodes arrive. Each write in `store` names its cause. In SQL, the write is
conditional on `TransitionCause.sources`, because another process may have changed the run
meanwhile. A write that `TRANSITIONS` never allows raises `ImpossibleTransitionError`, because the
caller has a defect.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, StrEnum


class ImpossibleTransitionError(RuntimeError):
    """A run, or its rendezvous, cannot change in this way."""


class State(StrEnum):
    """State of a run, or of a multi-node run on one of its nodes."""

    # Recorded; no process of the run was seen yet.
    PENDING = "pending"
    # Submitted to an engine, which has no nodes for the run yet.
    QUEUED = "queued"
    STARTING = "starting"
    # Ranks train.
    RUNNING = "running"
    # The script reached its end.
    FINISHED = "finished"
    # A process ended with an error, or the run stopped sending signs of life.
    FAILED = "failed"
    # An operator ended the run, or it ended with its agent.
    STOPPED = "stopped"

    @property
    def final(self) -> bool:
        """True if the run has ended."""
        return self in ENDED


# States of a run before the first message of a node.
WAITING = (State.PENDING, State.QUEUED)
# States in which the run has processes.
UNDER_WAY = (State.STARTING, State.RUNNING)
# States of a run that has not ended. Queries use this tuple and not the complement of `ENDED`, so
# that the database can use the index on states.
ACTIVE = (*WAITING, *UNDER_WAY)
ENDED = (State.FINISHED, State.FAILED, State.STOPPED)
# States that a node may report.
REPORTED = (*UNDER_WAY, *ENDED)


class TransitionCause(Enum):
    """Reason for a change of a run's state; its value ends the message "cannot become … when …"."""

    # Worker: the run waits as a job of an engine.
    QUEUE = "its engine queues it"
    # Ingest: a report of a node's agent or launcher, or the leader's Hello.
    REPORT = "a node reports"
    # Requests and worker: no process is left that could report an end, or none was started. If that
    # is only assumed (`runs.lost`), a later message still counts as `REVIVE`.
    END = "the control plane ends it"
    # Ingest: a message about a run whose end was only assumed.
    REVIVE = "a node reports after an assumed end"
    # Ingest: the script exited with success before its last epoch, because a user stopped the run.
    STOP_REQUESTED = "its success turns out to be a requested stop"
    # Worker: the run failed because a user cancelled its job in the engine.
    JOB_CANCELLED = "its job turns out to be cancelled"
    # Requests: a user resumes an ended run.
    RESUME = "a user resumes it"
    # Worker: the rendezvous is lost, and the run starts again on the nodes that are left.
    RELAUNCH = "it is relaunched"

    def allows(self, before: State, after: State) -> bool:
        """Return True if `after` may follow `before` for this reason."""
        return after in TRANSITIONS[self].get(before, ())

    def sources(self, after: State) -> tuple[State, ...]:
        """Return the states that `after` may follow for this reason.

        Raises:
            ImpossibleTransitionError: `after` may follow no state for this reason.
        """
        before = tuple(state for state in State if self.allows(state, after))
        if not before:
            raise ImpossibleTransitionError(f"no run can become {after} when {self.value}")
        return before

    def check(self, before: State, after: State) -> None:
        """Raise `ImpossibleTransitionError` if `after` may not follow `before` for this reason."""
        if not self.allows(before, after):
            raise ImpossibleTransitionError(
                f"a run that is {before} cannot become {after} when {self.value}"
            )


# The states that may follow, by cause and by the state before.
TRANSITIONS: Mapping[TransitionCause, Mapping[State, tuple[State, ...]]] = {
    # A queued run is queued again when its engine reports a different reason for the wait.
    TransitionCause.QUEUE: dict.fromkeys(WAITING, (State.QUEUED,)),
    TransitionCause.REPORT: {
        State.PENDING: REPORTED,
        State.QUEUED: REPORTED,
        State.STARTING: (State.RUNNING, *ENDED),
        State.RUNNING: ENDED,
    },
    TransitionCause.END: dict.fromkeys(ACTIVE, (State.FAILED, State.STOPPED)),
    # A run never has the state FINISHED by assumption, so no later report revives a finished run.
    TransitionCause.REVIVE: dict.fromkeys((State.FAILED, State.STOPPED), REPORTED),
    TransitionCause.STOP_REQUESTED: {State.FINISHED: (State.STOPPED,)},
    TransitionCause.JOB_CANCELLED: {State.FAILED: (State.STOPPED,)},
    TransitionCause.RESUME: dict.fromkeys(ENDED, (State.PENDING,)),
    TransitionCause.RELAUNCH: dict.fromkeys(ACTIVE, (State.PENDING,)),
}


class Rendezvous(StrEnum):
    """Phase of the rendezvous of a multi-node run's launch; `control.multi_node` changes it."""

    # No node was chosen as the host, because none has reported an address yet.
    WAITING = "waiting"
    # The host serves the rendezvous at a known address, which is sent to the nodes.
    READY = "ready"
    # The host went away, and the rendezvous with it. The launchers that are left are being killed.
    HOST_LOST = "host_lost"
    # The next launch is recorded. The nodes of that launch have not been ordered to start it yet.
    RELAUNCH = "relaunch"

    @property
    def restarts(self) -> bool:
        """True while the run is being relaunched; its set of nodes must not change meanwhile."""
        return self in (Rendezvous.HOST_LOST, Rendezvous.RELAUNCH)

    def check(self, after: Rendezvous) -> None:
        """Raise `ImpossibleTransitionError` if the phase `after` may not follow this one."""
        if after is not _NEXT_PHASE[self]:
            raise ImpossibleTransitionError(
                f"a rendezvous that is {self} cannot become {after} within a launch"
            )


# Within an active run the phases form a cycle. A resumed run starts at WAITING.
_NEXT_PHASE = {
    Rendezvous.WAITING: Rendezvous.READY,
    Rendezvous.READY: Rendezvous.HOST_LOST,
    Rendezvous.HOST_LOST: Rendezvous.RELAUNCH,
    Rendezvous.RELAUNCH: Rendezvous.WAITING,
}
