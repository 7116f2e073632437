"""Read, list and end runs.

Each run has a public id, which clients use, and an integer key for foreign keys. Functions that
return something about one run raise `UnknownRunError` if no run has the public id.
`get` and `page` combine the row of a run with facts from other tables: its progress, its expected
end, and a notice if it shows no steps.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from paceline.core import driver, runid
from paceline.core.errors import PacelineError
from paceline.core.terms import steps_per_epoch
from paceline.wire import OBSERVED, Hello, State
from paceline.wire.states import ACTIVE, UNDER_WAY, TransitionCause
from paceline_backend.store import attempts, hellos, leases, refusals, segments
from paceline_backend.store.database import Store, now
from paceline_backend.store.history import RunFilter, RunOrder, days, labels
from paceline_backend.store.nodes import run_nodes
from paceline_backend.store.quality import evaluations, target
from paceline_backend.store.schema import runs, steps

_PRIVATE = (
    *("hello", "seen_at", "lost", "attempts", "pruned_at", "signed"),
    *("rendezvous", "rendezvous_address", "hang_ended", "summed_at"),
    *("spare_nodes", "auto", "rollups_due", "scenario"),
)
_PUBLIC = [column for column in runs.c if column.name not in _PRIVATE]
# Maximum number of times that a node joins or leaves during a multi-node launch. Each time, a new
# attempt can begin.
_MOST_REGROUPINGS = 1_000
# Condition for runs that are not being deleted.
_KEPT = runs.c.pruned_at.is_(None)
# Number of newest steps whose mean time predicts the rest of the run.
_PACE_STEPS = 50
# A run without steps gets a notice this many seconds after its start.
NO_STEPS_S = 60.0

_HELPS = (
    "use a Session to let Paceline plan batches, or `paceline run --observe` or "
    "`paceline observe -- torchrun …` to only measure the script"
)


class UnknownRunError(PacelineError):
    """No run has this id."""


class RunEndedError(PacelineError):
    """The run has ended, so the requested change is impossible."""


class CursorError(PacelineError):
    """The cursor was not created by this server for this list."""


@dataclass(frozen=True)
class HelloSummary:
    """Facts from a Hello that the API shows.

    `dif` is the data set DIF: the sample standard deviation of the sizes. `token_budget` is the
    budget of a step, in the unit of the sizes. With a token budget, `steps_per_epoch` is the number
    of steps of one epoch, and other epochs may differ by a few steps. For a stream,
    `steps_per_epoch` is None.
    """

    global_batch: int
    seed: int
    epochs: int | None
    emulated: dict[str, Any] | None
    dif: float | None
    token_budget: float | None
    steps_per_epoch: int | None


@dataclass(frozen=True)
class Unfinished:
    """A run that has not ended.

    `node` is the node of a single-node run, or the rendezvous host of a multi-node run. `seen_at`
    is when the last message arrived, by the clock of the process that stored it. `signed` is
    whether the run has its own stream on the bus, and `nodes` are the nodes that may send reports
    about it.
    """

    id: str
    state: str
    node: str | None
    seen_at: float | None
    signed: bool
    nodes: tuple[str, ...]
    backend: str


@dataclass(frozen=True)
class RunStatus:
    """State and revision of a run, from which its server-sent events are made."""

    state: str
    revision: int


@dataclass(frozen=True)
class Launched:
    """A run's latest launch.

    `nodes` are those on which an agent, or `paceline run`, may supervise processes of the run.
    """

    state: str
    first_attempt: int
    policy: str
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class TelemetryTerms:
    """Settings of a run against which its telemetry is validated.

    `attempt` is the latest attempt whose Hello is stored, `world` its number of ranks, and
    `samples` the size of its data set.
    """

    nproc: int
    nodes_max: int
    max_restarts: int
    first_attempt: int
    backend: str
    policy: str
    attempt: int | None
    world: int | None
    samples: int | None

    @property
    def observed(self) -> bool:
        """Return whether Paceline only observes the ranks; if so, their number is in the Hello."""
        return self.policy == OBSERVED

    @property
    def most_ranks(self) -> int:
        """Return the maximum number of ranks."""
        return refusals.MOST_RANKS if self.observed else self.nproc * self.nodes_max

    @property
    def last_attempt(self) -> int:
        """Return the highest attempt number that the launch can reach."""
        return last_attempt(self.first_attempt, self.max_restarts, self.nodes_max)


def last_attempt(first_attempt: int, max_restarts: int, nodes_max: int) -> int:
    """Return the highest attempt number that a launch can reach."""
    return first_attempt + max_restarts + (_MOST_REGROUPINGS if nodes_max > 1 else 0)


def terms(connection: sa.Connection, ids: Collection[str]) -> dict[str, TelemetryTerms]:
    """Return the settings of the runs, by public id; runs that do not exist are left out."""
    names = ("id", *TelemetryTerms.__dataclass_fields__)
    columns = [runs.c[name] for name in names]
    rows = connection.execute(sa.select(*columns).where(runs.c.id.in_(ids), _KEPT))
    return {row[0]: TelemetryTerms(*row[1:]) for row in rows}


def key_of(connection: sa.Connection, run: str) -> int:
    """Return the key of a run, which identifies it in the other tables."""
    query = sa.select(runs.c.key).where(runs.c.id == run, _KEPT)
    key = connection.execute(query).scalar()
    if key is None:
        raise UnknownRunError(f"no run {run}")
    return int(key)


def name_of(connection: sa.Connection, key: int) -> str:
    """Return the name that the user gave to a run."""
    return str(connection.execute(sa.select(runs.c.name).where(runs.c.key == key)).scalar_one())


def launched(connection: sa.Connection, run: str) -> Launched:
    """Return a run's latest launch, and lock the run until the transaction ends."""
    c = runs.c
    columns = (c.state, c.first_attempt, c.policy, c.node, c.nodes_max)
    query = sa.select(*columns).where(c.id == run, _KEPT)
    row = connection.execute(query.with_for_update(key_share=True)).one_or_none()
    if row is None:
        raise UnknownRunError(f"no run {run}")
    several = run_nodes.names(connection, run) if row.nodes_max > 1 else []
    nodes = several or ([] if row.node is None else [row.node])
    return Launched(row.state, row.first_attempt, row.policy, tuple(nodes))


def whole_id(connection: sa.Connection, given: str) -> str:
    """Return the public id of a run from the id or a unique prefix.

    Raises:
        InputError: no run's id begins with it, or several do.
    """
    ids = sa.select(runs.c.id).where(runs.c.id.startswith(runid.checked(given), autoescape=True))
    return runid.chosen(given, connection.execute(ids.where(_KEPT)).scalars())


def end(
    connection: sa.Connection, run: str, state: str, message: str, *, lost: bool = False
) -> bool:
    """End a run that has no process left to report its end; return False if it has already ended.

    `lost` means that the end is only assumed: the run's supervisor may still report another end.

    Raises:
        ImpossibleTransitionError: `state` is not a final state, or only nodes can report it.
    """
    return _end(connection, run, state, message, lost=lost)


def end_silent(connection: sa.Connection, silent: Unfinished, message: str) -> bool:
    """Mark a silent run as failed; return False if it ended or sent a message meanwhile."""
    unheard = runs.c.seen_at.is_not_distinct_from(silent.seen_at)
    return _end(connection, silent.id, State.FAILED, message, unheard, lost=True)


def _end(
    connection: sa.Connection,
    run: str,
    state: str,
    message: str,
    *conditions: sa.ColumnElement[bool],
    lost: bool,
) -> bool:
    changed = connection.execute(
        sa.update(runs)
        .where(
            runs.c.id == run,
            runs.c.state.in_(TransitionCause.END.sources(State(state))),
            *conditions,
        )
        .values(state=state, ended_at=time.time(), message=message, lost=lost)
    )
    return changed.rowcount > 0


def tell(connection: sa.Connection, run: str, message: str) -> None:
    """Set the message of a run that has not ended; do nothing for other runs."""
    query = sa.update(runs).where(runs.c.id == run, runs.c.state.in_(ACTIVE))
    connection.execute(query.values(message=message))


def get(store: Store, run: str) -> dict[str, Any]:
    """Return one run in the form that the API shows."""
    with store.read() as connection:
        rows = _described(store, connection, sa.select(*_PUBLIC).where(runs.c.id == run, _KEPT))
    if not rows:
        raise UnknownRunError(f"no run {run}")
    return rows[0]


def against(store: Store, run: str, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of `target.reached` for a run, but with the target `wanted`.

    `wanted` is `{metric, value, direction}`.
    """
    with store.read() as connection:
        row = connection.execute(sa.select(*_PUBLIC).where(runs.c.id == run, _KEPT)).one_or_none()
        if row is None:
            raise UnknownRunError(f"no run {run}")
        asked = {**_plain(row), **_hello_summary(store, row.key, row.attempt), "target": wanted}
        counting = attempts.spans(connection, row.key, row.attempt)
        reached = target.reached(store, connection, asked, counting)
    assert reached is not None, "it has a target"
    return reached


def page(
    store: Store,
    which: RunFilter = RunFilter(),  # noqa: B008  filters are immutable
    *,
    sort: str = "-created_at",
    limit: int = 50,
    cursor: str | None = None,
) -> tuple[list[dict[str, Any]], str | None]:
    """Return a page of runs in the given order, and the next page's cursor (None at the end).

    `sort` is a name of `SORTS`; a leading ``-`` sorts the greatest first. A page continues after
    the last run of the previous one, so runs created meanwhile do not shift it.

    Raises:
        CursorError: `cursor` does not come from an earlier page with the same `sort`.
    """
    order = RunOrder.of(sort)
    value = order.value.label("sorted_by")
    query = sa.select(*_PUBLIC, value).where(_KEPT, *which.conditions(store.engine.dialect.name))
    if cursor is not None:
        query = query.where(order.after(*_place_of(cursor, sort)))
    query = query.order_by(*order.columns()).limit(limit + 1)
    with store.read() as connection:
        rows = _described(store, connection, query, keep_key=True)
    places = [(row.pop("sorted_by"), row.pop("key")) for row in rows]
    following = _cursor_of(*places[limit - 1], sort) if len(rows) > limit else None
    return rows[:limit], following


def _cursor_of(value: Any, key: int, sort: str) -> str:
    if RunOrder.of(sort).newest_first:
        return cursor_at(key)
    place = json.dumps([sort, value, key]).encode()
    return base64.urlsafe_b64encode(place).decode().rstrip("=")


def _place_of(cursor: str, sort: str) -> tuple[Any, int]:
    if RunOrder.of(sort).newest_first:
        return None, key_at(cursor)
    try:
        given, value, key = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except (ValueError, TypeError, RecursionError):
        given, value, key = None, None, -1
    of_text = RunOrder.of(sort).by in ("name", "policy", "state")
    kinds: tuple[type, ...] = (str,) if of_text else (int, float)
    fits = value is None or (isinstance(value, kinds) and not isinstance(value, bool))
    if given != sort or not fits or not isinstance(key, int) or not 0 <= key < 2**63:
        raise CursorError(
            "cursor: not one that GET /runs gave for this `sort`; leave it out to start anew"
        )
    if isinstance(value, int) and abs(value) >= 2**63:
        raise CursorError("cursor: not one that GET /runs gave; leave it out to start anew")
    return value, key


def active(connection: sa.Connection, backends: Collection[str]) -> dict[int, str]:
    """Return the runs to plan: key → public id.

    A run is planned if it is starting or running, if it uses one of these training backends, if its
    leader has sent a Hello, and if it is not observed: an observed run divides its batches itself.
    """
    query = sa.select(runs.c.key, runs.c.id).where(
        runs.c.state.in_(UNDER_WAY),
        runs.c.hello.is_not(None),
        runs.c.policy != OBSERVED,
        runs.c.backend.in_(backends),
    )
    return {int(row.key): str(row.id) for row in connection.execute(query)}


def counts(connection: sa.Connection) -> dict[str, int]:
    """Return the number of runs in each state."""
    query = sa.select(runs.c.state, sa.func.count()).where(_KEPT).group_by(runs.c.state)
    return {str(state): int(count) for state, count in connection.execute(query)}


def hello(connection: sa.Connection, key: int) -> Hello | None:
    """Return the latest Hello of a run's leader; None if there is none, or if it is unusable."""
    return hellos.of_run(connection, key)


def statuses(connection: sa.Connection, ids: Collection[str]) -> dict[str, RunStatus]:
    """Return state and revision of the runs, by public id; unknown runs are left out."""
    c = runs.c
    query = sa.select(c.id, c.state, c.revision).where(c.id.in_(ids), _KEPT)
    return {row.id: RunStatus(row.state, row.revision) for row in connection.execute(query)}


def latest_attempt(connection: sa.Connection, key: int) -> int | None:
    """Return the latest attempt whose Hello is stored; None if there is none."""
    attempt: int | None = connection.execute(
        sa.select(runs.c.attempt).where(runs.c.key == key)
    ).scalar()
    return attempt


def scenario(connection: sa.Connection, run: str) -> dict[str, Any] | None:
    """Return the description of a simulated run; None for other runs."""
    query = sa.select(runs.c.scenario).where(runs.c.key == key_of(connection, run))
    return connection.execute(query).scalar()


def unfinished(connection: sa.Connection) -> list[Unfinished]:
    """Return the runs that have not ended, oldest first.

    A run's supervisor repeats its state regularly, so `seen_at` advances even if neither the node's
    agent nor the ranks send messages.
    """
    c = runs.c
    query = (
        sa.select(c.id, c.state, c.node, c.seen_at, c.signed, c.key, c.nodes_max, c.backend)
        .where(c.state.in_(ACTIVE))
        .order_by(c.key)
    )
    rows = connection.execute(query).all()
    nodes_of = run_nodes.reporting(connection, rows)
    return [Unfinished(*row[:5], nodes_of[row.key], row.backend) for row in rows]


def _described(
    store: Store, connection: sa.Connection, query: sa.Select[Any], *, keep_key: bool = False
) -> list[dict[str, Any]]:
    rows = [_plain(row) for row in connection.execute(query)]
    keys = [run["key"] for run in rows]
    at = now(connection)
    owners = {
        key: {"owner": owner, "alive": expires_at > at}
        for key, (owner, expires_at) in leases.planners(connection, keys).items()
    }
    tags, figures = labels.tags(connection, keys), days.figures(connection, keys)
    for run in rows:
        key, attempt = run["key"], run["attempt"]
        run["tags"], run["figures"] = tags[key], figures.get(key)
        run |= _hello_summary(store, key, attempt)
        spans = attempts.spans(connection, key, attempt)
        last = attempts.newest_complete(connection, key, spans)
        run["epoch"], run["step"] = (None, None) if last is None else (last.epoch, last.step)
        run |= _times(connection, run, run["steps_per_epoch"])
        run["target"] = target.reached(store, connection, run, spans)
        newest = evaluations.read(connection, key, spans, limit=1)
        run["evaluation"] = evaluations.shown(newest[0], run["started_at"]) if newest else None
        run["controller"] = owners.get(key)
        run["notice"] = notice_of(run, segments.equal_because(connection, key, attempt))
        if not keep_key:
            del run["key"]
    return rows


def _hello_summary(store: Store, key: int, attempt: int | None) -> dict[str, Any]:
    summary = None if attempt is None else _summary(store, key, attempt)
    return (
        dict.fromkeys(HelloSummary.__dataclass_fields__) if summary is None else {**vars(summary)}
    )


@lru_cache(maxsize=1024)
def _summary(store: Store, key: int, attempt: int) -> HelloSummary | None:
    """Return the facts of a Hello; cached, because a Hello is large: it has each sample's size."""
    with store.read() as connection:
        message = hello(connection, key)
    if message is None:
        return None
    common = (message.global_batch, message.seed, message.epochs, message.emulated)
    if message.samples is None:
        return HelloSummary(*common, None, None, None)
    sizes = message.sizes_array()
    # The standard deviation of equal sizes can be slightly above 0, because their mean is rounded.
    dif = float(sizes.std(ddof=1)) if len(sizes) and sizes.min() < sizes.max() else 0.0
    per_epoch = None if message.token_budget is None else message.steps_per_epoch
    if per_epoch is None:
        per_epoch = steps_per_epoch(message.samples, message.global_batch, message.drop_last)
    return HelloSummary(*common, dif, message.token_budget, per_epoch)


def _plain(row: sa.Row[Any]) -> dict[str, Any]:
    run = {str(name): value for name, value in row._mapping.items()}
    # Show only whether the variable that marks a driver is set: other variables are private.
    run["driver"] = driver.VARIABLE in run.pop("env")
    return run


def _times(
    connection: sa.Connection, run: Mapping[str, Any], per_epoch: int | None
) -> dict[str, float | None]:
    """Return how long a run waited to start, its duration, and its predicted end; None: unknown.

    `run` has `key`, and `epoch` and `step` of its newest complete step. `per_epoch` is the number
    of steps of a whole epoch, None if unknown.
    """
    began, ended = run["started_at"], run["ended_at"]
    # A simulated run has a clock of its own.
    simulated = run["backend"] == "simulated"
    return {
        "queued_s": None if began is None or simulated else max(0.0, began - run["created_at"]),
        "jct_s": None if began is None or ended is None else max(0.0, ended - began),
        "eta_at": None if simulated else _eta_at(connection, run, per_epoch),
    }


def _eta_at(
    connection: sa.Connection, run: Mapping[str, Any], per_epoch: int | None
) -> float | None:
    """Predict the end of a run from its newest steps and the newest pause between two epochs."""
    if run["state"] != State.RUNNING or run["step"] is None:
        return None
    if not run["epochs"] or not per_epoch:
        return None
    c = steps.c
    query = sa.select(c.step_s, c.ended_at).where(c.run == run["key"], c.step <= run["step"])
    newest = connection.execute(query.order_by(c.step.desc()).limit(_PACE_STEPS)).all()
    if not newest:
        return None
    left = max(0, run["epochs"] * per_epoch - run["step"] - 1)
    step_s = sum(row.step_s for row in newest) / len(newest)
    pause_s = _pause_s(connection, run["key"], run["epoch"], run["epoch"] * per_epoch)
    pauses = run["epochs"] - run["epoch"]
    return float(max(time.time(), newest[0].ended_at + left * step_s + pauses * pause_s))


def _pause_s(connection: sa.Connection, run: int, epoch: int, first: int) -> float:
    """Return the pause before step `first`, which begins an epoch, in seconds; 0 if unknown."""
    c = steps.c
    query = sa.select(c.epoch, c.step_s, c.ended_at).where(c.run == run)
    rows = connection.execute(query.where(c.step.in_((first - 1, first))).order_by(c.step)).all()
    if [row.epoch for row in rows] != [epoch - 1, epoch]:
        return 0.0
    before, after = rows
    return max(0.0, float(after.ended_at - after.step_s - before.ended_at))


def notice_of(run: Mapping[str, Any], equal_because: str = "") -> str | None:
    """Explain why a run shows no steps, or why no policy can be in force.

    Return None if there is nothing to explain: a policy can be in force, and the run shows steps or
    started only recently. `run` is the row of the run. `equal_because` is the reason why its ranks
    get equal local batches whatever the policy plans; it is empty if they do not.
    """
    if equal_because:
        return f"Ranks train with equal local batches, whatever the policy: {equal_because}"
    observed = run["policy"] == OBSERVED
    if run["attempt"] is None:
        if not _trained_unseen(run):
            return None
        if observed:
            return (
                "No rank has stepped an optimiser of a model that DistributedDataParallel or FSDP2 "
                "wraps, so Paceline cannot measure steps."
            )
        return (
            "No rank has iterated over the loader of a paceline.Session, so Paceline neither plans "
            f"batches nor measures steps: {_HELPS}."
        )
    if observed:
        return (
            "Observed: the script divides its batches itself, so no policy can be in force. With a "
            "Session, Paceline would plan them."
        )
    return None


def _trained_unseen(run: Mapping[str, Any]) -> bool:
    """Return whether steps should have arrived: the run has finished, or is a minute old."""
    if run["backend"] == "simulated" or run["started_at"] is None:
        return False
    if run["state"] == State.FINISHED:
        return True
    return bool(run["state"] == State.RUNNING and time.time() > run["started_at"] + NO_STEPS_S)


def cursor_at(key: int) -> str:
    """Return the cursor of a page that continues with the rows whose keys are below `key`."""
    return base64.urlsafe_b64encode(b"%d" % key).decode().rstrip("=")


def key_at(cursor: str, call: str = "GET /runs") -> int:
    """Return the key from a cursor: the page continues with the rows whose keys are below it.

    `call` names the API call in the error message.

    Raises:
        CursorError: `cursor` was not made by `cursor_at`.
    """
    try:
        key = int(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    # The cursor is not ASCII, not Base64, no number, or a number with thousands of digits.
    except ValueError:
        key = -1
    if not 0 <= key < 2**63:
        raise CursorError(f"cursor: not one that {call} gave; leave it out to start anew")
    return key
