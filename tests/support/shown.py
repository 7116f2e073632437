"""A run with a slow rank, a switch and two nodes, for what people are shown of it."""

from __future__ import annotations

from typing import Any

from paceline.wire import RoundBatch, StepBatch
from paceline_backend.store import Store, telemetry
from support.records import a_round, add_run, adopted, hello, put_switch, record

WORLD, STEPS, SLOW = 4, 80, 3
SWITCHED = 50  # the first step of the second policy, under which all ranks take the same time


def slow_rank(store: Store, run: str = "3f9a1c07be52", **columns: Any) -> int:
    """A run whose rank 3 computes three times as long until a switch; its key."""
    values = {"name": "train", "state": "running", "node": "n1", "started_at": 900.0}
    key = add_run(store, run, nproc=WORLD, **(values | columns))
    rows, ended_at = [], 1_000.0
    for step in range(STEPS):
        even = step >= SWITCHED
        longest_s = 0.1 if even else 0.3
        ended_at += longest_s + 0.04
        for rank in range(WORLD):
            own_s = 0.1 if even or rank != SLOW else 0.3
            times = {"compute_s": own_s, "sync_s": longest_s - own_s + 0.02}
            rows.append(
                record(
                    step,
                    rank,
                    **times,
                    load=40.0,
                    step_s=longest_s + 0.04,
                    ended_at=ended_at,
                    loss=2.0 / (1 + step),
                )
            )
    placement = ["n1", "n1", "n2", "n2"]
    begun = hello(WORLD, placement=placement, sizes=b"\0\0\0\0\0\0\xf0?" * 64, global_batch=16)
    counts = [[4] * WORLD] * 2
    plans = [
        adopted(k, 2 * k, int(2 * k >= SWITCHED), counts=counts, policy="bsp")
        for k in range(STEPS // 2)
    ]
    messages: list[Any] = [begun, *plans, StepBatch(rows), RoundBatch([a_round(70)])]
    telemetry.write(store, [(run, message) for message in messages])
    _switch(store, key, 0, 0, "bsp")
    _switch(store, key, 1, SWITCHED, "paceline")
    return key


def _switch(store: Store, key: int, version: int, step: int, policy: str) -> None:
    values: dict[str, Any] = {
        "run": key,
        "version": version,
        "policy": policy,
        "parameters": {"window": 32} if version else {},
        "requested_at": 1_000.0 + step,
        "requested_by": "ada",
        "effective_step": step,
    }
    with store.write() as connection:
        put_switch(connection, values)
