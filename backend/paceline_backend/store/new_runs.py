"""Runs as somebody asks for them, and how they are recorded."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from paceline_backend.store import blobs
from paceline_backend.store.schema import runs, scenarios, switches


@dataclass(frozen=True)
class NewRun:
    """What a run starts as; fields as in the table `runs`."""

    name: str
    script: str
    nproc: int
    policy: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    max_restarts: int = 0
    node: str | None = None
    backend: str = "local"
    scenario: Mapping[str, Any] | None = None  # what a simulated run simulates


def create(connection: sa.Connection, new: NewRun, by: str) -> str:
    """Inserts a run and the switch of version 0; its public id."""
    now = time.time()
    run = secrets.token_hex(6)
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
            env=dict(new.env),
            cwd=new.cwd,
            nproc=new.nproc,
            max_restarts=new.max_restarts,
            policy=new.policy,
            version=0,
            created_at=now,
            dropped=0,
        )
        .returning(runs.c.key)
    ).scalar_one()
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
    if new.scenario is not None:
        connection.execute(sa.insert(scenarios).values(run=key, body=blobs.pack_json(new.scenario)))
    return run
