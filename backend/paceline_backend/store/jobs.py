"""Runs on engines, and their jobs there.

`runs.backend_jobs` is ``{"launch": n, "jobs": {part: ref}}``. Part 0 is the job that the run begins
with, of `nodes_min` nodes; each further part is a node that may join it. `ref` is the engine's name
of the job, null until it was submitted. `launch` counts how often the run was resumed: jobs of an
earlier launch are leftovers. Further keys are left out while they are empty:

* `replaces`, ``{part: node}``: parts that were asked for so that the node can leave.
* `begun`, a list of parts: the engine has said that their jobs run, or have ended.
* `last`, a number: a part that was withdrawn had it, and no other part gets it.

`nodes.engine_runs` says on which engines a run may have jobs.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline.wire import ENDED, State
from paceline_backend.store.access import tokens
from paceline_backend.store.audit import stop_asked
from paceline_backend.store.database import Connection, Store
from paceline_backend.store.nodes import engine_cordons, engine_runs
from paceline_backend.store.runs import UnknownRunError
from paceline_backend.store.schema import engine_runs as marks
from paceline_backend.store.schema import nodes, runs

_GOING_ON = [state for state in State if state not in ENDED]  # the index on states serves this
WAITING = (State.PENDING, State.QUEUED)  # no node has spoken yet


@dataclass(frozen=True)
class EngineRun:
    """A run on an engine that has not ended, or of which nodes may still be there."""

    key: int
    id: str
    state: str
    backend: str
    options: Mapping[str, Any]
    launch: int
    jobs: Mapping[str, str | None]
    replaces: Mapping[str, str]
    begun: Collection[str]
    nodes_min: int
    nodes_max: int
    nproc: int
    script: str
    cwd: str | None
    message: str | None
    seen_at: float | None

    @property
    def final(self) -> bool:
        """Whether it has ended."""
        return State(self.state).final


def ordered(nodes_min: int, nodes_max: int, launch: int = 0) -> dict[str, Any]:
    """`runs.backend_jobs` of a run whose jobs are yet to be submitted."""
    parts = range(1 + nodes_max - nodes_min)
    return {"launch": launch, "jobs": {str(part): None for part in parts}}


def order_anew(
    connection: Connection, run: str, nodes_min: int, nodes_max: int, first_attempt: int
) -> None:
    """Asks for jobs of a run that goes on after its end, where its row says that it does now.

    Nodes of earlier jobs are locked out.

    Labels are never used twice, also if the run was elsewhere since: each launch has attempts of
    its own, so its first one is a number that no earlier launch had.
    """
    tokens.revoke_of_run(connection, run)
    query = sa.select(runs.c.backend, runs.c.backend_jobs).where(runs.c.id == run)
    backend, before = connection.execute(query.with_for_update(key_share=True)).one()
    launch = first_attempt if before is None else before["launch"] + 1
    _write(connection, run, ordered(nodes_min, nodes_max, launch))
    engine_runs.add(connection, run, backend)


def drop(connection: Connection, run: str) -> None:
    """Notes that a run goes on where there are no jobs; nodes of earlier ones are locked out."""
    tokens.revoke_of_run(connection, run)
    connection.execute(sa.update(runs).where(runs.c.id == run).values(backend_jobs=None))


def open_runs(connection: Connection, backends: Collection[str]) -> list[EngineRun]:
    """The runs on some engines that an engine may have jobs for, the oldest first."""
    c = runs.c
    marked = sa.exists().where(marks.c.backend == c.backend, marks.c.run == c.id)
    columns = (c.key, c.id, c.state, c.backend, c.backend_options, c.backend_jobs)
    query = (
        sa.select(*columns, c.nodes_min, c.nodes_max, c.nproc, c.script, c.cwd, c.message)
        .add_columns(c.seen_at)
        .where(c.backend.in_(backends), c.state.in_(_GOING_ON) | marked)
        .where(c.backend_jobs.is_not(sa.null()), c.pruned_at.is_(None))
        .order_by(c.key)
    )
    return [_run(row) for row in connection.execute(query)]


def _run(row: sa.Row[Any]) -> EngineRun:
    fields = {str(name): value for name, value in row._mapping.items()}
    asked, options = fields.pop("backend_jobs"), fields.pop("backend_options") or {}
    return EngineRun(
        **fields,
        options=options,
        launch=asked["launch"],
        jobs=asked["jobs"],
        replaces=asked.get("replaces", {}),
        begun=asked.get("begun", ()),
    )


def current(connection: Connection, run: EngineRun) -> bool:
    """Whether a run is still where it was read, and was not resumed since."""
    return _asked_now(connection, run) is not None


def wanted(connection: Connection, run: EngineRun, part: str) -> bool:
    """Whether a job is still to be submitted. The caller may have read the run seconds ago."""
    asked = _asked_now(connection, run, runs.c.state.in_(_GOING_ON))
    return asked is not None and part in asked["jobs"] and asked["jobs"][part] is None


def _asked_now(
    connection: Connection, run: EngineRun, *conditions: sa.ColumnElement[bool]
) -> Mapping[str, Any] | None:
    """What a run asks its engine for now.

    None if its engine is another one now, if it was resumed meanwhile, or if a condition fails.
    """
    here = (runs.c.key == run.key, runs.c.backend == run.backend)
    query = sa.select(runs.c.backend_jobs).where(*here, *conditions)
    asked: Mapping[str, Any] | None = connection.execute(query).scalar()
    return asked if asked is not None and asked["launch"] == run.launch else None


def note(connection: Connection, run: EngineRun, part: str, ref: str | None) -> bool:
    """Notes the engine's name of a job, or with None that there will be no such job.

    Returns:
        False: the run was launched anew meanwhile, or the part withdrawn.
    """
    asked = _locked(connection, run.id)
    if asked["launch"] != run.launch or part not in asked["jobs"]:
        return False
    if ref is None:
        del asked["jobs"][part]
        asked["replaces"].pop(part, None)
    else:
        asked["jobs"][part] = ref
    _write(connection, run.id, asked)
    return True


def note_begun(connection: Connection, run: EngineRun, parts: Collection[str]) -> None:
    """Notes that jobs of a run have begun, or have ended."""
    asked = _locked(connection, run.id)
    if asked["launch"] == run.launch:
        asked["begun"] = sorted({*asked["begun"], *parts}, key=int)
        _write(connection, run.id, asked)


def begun(connection: Connection, run: str) -> bool:
    """Whether the job has begun that a run begins with: all of its nodes are about to come."""
    return "0" in _locked(connection, run)["begun"]


def add(connection: Connection, run: str, count: int, replaces: str | None = None) -> None:
    """Asks for further jobs of one node each.

    Args:
        connection: to write with.
        run: public id.
        count: how many.
        replaces: a node that can leave once the other is there; None: none.
    """
    asked = _locked(connection, run)
    first = 1 + max([asked["last"], *map(int, asked["jobs"])])
    parts = [str(part) for part in range(first, first + count)]
    asked["jobs"] |= dict.fromkeys(parts)
    if replaces is not None:
        asked["replaces"] |= dict.fromkeys(parts, replaces)
    _write(connection, run, asked)


def expected(connection: Connection, run: str) -> int:
    """How many nodes were asked for, in place of no node, whose jobs have not begun yet."""
    asked = _locked(connection, run)
    return len(asked["jobs"].keys() - asked["replaces"].keys() - {*asked["begun"], "0"})


def replaced(connection: Connection, run: str) -> list[str]:
    """The nodes of a run that jobs were asked for in place of, the first asked for first."""
    asked = _locked(connection, run)["replaces"]
    return [asked[part] for part in sorted(asked, key=int)]


def awaited(connection: Connection, run: str) -> list[str]:
    """As `replaced`, of a run that has not ended; none of a run on no engine."""
    query = sa.select(runs.c.backend_jobs).where(runs.c.id == run, runs.c.state.in_(_GOING_ON))
    asked = connection.execute(query).scalar()
    return list((asked or {}).get("replaces", {}).values())


def withdraw(connection: Connection, run: str, node: str) -> None:
    """Takes back what was asked for in place of a node: a job that is there is a leftover."""
    asked = _locked(connection, run)
    for part in [part for part, replaced in asked["replaces"].items() if replaced == node]:
        del asked["replaces"][part]
        asked["jobs"].pop(part, None)
        asked["last"] = max(asked["last"], int(part))  # it may be submitted just now
    _write(connection, run, asked)


def forget_replacing(connection: Connection, run: EngineRun, part: str) -> None:
    """Notes that a job of a run, which was to bring another node, has ended."""
    asked = _locked(connection, run.id)
    if asked["launch"] == run.launch and asked["replaces"].pop(part, None):
        _write(connection, run.id, asked)


def avoided(connection: Connection, run: EngineRun, part: str) -> list[str]:
    """The machines on which a job of a run must not come, as the engine calls them.

    These are that of the node that it replaces, and those that are cordoned here only.
    """
    machine = sa.select(nodes.c.host).where(nodes.c.id == run.replaces.get(part))
    host = connection.execute(machine).scalar()
    return sorted({*engine_cordons.untaken(connection, run.backend), *([host] if host else [])})


def _write(connection: Connection, run: str, asked: Mapping[str, Any]) -> None:
    kept = {name: value for name, value in asked.items() if value or name in ("launch", "jobs")}
    connection.execute(sa.update(runs).where(runs.c.id == run).values(backend_jobs=kept))


def _locked(connection: Connection, run: str) -> dict[str, Any]:
    query = sa.select(runs.c.backend_jobs).where(runs.c.id == run)
    asked = connection.execute(query.with_for_update(key_share=True)).scalar()
    if asked is None:
        raise UnknownRunError(f"no run {run} on an engine")
    return {
        "launch": asked["launch"],
        "jobs": dict(asked["jobs"]),
        "replaces": dict(asked.get("replaces", {})),
        "begun": asked.get("begun", ()),
        "last": asked.get("last", 0),
    }


def queue(connection: Connection, run: EngineRun, why: str) -> bool:
    """Notes that a run waits in its engine's queue, and why; False if that is known."""
    if run.state == State.QUEUED and run.message == why:
        return False
    c = runs.c
    waits = sa.update(runs).where(c.key == run.key, c.state.in_(WAITING))
    return connection.execute(waits.values(state=State.QUEUED, message=why)).rowcount > 0


def admit(connection: Connection, run: str) -> None:
    """Notes that a node of a run is there: it waits no longer, and signs of life are due."""
    c = runs.c
    query = sa.update(runs).where(c.id == run, c.state.in_(WAITING))
    connection.execute(query.values(message=None, seen_at=time.time()))


def take(connection: Connection, run: str, node: str) -> bool:
    """Makes a node the only one of a run on one; False if another is."""
    c = runs.c
    free = c.node.is_(None) | (c.node == node)
    query = sa.update(runs).where(c.id == run, free).values(node=node)
    return connection.execute(query).rowcount > 0


def token(store: Store, run: EngineRun) -> str:
    """The token of a run's nodes; the same until it is revoked.

    Raises:
        StoreError: or one of its kinds.
    """
    return str(tokens.of_run(store, run.id))


def explain(connection: Connection, run: EngineRun, words: str) -> bool:
    """Says how the job of a run ended whose end nobody asked for here; False: it was asked for.

    Its nodes know only that somebody ended them. A script that failed by itself says why.
    """
    if stop_asked(connection, run.id):
        return False
    c = runs.c
    known = sa.select(c.state, c.exit_code, c.message).where(c.key == run.key)
    row = connection.execute(known.with_for_update(key_share=True)).one()
    ended = row.state == State.STOPPED or (row.state == State.FAILED and row.exit_code is None)
    if not ended or words in (row.message or ""):
        return False
    words = "; ".join(filter(None, (row.message, words)))
    connection.execute(sa.update(runs).where(c.key == run.key).values(message=words))
    return True


def cancelled(connection: Connection, run: EngineRun) -> bool:
    """Notes that somebody cancelled the job of a run that has failed: that is why it is stopped.

    Its nodes may have been killed before they could say so. A script that failed by itself has an
    exit code, and stays failed.
    """
    c = runs.c
    query = sa.update(runs).where(c.key == run.key, c.state == State.FAILED, c.exit_code.is_(None))
    return connection.execute(query.values(state=State.STOPPED)).rowcount > 0


def over(connection: Connection, run: EngineRun) -> None:
    """Notes that a run has ended and that its engine has no jobs of it any more.

    Nothing is noted if the run was resumed meanwhile: its new nodes need their token.
    """
    c = runs.c
    known = sa.select(c.state, c.backend_jobs).where(c.key == run.key)
    row = connection.execute(known.with_for_update(key_share=True)).one()
    launch = None if row.backend_jobs is None else row.backend_jobs["launch"]
    if State(row.state).final and launch == run.launch:
        tokens.revoke_of_run(connection, run.id)
        engine_runs.remove(connection, run.id, run.backend)
