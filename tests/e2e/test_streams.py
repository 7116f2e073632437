"""Training on streams under a real control plane, on ranks of uneven speeds."""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.errors import InputError
from paceline_backend.insight.replay import replay
from paceline_backend.server.stack import Stack
from paceline_backend.store import Store
from support import stream_script
from support.e2e import PAUSE_S, planned_segments, wait_for_end, wait_for_step
from support.marks import some_long
from support.stream_script import BATCH, SAMPLES, size_of
from support.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

WORLD, EPOCHS = 2, 2
TESTS = str(Path(stream_script.__file__).parents[1])
EMULATE = {"a_s": [2e-4, 5e-4], "b_s": [0.002, 0.002]}


def start(stack: Stack, folder: Path, kind: str, policy: str) -> str:
    path = os.pathsep.join([TESTS, os.environ.get("PYTHONPATH", "")])
    body = {
        "script": stream_script.__file__,
        "args": [str(folder), kind, str(EPOCHS)],
        "nproc": WORLD,
        "policy": policy,
        "env": {"PACELINE_EMULATE": json.dumps(EMULATE), "PYTHONPATH": path},
    }
    return str(stack.api("POST", "/runs", body)["id"])


@pytest.mark.parametrize(
    ("kind", "policy"),
    some_long([("shards", "paceline"), ("none", "paceline"), ("ranks", "bsp")], 3),
)
def test_each_sample_is_trained_once(
    shared_stack: Stack, tmp_path: Path, kind: str, policy: str
) -> None:
    run = start(shared_stack, tmp_path, kind, policy)
    wait_for_step(shared_stack, run, 1)
    with pytest.raises(InputError, match="chronica cannot plan a stream"):
        shared_stack.api("POST", f"/runs/{run}/policy", {"policy": "chronica"})
    shown = wait_for_end(shared_stack, run)
    used = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(WORLD)]
    for epoch in range(EPOCHS):
        counts = Counter(chain.from_iterable(of_rank[epoch] for of_rank in used))
        assert counts == Counter(range(SAMPLES))

    def covered() -> Any:
        coverage = shared_stack.api("GET", f"/runs/{run}/coverage")
        return coverage if coverage["exact"] else None

    coverage = until(covered, "all records", 60, PAUSE_S)
    assert [epoch["used"] for epoch in coverage["epochs"]] == [SAMPLES] * EPOCHS
    assert [epoch["samples"] for epoch in coverage["epochs"]] == [SAMPLES] * EPOCHS
    assert shown["samples"] is None
    assert shown["step"] == EPOCHS * SAMPLES // BATCH - 1
    columns = shared_stack.api("GET", f"/runs/{run}/worker-steps?points=5000")
    samples, load = (np.array(columns[name], float) for name in ("samples", "load"))
    assert (samples.sum(axis=0) == BATCH).all()
    assert load.sum() == EPOCHS * sum(map(size_of, range(SAMPLES)))
    planned = planned_segments(shared_stack, run)
    assert planned
    if policy == "bsp":
        assert (samples[:, :40] == BATCH // WORLD).all(), "rank 0's part is the longest"
    else:
        # An epoch's end is uneven. Steps without an expected time were planned before the ranks'
        # speeds were known.
        within = np.arange(load.shape[1]) % (SAMPLES // BATCH) < 45
        expected = np.array(columns["ett_s"], float)
        steady = load[:, within & np.isfinite(expected).all(axis=0)]
        assert steady.shape[1] > 8
        seconds = np.array(EMULATE["a_s"])[:, None] * steady + EMULATE["b_s"][0]
        assert (seconds.max(axis=0) / seconds.mean(axis=0)).mean() < 1.05
    with Store.open(f"sqlite:///{shared_stack.data / 'paceline.db'}") as store:
        again = replay(store, run)
    assert again.first_difference is None
    assert again.identical == again.segments == len(planned)
