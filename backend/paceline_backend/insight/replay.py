"""Replay: recomputes a run's plans from the database, and compares them with the recorded plans.

`paceline replay` checks in this way that planning is deterministic. A replay covers the latest
attempt only, because the Hello of an earlier attempt is not stored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import typer

from paceline import policies
from paceline.planning.feedback import COLUMNS, feedback_of, single_batches
from paceline.planning.history import History
from paceline.policies import Feedback
from paceline.policies.base import Policy
from paceline.policies.streams import plan_stream
from paceline.wire import PLANNED, Hello, Paces, Plan
from paceline_backend.store import Connection, Store, records, runs, segments, switches

# Fields of a plan that are compared, for a stream and for other data. For a stream, most fields are
# not planned, because the leader selects the samples.
_OF_STREAM = ("shares", "paces")
_OF_DATA = (
    "counts",
    "indices",
    "epoch_end",
    "ett_s",
    "shares",
    "moved",
    "memory",
    "threads",
    "synchroniser",
    "why",
    "moves",
)
# When feedback is read, the rows of this many further steps are read, too.
_CHUNK_STEPS = 256  # steps
# Maximum length of a differing value in the report.
_VALUE_CHARACTERS = 120  # characters


@dataclass(frozen=True)
class ReplayReport:
    """Result of replaying a run's latest attempt.

    `segments` counts the segments that a policy planned, in a controller or on rank 0. For
    `identical` of these segments, the replayed plan equals the recorded plan. `unknown` of these
    segments cannot be replayed, for example because feedback or the policy is missing. `coasted`
    counts segments that no policy planned; their `source` is `coast` or `equal`. `earlier` counts
    planned segments of earlier attempts, which are not replayed. `first_difference` describes the
    first segment that is not identical, or is unknown.
    """

    run: str
    attempt: int
    segments: int
    identical: int
    unknown: int
    coasted: int
    earlier: int
    first_difference: str | None

    @property
    def exact(self) -> bool:
        """Return whether all plans could be replayed and are identical."""
        return self.identical == self.segments


def replay(store: Store, run_id: str) -> ReplayReport:
    """Repeat the planning of every segment of a run's latest attempt that a policy planned.

    A segment is planned from the Hello, the switches, the earlier segments, and the feedback rows
    that the segment names (docs/invariants.md, invariant 6).
    """
    with store.read() as connection:
        key = runs.key_of(connection, run_id)
        hello = runs.hello(connection, key)
        if hello is None:
            return ReplayReport(run_id, 0, 0, 0, 0, 0, 0, None)
        before = segments.before(connection, key, hello)
        replayer = _Replayer(connection, key, History(hello, before))
        for segment in segments.adopted(connection, key, hello):
            replayer.take(segment)
        earlier = segments.planned_before(connection, key, hello.attempt)
    return ReplayReport(
        run=run_id,
        attempt=hello.attempt,
        segments=replayer.total,
        identical=replayer.identical,
        unknown=replayer.unknown,
        coasted=replayer.coasted,
        earlier=earlier,
        first_difference=replayer.first_difference,
    )


class _Replayer:
    def __init__(self, connection: Connection, run: int, history: History) -> None:
        self.total = self.identical = self.unknown = self.coasted = 0
        self.first_difference: str | None = None
        self._history = history
        self._rows = _Rows(connection, run, history.hello)
        self._versions: dict[int, tuple[str, dict[str, Any]]] = {
            switch.version: (switch.policy, switch.parameters)
            for switch in switches.history(connection, run)
        }
        # The policy of each version, or the reason why it cannot be created on this machine.
        self._policies: dict[int, Policy | str] = {}

    def take(self, plan: Plan) -> None:
        if plan.source in PLANNED:
            self.total += 1
            feedback = self._rows.feedback(plan.feedback)
            policy = self._policy(plan.version)
            if feedback is None or self._history.lost or plan.seq != self._history.seq:
                self._unknown(plan, "its feedback or an earlier segment is not in the database")
            elif isinstance(policy, str):
                self._unknown(plan, f"its policy cannot be created here: {policy}")
            elif not self._placement_known(plan):
                self._unknown(plan, "the shuffler's previous placement could not be replayed")
            else:
                self._compare(plan, policy, feedback)
        else:
            self.coasted += 1
        self._history.adopt(plan)

    def _unknown(self, plan: Plan, reason: str) -> None:
        self.unknown += 1
        self._note(f"segment {plan.seq}: {reason}")

    def _placement_known(self, plan: Plan) -> bool:
        history = self._history
        return plan.shuffled or history.hello.stream or not history.must_shuffle(plan.version)

    def _policy(self, version: int) -> Policy | str:
        if version not in self._policies:
            try:
                self._policies[version] = policies.make(*self._versions[version])
            except KeyError:
                self._policies[version] = (
                    f"the switch to version {version} is missing from the database"
                )
            except ValueError as error:
                self._policies[version] = str(error)
        return self._policies[version]

    def _compare(self, plan: Plan, policy: Policy, feedback: Feedback) -> None:
        try:
            again = self._planned_again(plan, policy, feedback)
        except Exception as error:
            # The segment counts as different, because the policy did not fail when the run planned
            # the segment.
            self._note(f"{_named(plan)}: planning failed: {type(error).__name__}: {error}")
        else:
            self._check(plan, again)

    def _planned_again(self, plan: Plan, policy: Policy, feedback: Feedback) -> Plan:
        feedback = single_batches(feedback, self._history.newest)
        if plan.anew:
            self._history.forget_memory()
        self._history.recall(plan.feedback)
        problem = self._history.problem(plan.steps, plan.version, shuffle=plan.shuffled)
        if self._history.hello.stream:
            return plan_stream(policy, problem, feedback)
        ahead = None
        if plan.moves is not None and self._history.shares_data(policy):
            ahead = self._history.next_epoch(plan.version)
        again, shuffle = policies.plan(
            policy, problem, feedback, shuffle=plan.shuffled, ahead=ahead
        )
        if plan.shuffled:
            self._history.shuffled(again, shuffle)
        return again

    def _check(self, plan: Plan, again: Plan) -> None:
        names = _OF_STREAM if self._history.hello.stream else _OF_DATA
        pairs = {name: (getattr(again, name), getattr(plan, name)) for name in names}
        different = {name: both for name, both in pairs.items() if not _same(*both)}
        if different:
            values = "; ".join(f"{name}: {_difference(*both)}" for name, both in different.items())
            self._note(f"{_named(plan)}: {', '.join(different)} differ. {values}")
        else:
            self.identical += 1

    def _note(self, difference: str) -> None:
        self.first_difference = self.first_difference or difference


def _named(plan: Plan) -> str:
    words = [
        f"steps {plan.first_step} to {plan.first_step + plan.steps - 1}",
        f"epoch {plan.epoch}",
        f"{plan.policy}, version {plan.version}",
        f"feedback {[list(steps) for steps in plan.feedback]}",
    ]
    words += ["shuffled"] * plan.shuffled + ["policy state cleared"] * plan.anew
    words += ["moves for the next epoch"] * (plan.moves is not None)
    return f"segment {plan.seq} ({'; '.join(words)})"


def _difference(again: Any, recorded: Any) -> str:
    place = ""
    while (key := _first_difference(again, recorded)) is not None:
        place += f"[{key!r}]" if isinstance(key, int) else f".{key}"
        again, recorded = _items(again)[key], _items(recorded)[key]
    now, then = (repr(value)[:_VALUE_CHARACTERS] for value in (again, recorded))
    return f"{place} {now} replayed, {then} recorded".lstrip()


def _first_difference(again: Any, recorded: Any) -> Any:
    ours, theirs = _items(again), _items(recorded)
    if type(again) is not type(recorded) or ours.keys() != theirs.keys():
        return None
    return next((key for key, value in ours.items() if not _same(value, theirs[key])), None)


def _items(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.asdict(value)
    # A value of type bytes is an array of samples or ranks.
    if isinstance(value, bytes):
        value = np.frombuffer(value, "<u4").tolist()
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return value if isinstance(value, Mapping) else {}


def _same(value: Any, recorded: Any) -> bool:
    """Compare floats to nine digits, because CPUs of different vendors round fits differently."""
    if isinstance(value, Paces) and isinstance(recorded, Paces):
        return _same(msgspec.structs.asdict(value), msgspec.structs.asdict(recorded))
    if isinstance(value, float) and isinstance(recorded, float):
        return math.isclose(value, recorded, rel_tol=1e-9)
    if isinstance(value, Mapping) and isinstance(recorded, Mapping):
        return value.keys() == recorded.keys() and all(
            _same(each, recorded[name]) for name, each in value.items()
        )
    if isinstance(value, list | tuple) and isinstance(recorded, list | tuple):
        return len(value) == len(recorded) and all(map(_same, value, recorded))
    return bool(value == recorded)


class _Rows:
    def __init__(self, connection: Connection, run: int, hello: Hello) -> None:
        self._connection = connection
        self._run = run
        self._hello = hello
        self._steps: dict[int, npt.NDArray[np.float64]] = {}  # [W, COLUMNS] by step
        self._read: set[int] = set()

    def feedback(self, ranges: list[tuple[int, int]]) -> Feedback | None:
        """Return the feedback of all steps in half-open `ranges`; None if a row is missing."""
        if not ranges:
            return Feedback.empty()
        steps = [step for start, end in ranges for step in range(start, end)]
        if not self._read.issuperset(steps):
            self._fetch([*ranges, (steps[-1] + 1, steps[-1] + 1 + _CHUNK_STEPS)])
        if not self._steps.keys() >= set(steps):
            return None
        return feedback_of(steps, [self._steps[step] for step in steps])

    def _fetch(self, ranges: list[tuple[int, int]]) -> None:
        self._steps = records.complete_steps(
            self._connection, self._run, self._hello, COLUMNS, ranges
        )
        self._read = {step for start, end in ranges for step in range(start, end)}


def replay_command(database_url: str, run_id: str, json_output: bool) -> int:
    """Print a run's replay report; return 0 if the replay is `exact`, else 1."""
    with Store.open(database_url) as store:
        with store.read() as connection:
            run_id = runs.whole_id(connection, run_id)
        report = replay(store, run_id)
    if json_output:
        typer.echo(json.dumps({**asdict(report), "exact": report.exact}))
    else:
        uncovered = f"{report.earlier} plans of earlier attempts are not covered; "
        typer.echo(
            f"run {report.run}, attempt {report.attempt}: planning again gave the same plan for "
            f"{report.identical} of {report.segments} planned segments; "
            f"{uncovered if report.earlier else ''}"
            f"{report.coasted} further segments were planned without a policy"
        )
        if report.first_difference:
            typer.echo(f"first difference: {report.first_difference}")
    return 0 if report.exact else 1
