"""Runs on engines (Slurm, Ray, Kubernetes), and their jobs there.

`runs.backend_jobs` is ``{"launch": n, "jobs": {part: ref}}``. Part 0 is the job that starts the
run, with `nodes_min` nodes; each further part is a job of one node that may join the run. `ref` is
the engine's name of the job, null until it was submitted. `launch` increases with each resume: jobs
of an earlier launch are leftovers, which the control plane cancels. Further keys are left out while
they are empty:

* `replaces`, ``{part: node}``: parts whose nodes replace the given node.
* `begun`, a list of parts whose jobs run or have ended, according to the engine.
* `last`, a number: the highest part that was withdrawn, so that its number is never used again.

The table `engine_runs` lists the engines that may have jobs of a run, even after the run moved to
another backend or was deleted. A row is inserted in the transaction that requests jobs (`mark`),
and deleted once the engine has none of these jobs any more (`unmark`). So leftover jobs are
cancelled even if the engine was unreachable or the control plane restarted meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline.wire import State
from paceline.wire.states import ACTIVE, WAITING, TransitionCause
from paceline_backend.store import tokens
from paceline_backend.store.audit import stop_asked
from paceline_backend.store.database import Connection, Store, insert
from paceline_backend.store.nodes import cordons
from paceline_backend.store.runs import UnknownRunError
from paceline_backend.store.schema import engine_runs, nodes, runs


@dataclass(frozen=True)
class EngineRun:
    """A run on an engine; the run has not ended, or the engine may still have jobs of it.

    `launch`, `jobs`, `replaces` and `begun` are those of `runs.backend_jobs`.
    """

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
        """Return whether the run has ended."""
        return State(self.state).final


def ordered(nodes_min: int, nodes_max: int, launch: int = 0) -> dict[str, Any]:
    """Return `runs.backend_jobs` for a new launch, whose jobs have not been submitted yet."""
    parts = range(1 + nodes_max - nodes_min)
    return {"launch": launch, "jobs": {str(part): None for part in parts}}


def order_anew(
    connection: Connection, run: str, nodes_min: int, nodes_max: int, first_attempt: int
) -> None:
    """Request jobs for a run that was resumed on the engine that its row names.

    Revoke the token that the nodes of earlier jobs used.

    The number of a launch must never be used again, because the labels of its jobs contain it. If
    the run's row does not have the number of the launch before, the new number is `first_attempt`,
    which is above the numbers of all earlier launches.
    """
    tokens.revoke_of_run(connection, run)
    query = sa.select(runs.c.backend, runs.c.backend_jobs).where(runs.c.id == run)
    backend, before = connection.execute(query.with_for_update(key_share=True)).one()
    launch = first_attempt if before is None else before["launch"] + 1
    _write(connection, run, ordered(nodes_min, nodes_max, launch))
    mark(connection, run, backend)


def drop(connection: Connection, run: str) -> None:
    """Record that a run continues without an engine, and revoke the token of earlier nodes."""
    tokens.revoke_of_run(connection, run)
    connection.execute(sa.update(runs).where(runs.c.id == run).values(backend_jobs=None))


def open_runs(connection: Connection, backends: Collection[str]) -> list[EngineRun]:
    """Return the runs on the given engines that are active or may have jobs, oldest first."""
    c = runs.c
    marked = sa.exists().where(engine_runs.c.backend == c.backend, engine_runs.c.run == c.id)
    columns = (c.key, c.id, c.state, c.backend, c.backend_options, c.backend_jobs)
    query = (
        sa.select(*columns, c.nodes_min, c.nodes_max, c.nproc, c.script, c.cwd, c.message)
        .add_columns(c.seen_at)
        .where(c.backend.in_(backends), c.state.in_(ACTIVE) | marked)
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
    """Return whether a run is still on its engine, and not resumed since `run` was read."""
    return _asked_now(connection, run) is not None


def wanted(connection: Connection, run: EngineRun, part: str) -> bool:
    """Return whether a job must still be submitted, according to the current row of the run."""
    asked = _asked_now(connection, run, runs.c.state.in_(ACTIVE))
    return asked is not None and part in asked["jobs"] and asked["jobs"][part] is None


def _asked_now(
    connection: Connection, run: EngineRun, *conditions: sa.ColumnElement[bool]
) -> Mapping[str, Any] | None:
    """Return the current `backend_jobs` of a run.

    Return None if the run was moved or resumed since `run` was read, or if one of `conditions` is
    false.
    """
    here = (runs.c.key == run.key, runs.c.backend == run.backend)
    query = sa.select(runs.c.backend_jobs).where(*here, *conditions)
    asked: Mapping[str, Any] | None = connection.execute(query).scalar()
    return asked if asked is not None and asked["launch"] == run.launch else None


def note(connection: Connection, run: EngineRun, part: str, ref: str | None) -> bool:
    """Store `ref`, the name that the engine gave a job, or remove a job that the engine refused.

    `ref` is None for a refused job.

    Return False if the run was resumed or the part was withdrawn meanwhile.
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
    """Record that jobs of a run have started or ended."""
    asked = _locked(connection, run.id)
    if asked["launch"] == run.launch:
        asked["begun"] = sorted({*asked["begun"], *parts}, key=int)
        _write(connection, run.id, asked)


def begun(connection: Connection, run: str) -> bool:
    """Return whether the job of part 0 has started; if so, all nodes of this job will join."""
    return "0" in _locked(connection, run)["begun"]


def add(connection: Connection, run: str, count: int, replaces: str | None = None) -> None:
    """Request `count` further jobs of one node each.

    `replaces` names the node that can leave once the new one has joined, if any.
    """
    asked = _locked(connection, run)
    first = 1 + max([asked["last"], *map(int, asked["jobs"])])
    parts = [str(part) for part in range(first, first + count)]
    asked["jobs"] |= dict.fromkeys(parts)
    if replaces is not None:
        asked["replaces"] |= dict.fromkeys(parts, replaces)
    _write(connection, run, asked)


def expected(connection: Connection, run: str) -> int:
    """Return the number of requested nodes whose jobs have not begun.

    The job that starts the run does not count, nor do jobs whose nodes replace others.
    """
    asked = _locked(connection, run)
    return len(asked["jobs"].keys() - asked["replaces"].keys() - {*asked["begun"], "0"})


def replaced(connection: Connection, run: str) -> list[str]:
    """Return the nodes for which replacements are requested, in the order of the requests."""
    asked = _locked(connection, run)["replaces"]
    return [asked[part] for part in sorted(asked, key=int)]


def awaited(connection: Connection, run: str) -> list[str]:
    """Return the nodes of `replaced`, unsorted; empty if the run has ended or is on no engine."""
    query = sa.select(runs.c.backend_jobs).where(runs.c.id == run, runs.c.state.in_(ACTIVE))
    asked = connection.execute(query).scalar()
    return list((asked or {}).get("replaces", {}).values())


def withdraw(connection: Connection, run: str, node: str) -> None:
    """Withdraw the request to replace a node; a job that exists already becomes a leftover."""
    asked = _locked(connection, run)
    for part in [part for part, replaced in asked["replaces"].items() if replaced == node]:
        del asked["replaces"][part]
        asked["jobs"].pop(part, None)
        # Another process may be submitting this part right now, so its number must not be reused.
        asked["last"] = max(asked["last"], int(part))
    _write(connection, run, asked)


def forget_replacing(connection: Connection, run: EngineRun, part: str) -> None:
    """Record the end of a job that was requested to replace a node."""
    asked = _locked(connection, run.id)
    if asked["launch"] == run.launch and asked["replaces"].pop(part, None):
        _write(connection, run.id, asked)


def avoided(connection: Connection, run: EngineRun, part: str) -> list[str]:
    """Return the machines that a job of a run must not use, by the engine's names.

    A job must not use the machine of the node that it replaces, or machines that are cordoned in
    Paceline but not in the engine.
    """
    machine = sa.select(nodes.c.host).where(nodes.c.id == run.replaces.get(part))
    host = connection.execute(machine).scalar()
    return sorted({*cordons.untaken(connection, run.backend), *([host] if host else [])})


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
    """Record that a run waits in its engine's queue, and why; return False if nothing changed."""
    if run.state == State.QUEUED and run.message == why:
        return False
    c = runs.c
    waits = sa.update(runs).where(
        c.key == run.key, c.state.in_(TransitionCause.QUEUE.sources(State.QUEUED))
    )
    return connection.execute(waits.values(state=State.QUEUED, message=why)).rowcount > 0


def admit(connection: Connection, run: str) -> None:
    """Record that a node has joined a run, which therefore no longer waits in a queue.

    From now on, the run is assumed lost if it sends no messages.
    """
    c = runs.c
    query = sa.update(runs).where(c.id == run, c.state.in_(WAITING))
    connection.execute(query.values(message=None, seen_at=time.time()))


def take(connection: Connection, run: str, node: str) -> bool:
    """Assign a node to a single-node run; return False if the run has another node already."""
    c = runs.c
    free = c.node.is_(None) | (c.node == node)
    query = sa.update(runs).where(c.id == run, free).values(node=node)
    return connection.execute(query).rowcount > 0


def token(store: Store, run: EngineRun) -> str:
    """Return the token for a run's nodes; it stays the same until it is revoked."""
    return str(tokens.of_run(store, run.id))


def explain(connection: Connection, run: EngineRun, words: str) -> bool:
    """Append `words` to the message of an ended run; return whether the message changed.

    `words` say how the run's job ended in the engine, which the run's nodes cannot know. Nothing is
    appended if a user requested the end or if the script failed.
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
    """Change a failed run to `stopped`, because its job was cancelled in the engine.

    The run's nodes may have been killed before they could report the stop. A script that failed has
    an exit code, and its run stays failed.
    """
    c = runs.c
    failed = c.state.in_(TransitionCause.JOB_CANCELLED.sources(State.STOPPED))
    query = sa.update(runs).where(c.key == run.key, failed, c.exit_code.is_(None))
    return connection.execute(query.values(state=State.STOPPED)).rowcount > 0


def end(connection: Connection, run: EngineRun) -> None:
    """Record that a run has ended and that its engine has no more jobs of the run.

    Revoke the token of the run's nodes. Do nothing if the run was resumed meanwhile, because its
    new nodes need the token.
    """
    c = runs.c
    known = sa.select(c.state, c.backend_jobs).where(c.key == run.key)
    row = connection.execute(known.with_for_update(key_share=True)).one()
    launch = None if row.backend_jobs is None else row.backend_jobs["launch"]
    if State(row.state).final and launch == run.launch:
        tokens.revoke_of_run(connection, run.id)
        unmark(connection, run.id, run.backend)


@dataclass(frozen=True)
class Leftover:
    """A run that moved to another backend or is deleted, while an engine may still have jobs of it.

    `backend` is the engine, and `key` is None if the run is deleted or is being deleted.
    """

    backend: str
    run: str
    key: int | None


def mark(connection: Connection, run: str, backend: str) -> None:
    """Record that an engine may have jobs of a run from now on."""
    query = insert(connection, engine_runs).values(run=run, backend=backend)
    connection.execute(query.on_conflict_do_nothing())


def unmark(connection: Connection, run: str, backend: str) -> None:
    """Record that an engine has no jobs of a run and will get none."""
    c = engine_runs.c
    connection.execute(sa.delete(engine_runs).where(c.backend == backend, c.run == run))


def leftovers(connection: Connection, backends: Collection[str]) -> list[Leftover]:
    """Return the runs that moved to another backend or are deleted and may have leftover jobs."""
    c = engine_runs.c
    deleted = runs.c.key.is_(None) | runs.c.pruned_at.is_not(None)
    query = (
        sa.select(c.backend, c.run, runs.c.key, runs.c.pruned_at)
        .outerjoin(runs, runs.c.id == c.run)
        .where(c.backend.in_(backends), deleted | (runs.c.backend != c.backend))
        .order_by(c.backend, c.run)
    )
    return [
        Leftover(row.backend, row.run, row.key if row.pruned_at is None else None)
        for row in connection.execute(query)
    ]


def clear_leftover(connection: Connection, left: Leftover) -> None:
    """Record that an engine has no jobs of a run, unless the run has moved back to this engine."""
    there = sa.select(runs.c.backend).where(runs.c.id == left.run, runs.c.pruned_at.is_(None))
    if connection.execute(there.with_for_update(key_share=True)).scalar() != left.backend:
        unmark(connection, left.run, left.backend)
