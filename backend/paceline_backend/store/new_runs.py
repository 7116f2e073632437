"""Runs as somebody asks for them, and how they are recorded."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from paceline.wire import State
from paceline_backend.store import jobs
from paceline_backend.store.nodes import engine_runs, run_nodes
from paceline_backend.store.runs import UnknownRunError, last_attempt
from paceline_backend.store.schema import runs, scenarios, switches


@dataclass(frozen=True)
class NewRun:
    """What a run starts as; fields as in the table `runs`."""

    name: str
    script: str
    nproc: int  # ranks on each node
    policy: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    max_restarts: int = 0
    node: str | None = None
    backend: str = "local"
    scenario: Mapping[str, Any] | None = None  # what a simulated run simulates
    first_attempt: int = 0  # of the next launch
    signed: bool = False  # it gets a user of the bus of its own
    nodes_min: int = 1
    nodes_max: int = 1  # with `nproc` ranks on each
    nodes: Sequence[str] = ()  # of several: those of its launch before, or those chosen for it
    spares: int = 0  # nodes that are held back for it
    replace_slow_nodes: bool = False  # a node that a verdict names slow makes way for a spare
    restart_hung_s: float | None = None  # so long it may hang; None: as long as it does
    # So many times slower than the median a node may be that nobody has named; 0: any.
    join_check: float = 1.5
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    server: str = ""  # URL of the control plane, as who asks for the run reaches it
    has_jobs: bool = False  # an engine is to start its nodes

    @property
    def most_ranks(self) -> int:
        """How many ranks it has at most."""
        return self.nproc * self.nodes_max

    @property
    def where(self) -> list[str]:
        """The nodes that it is launched on."""
        if self.nodes_max > 1:
            return list(self.nodes)
        return [] if self.node is None else [self.node]


def stored(connection: sa.Connection, run: str) -> tuple[NewRun, State]:
    """A run as it was asked for, and the state that it is in, locked until the transaction ends.

    `first_attempt` is that of another launch: higher than that of all attempts so far, and of all
    that a run may come to of which nothing was heard: perhaps its processes go on. The policy
    is the one in force, and values of the environment are left out.

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
    return NewRun(
        name=row.name,
        script=row.script,
        nproc=row.nproc,
        policy=row.policy,
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


def resume(connection: sa.Connection, run: str, new: NewRun, rendezvous: str | None = None) -> None:
    """Makes an ended run a pending one again; its rows stay.

    Args:
        connection: to write with.
        run: public id.
        new: as `stored`, with what is to be different.
        rendezvous: of a run on several nodes, see `run_nodes`.
    """
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
        "seen_at": time.time(),  # who starts it has time from now on
        "lost": False,
        "ended_at": None,
        "exit_code": None,
        "message": None,
        "rendezvous": rendezvous,
    }
    query = sa.update(runs).where(runs.c.id == run).values(values).returning(runs.c.key)
    key = connection.execute(query).scalar_one()
    if new.nodes_max > 1:
        run_nodes.launch(connection, key, new.nodes, new.first_attempt)


def create(connection: sa.Connection, new: NewRun, by: str, run: str | None = None) -> str:
    """Inserts a run and the switch of version 0; its public id.

    Args:
        connection: to write with.
        new: the run.
        by: who asks.
        run: its public id, which no run has; None: a new one.
    """
    now = time.time()
    run = run or secrets.token_hex(6)
    key = connection.execute(
        sa.insert(runs)
        .values(
            id=run,
            name=new.name,
            state="pending",
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
        )
        .returning(runs.c.key)
    ).scalar_one()
    if new.has_jobs:
        engine_runs.add(connection, run, new.backend)
    connection.execute(
        sa.insert(switches).values(
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
    if new.scenario is not None:
        connection.execute(sa.insert(scenarios).values(run=key, body=new.scenario))
    return run
