"""Runs, and what their ranks report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import sqlalchemy as sa

from paceline.wire import (
    Adopted,
    Hello,
    Plan,
    RoundRecord,
    StepRecord,
    decode,
    pack_samples,
)
from paceline.wire.parts import encode_hello
from paceline_backend.store import Store, schema


def add_run(store: Store, run: str, nproc: int = 2, **columns: Any) -> int:
    """A pending run with its first policy, as `POST /runs` writes them; returns its key."""
    row = {
        "id": run,
        "name": run,
        "state": "pending",
        "backend": "local",
        "script": "train.py",
        "args": [],
        "env": {},
        "nproc": nproc,
        "max_restarts": 0,
        "policy": "bsp",
        "version": 0,
        "created_at": 1.0,
        "dropped": 0,
    }
    with store.write() as connection:
        made = connection.execute(sa.insert(schema.runs).values(row | columns)).inserted_primary_key
        assert made is not None
        key = int(made[0])
        put_switch(connection, {"run": key, "version": 0, "policy": (row | columns)["policy"]})
        return key


def put_switch(connection: sa.Connection, row: Mapping[str, Any]) -> None:
    """Write a row of `switches`, version 0 in place of the one that `add_run` wrote."""
    c, values = schema.switches.c, {"parameters": {}, "requested_at": 1.0, "requested_by": "test"}
    if not row["version"]:
        first = c.run == row["run"], c.version == 0
        connection.execute(sa.delete(schema.switches).where(*first))
    connection.execute(sa.insert(schema.switches).values(values | row))


def run_day(day: int, run: int, worker_s: float, waited_s: float) -> dict[str, Any]:
    """A row of `run_days`: a single step of a run, by its key."""
    times = {"step_s_sum": worker_s, "worker_s": worker_s, "waited_s": waited_s}
    unknown = {"se_sum": 0.0, "se_count": 0, "waste_sum": 0.0, "waste_count": 0}
    return {"run": run, "day": day, "version": 0, "steps": 1, **times, **unknown}


def hello(world: int = 2, attempt: int = 0, **fields: Any) -> Hello:
    values: dict[str, Any] = {
        "attempt": attempt,
        "world": world,
        "global_batch": 8,
        "seed": 7,
        "sizes": np.arange(1.0, 33.0).tobytes(),
        "loss_mean": "samples",
        "drop_last": False,
        "epochs": 3,
        "lookahead": 2,
        "started_at": 100.0,
        "paceline": "0",
        "torch": "2",
        "device": "cpu",
        "uneven_steps": True,
    }
    return Hello(**(values | fields))


def pack_indices(assignments: list[list[Any]]) -> tuple[list[list[int]], bytes]:
    """`counts` and `indices` of a segment with these samples, [step][rank]."""
    counts = [[len(part) for part in step] for step in assignments]
    flat = [part for step in assignments for part in step]
    return counts, pack_samples(np.concatenate(flat) if flat else np.empty(0))


def in_parts(whole: Hello) -> list[Any]:
    return [decode(entry)[1] for entry in encode_hello(whole)]


def record(step: int, rank: int, attempt: int = 0, **fields: Any) -> StepRecord:
    values: dict[str, Any] = {
        "attempt": attempt,
        "rank": rank,
        "seq": step,
        "step": step,
        "epoch": step // 4,
        "segment": step // 2,
        "samples": 4,
        "load": 40.0 + rank,
        "data_s": 0.001,
        "compute_s": 0.1 * (rank + 1),
        "sync_s": 0.02,
        "step_s": 0.3,
        "ended_at": 1_000.0 + step,
        "ett_s": 0.1,
        "loss": 2.0,
        "memory_bytes": 3_000_000_000,
    }
    return StepRecord(**(values | fields))


def a_round(seq: int, **fields: Any) -> RoundRecord:
    """Two to a segment of two steps; times in powers of two, so that sums are exact."""
    values: dict[str, Any] = {
        "attempt": 0,
        "rank": 0,
        "seq": seq,
        "segment": seq // 2,
        "number": seq % 2,
        "step": seq,
        "world": 2,
        "contributors": 1,
        "staleness": [1, 0, 0],
        "dropped": 0,
        "waited_s": 0.25,
        "reduced_s": 0.125,
        "bytes": 64,
        "ended_at": 1_000.0 + seq,
        "copied_s": 0.0625,
    }
    return RoundRecord(**(values | fields))


def adopted(seq: int, first_step: int, version: int = 0, **fields: Any) -> Adopted:
    parts = [[np.array([0, 1]), np.array([2])], [np.array([3]), np.array([], np.int64)]]
    counts, indices = pack_indices(parts)
    attempt, at = fields.pop("attempt", 0), fields.pop("at", 50.0 + seq)
    values: dict[str, Any] = {
        "seq": seq,
        "epoch": 0,
        "first_step": first_step,
        "counts": counts,
        "indices": indices,
        "policy": "bsp",
        "version": version,
        "source": "controller",
        "epoch_end": False,
    }
    if "counts" in fields and "indices" not in fields:  # any samples will do, as many as counted
        values["indices"] = bytes(4 * sum(map(sum, fields["counts"])))
    return Adopted(attempt, Plan(**(values | fields)), at)
