"""Switches between relaxed synchronisers in a real run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from paceline import policies
from paceline.core.pool import is_pooled
from paceline.policies import Feedback
from paceline.wire import SYNC_NAMES
from paceline_backend.server.stack import Stack
from paceline_backend.store import Store, runs
from paceline_backend.store import segments as segments_store
from support import relaxed_script
from support.chains import switch, wait_for_plan
from support.e2e import PAUSE_S, wait_for_end, wait_for_step
from support.waiting import DEADLINE_S, until

pytestmark = pytest.mark.ranks

# Rank 3 is so slow that rna-hierarchical has it in a group of its own.
EMULATE = {"a_s": [5e-6, 5e-6, 1e-5, 3e-5], "b_s": [0.003] * 4}
STEPS = 6


def synchronisers(stack: Stack, run: str) -> set[str]:
    return {segment["synchroniser"] for segment in stack.api("GET", f"/runs/{run}/segments")}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "uneven",
    [
        pytest.param(False, marks=pytest.mark.long, id="even steps"),
        pytest.param(True, id="uneven steps"),
    ],
)
def test_switches_among_all_relaxed_presets(
    shared_stack: Stack, tmp_path: Path, uneven: bool
) -> None:
    relaxed = [name for name in policies.names() if policies.make(name).relaxed]
    assert "rna" in relaxed
    chain = ["bsp", *relaxed, "paceline"]
    run = shared_stack.api(
        "POST",
        "/runs",
        {
            "script": relaxed_script.__file__,
            "args": [str(tmp_path), *["uneven"] * uneven],
            "nproc": 4,
            "policy": chain[0],
            "env": {
                "PACELINE_EMULATE": json.dumps(EMULATE),
                "PYTHONPATH": str(Path(relaxed_script.__file__).parents[1]),
            },
        },
    )["id"]
    wait_for_plan(shared_stack, run)
    wait_for_step(shared_stack, run, STEPS)
    for number, name in enumerate(chain[1:], 1):
        switch(shared_stack, run, number, name, STEPS)
        if name == "rna-hierarchical":  # it groups ranks once it knows their speeds
            until(
                lambda: "hierarchical" in synchronisers(shared_stack, run),
                "groups",
                DEADLINE_S,
                PAUSE_S,
            )
    (tmp_path / "enough").touch()
    wait_for_end(shared_stack, run)
    coverage = shared_stack.api("GET", f"/runs/{run}/coverage")
    segments = shared_stack.api("GET", f"/runs/{run}/segments")
    rounds = shared_stack.api("GET", f"/runs/{run}/synchronisation")
    with (
        Store.open(f"sqlite:///{shared_stack.data / 'paceline.db'}") as store,
        store.read() as reading,
    ):
        key = runs.key_of(reading, run)
        start = runs.hello(reading, key)
        assert start is not None
        pooled = {
            plan.policy for plan in segments_store.adopted(reading, key, start) if plan.pooled
        }

    by_all = {
        name
        for name in relaxed
        if is_pooled(policies.make(name).choose(Feedback.empty(), 4, {}).synchroniser)
    }
    # Of the first policy, all segments may have equal steps.
    assert len(by_all - pooled) <= 2 if uneven else not pooled, by_all - pooled
    assert coverage["exact"] is True
    # (A controller may be slow to begin with.)
    assert {s["policy"] for s in segments if s["source"] == "controller"} >= set(chain[1:])
    assert {s["synchroniser"] for s in segments} == set(SYNC_NAMES)
    # `osa` has no rounds; the other may stay with the all-reduce.
    without = {"paceline-relaxed", "osa"}
    assert {period["policy"] for period in rounds["in_force"]} >= set(relaxed) - without
    ranks = [
        [json.loads(line) for line in (tmp_path / f"replicas-{rank}").read_text().splitlines()]
        for rank in range(4)
    ]
    assert len(ranks[0]) == len(coverage["epochs"])
    # All met at each epoch's end: the same parameters, the same momentum.
    for epoch in zip(*ranks, strict=True):
        assert len({replica for _, replica, _ in epoch}) == 1
        assert all(math.isfinite(loss) for _, _, loss in epoch)
    assert ranks[0][-1][2] < ranks[0][0][2]
