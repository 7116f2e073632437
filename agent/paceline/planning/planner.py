"""Planner of one attempt: it hears what the ranks do, and plans their next segment.

A controller uses a `Planner` for each run, and so does rank 0's planning process, which plans
while no controller does. The planner reads no clock but to measure itself, and does no I/O.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from paceline.planning.feedback import Window
from paceline.planning.history import AHEAD, History
from paceline.planning.offer import offer
from paceline.policies import Policy, Shuffle
from paceline.wire import CONTROLLER, Plan, StepRecord

# A segment is planned again only after a pause of this many times the planning time.
SPARE = 5.0


class GapError(Exception):
    """An adopted segment did not arrive, so the history must be loaded again."""


class InvalidPlanError(Exception):
    """The policy made a plan that no leader may adopt."""


class Planner:
    """Planner of an attempt's next segment, with a history and a window of feedback.

    Not thread-safe.

    Args:
        history: the attempt's history.
        window: its feedback.
        source: `Plan.source` of the plans.
        spare: a segment is planned again only after a pause of this many times the planning time.
    """

    def __init__(
        self, history: History, window: Window, source: str = CONTROLLER, spare: float = SPARE
    ) -> None:
        self.history = history
        self.window = window
        self._source = source
        self._spare = spare
        self._policy: Policy | None = None
        self._version = -1
        # Plans of the next segment, oldest first, each with the shuffler's result.
        self._plans: list[tuple[Plan, Shuffle | None]] = []
        # Segment, policy version and newest step on which the last plan was based.
        self._basis: tuple[int, ...] = ()
        self._planned_at = 0.0
        # Durations of the last two plans in seconds, including the wait for their turns.
        self._plan_s = (0.0, 0.0)

    def use(self, policy: Policy | None, version: int) -> None:
        """Plan with this policy from now on; None: plan nothing."""
        self._policy, self._version = policy, version

    def add(self, records: Iterable[StepRecord]) -> None:
        """Add records of ranks to the feedback."""
        last = self.history.step + AHEAD
        self.window.add(record for record in records if record.step < last)

    def adopt(self, plan: Plan) -> None:
        """Add a segment that the leader has adopted. A segment that arrives again is ignored.

        Raises:
            ValueError: the segment does not fit the attempt.
            GapError: an earlier segment is missing.
        """
        history = self.history
        # If the leader adopted one of the plans, use its samples: the plan was validated before it
        # was offered, and its samples are unpacked already.
        taken = next((made for made in self._plans if made[0] == plan), None)
        if taken is not None:
            # Take only the samples. `plan.memory` stays as it was decoded: the policy may still
            # change the memory object of the plan that it made.
            plan.keeping(taken[0].assignment)
        elif reason := plan.defect(history.hello.world, history.hello.samples):
            raise ValueError(reason)
        if plan.seq < history.seq and not history.lost:
            return
        if plan.seq < history.seq or (plan.seq > history.seq and not history.lost):
            raise GapError
        if plan.shuffled and taken is not None and (shuffle := taken[1]) is not None:
            history.shuffled(plan, shuffle)
        history.adopt(plan)
        self._plans = []

    def is_due(self) -> bool:
        """Return True if the next segment should be planned, because something has changed."""
        history = self.history
        if self._policy is None or history.lost or history.finished:
            return False
        basis = self._next_basis()
        if basis == self._basis:
            return False
        only_feedback = basis[:-1] == self._basis[:-1]
        return not only_feedback or (
            time.monotonic() >= self._planned_at + self._spare * self._plan_s[1]
        )

    def _next_basis(self) -> tuple[int, ...]:
        return self.history.seq, self._version, self.window.newest

    def plan(self, since: float | None = None) -> Plan:
        """Plan the next segment; `since` is when the caller began to wait for its turn to plan.

        If planning fails, the policy's state is forgotten, and planning is due again when something
        has changed.

        Raises:
            InvalidPlanError: the plan has a defect.
            Exception: of any other kind. Policies are plug-ins, and a stored state may come from
                another version of the plug-in.
        """
        assert self._policy is not None, "is_due() was False"
        since = time.monotonic() if since is None else since
        self._basis = self._next_basis()
        history = self.history
        try:
            # Estimate the planning time as the shorter of the last two, because a policy's first
            # plan can import and compile modules.
            made, shuffle = offer(
                history, self.window, self._policy, self._version, min(self._plan_s)
            )
            made = msgspec.structs.replace(made, source=self._source).keeping(made.assignment)
            # Check the segment as the leader does, which would refuse it for the same reason.
            if reason := made.defect(history.hello.world, history.hello.samples):
                raise InvalidPlanError(reason)
        except Exception:
            history.forget_memory()
            raise
        finally:
            self._planned_at = time.monotonic()
            self._plan_s = (self._plan_s[1], self._planned_at - since)
        self._plans.append((made, shuffle))
        return made
