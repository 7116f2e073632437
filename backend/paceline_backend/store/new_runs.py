"""Create and resume runs: the requested settings, and the rows that store them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from paceline.wire import State
from paceline.wire.states import Rendezvous, TransitionCause
from paceline_backend.store import jobs, switches
from paceline_backend.store.nodes import run_nodes
from paceline_backend.store.runs import UnknownRunError, last_attempt
from paceline_backend.store.schema import runs
from paceline_backend.store.schema import switches as switches_table


@dataclass(frozen=True)
class NewRun:
    """Settings of a new or resumed run. Fields without a comment are columns of table `runs`."""

    name: str
    script: str
    nproc: int
    policy: str
    # Parameters of `policy`, stored in table `switches`.
    parameters: Mapping[str, Any] = field(default_factory=dict)
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    max_restarts: int = 0
    node: str | None = None
    backend: str = "local"
    scenario: Mapping[str, Any] | None = None
    # First attempt number of the next launch.
    first_attempt: int = 0
    signed: bool = False
    nodes_min: int = 1
    nodes_max: int = 1
    # Nodes of a multi-node run: those of the previous launch, or those chosen for this launch.
    nodes: Sequence[str] = ()
    spares: int = 0
    replace_slow_nodes: bool = False
    restart_hung_s: float | None = None
    join_check: float = 1.5
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    # URL of the control plane, as the requesting client reaches it.
    server: str = ""
    # Whether an engine starts the nodes.
    has_jobs: bool = False

    @property
    def most_ranks(self) -> int:
        """Return the maximum number of ranks."""
        return self.nproc * self.nodes_max

    @property
    def where(self) -> list[str]:
        """Return the nodes that the run is launched on."""
        if self.nodes_max > 1:
            return list(self.nodes)
        return [] if self.node is None else [self.node]


def stored(connection: sa.Connection, run: str) -> tuple[NewRun, State]:
    """Return a run's settings and state, and lock the run until the transaction ends.

    `first_attempt` is the first attempt number of the next launch. It is higher than all attempts
    so far. If the run was lost, it is also higher than all attempts that the run might still reach,
    because its processes may still be running. The policy is the run's first one.
    Values of environment variables are left out.

    Raises:
        UnknownRunError: no such run.
    """
    row = connection.execute(
        sa.select(runs)
        .where(runs.c.id == run, runs.c.pruned_at.is_(None))
        .with_for_update(key_share=True)
    ).one_or_none()
    if row is None:
        raise UnknownRunError(f"no run {run}")
    known = 0 if row.attempt is None else row.attempt + 1
    if row.lost:
        last = last_attempt(row.first_attempt, row.max_restarts, row.nodes_max)
        known = max(known, last + 1)
    first = switches.of_version(connection, row.key, 0)
    assert first is not None
    return NewRun(
        name=row.name,
        script=row.script,
        nproc=row.nproc,
        policy=first.policy,
        parameters=first.parameters,
        args=row.args,
        env=dict.fromkeys(row.env, ""),
        cwd=row.cwd,
        max_restarts=row.max_restarts,
        node=row.node,
        backend=row.backend,
        first_attempt=max(known, row.attempts),
        nodes_min=row.nodes_min,
        nodes_max=row.nodes_max,
        nodes=[each.node for each in run_nodes.of_runs(connection, [row.key])[row.key]],
        spares=row.spares,
        replace_slow_nodes=row.replace_slow_nodes,
        restart_hung_s=row.restart_hung_s,
        join_check=row.join_check,
        backend_options=row.backend_options or {},
        has_jobs=row.backend_jobs is not None,
    ), State(row.state)


def resume(
    connection: sa.Connection,
    run: str,
    new: NewRun,
    cause: TransitionCause = TransitionCause.RESUME,
) -> None:
    """Set a run to pending again, for another launch, and keep its telemetry.

    `new` is the result of `stored`, with changes. `cause` is RESUME, or RELAUNCH for a multi-node
    run that has lost its rendezvous.

    Raises:
        ImpossibleTransitionError: the run has not ended. With RELAUNCH: the run is not active, or
            its rendezvous is not lost.
    """
    known = sa.select(runs.c.state, runs.c.rendezvous).where(runs.c.id == run)
    before = connection.execute(known.with_for_update(key_share=True)).one()
    cause.check(State(before.state), State.PENDING)
    rendezvous = Rendezvous.WAITING
    if cause is TransitionCause.RELAUNCH:
        rendezvous = Rendezvous.RELAUNCH
        Rendezvous(before.rendezvous).check(rendezvous)
    values = {
        "state": State.PENDING,
        "node": new.node,
        "backend": new.backend,
        "backend_options": dict(new.backend_options) or None,
        "nproc": new.nproc,
        "nodes_min": new.nodes_min,
        "nodes_max": new.nodes_max,
        "spares": new.spares,
        "replace_slow_nodes": new.replace_slow_nodes,
        "max_restarts": new.max_restarts,
        "first_attempt": new.first_attempt,
        "signed": new.signed,
        "attempts": new.first_attempt + 1,
        # The time limit within which the run must send a message begins now.
        "seen_at": time.time(),
        "lost": False,
        "ended_at": None,
        "exit_code": None,
        "message": None,
        "rendezvous": rendezvous,
        "rendezvous_address": None,
    }
    query = sa.update(runs).where(runs.c.id == run).values(values).returning(runs.c.key)
    key = connection.execute(query).scalar_one()
    if new.nodes_max > 1:
        run_nodes.launch(connection, key, new.nodes, new.first_attempt)


def create(connection: sa.Connection, new: NewRun, by: str, run: str | None = None) -> str:
    """Insert a run and its switch of version 0; return the run's public id.

    `by` is the name of the requester, and `run` an unused public id (None: a random one).
    """
    now = time.time()
    run = run or secrets.token_hex(6)
    key = connection.execute(
        sa.insert(runs)
        .values(
            id=run,
            name=new.name,
            state=State.PENDING,
            backend=new.backend,
            node=new.node,
            script=new.script,
            args=list(new.args),
            env=[*new.env],
            cwd=new.cwd,
            nproc=new.nproc,
            max_restarts=new.max_restarts,
            policy=new.policy,
            version=0,
            created_at=now,
            dropped=0,
            signed=new.signed,
            nodes_min=new.nodes_min,
            nodes_max=new.nodes_max,
            spares=new.spares,
            replace_slow_nodes=new.replace_slow_nodes,
            restart_hung_s=new.restart_hung_s,
            join_check=new.join_check,
            backend_options=dict(new.backend_options) or None,
            backend_jobs=jobs.ordered(new.nodes_min, new.nodes_max) if new.has_jobs else None,
            scenario=new.scenario,
        )
        .returning(runs.c.key)
    ).scalar_one()
    if new.has_jobs:
        jobs.mark(connection, run, new.backend)
    connection.execute(
        sa.insert(switches_table).values(
            run=key,
            version=0,
            policy=new.policy,
            parameters=dict(new.parameters),
            requested_at=now,
            requested_by=by,
        )
    )
    if new.nodes_max > 1:
        run_nodes.launch(connection, key, new.nodes, new.first_attempt)
    return run
