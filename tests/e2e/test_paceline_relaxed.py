"""`paceline-relaxed` on four real ranks that begin to be slow in turn, and end it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline_backend.insight.replay import replay
from paceline_backend.server.stack import Stack
from paceline_backend.store import Store
from support import relaxed_script
from support.e2e import PAUSE_S, all_steps, wait_for_end
from support.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.long]

SLOW = range(60, 180)  # steps in which one rank, each in turn, takes six times as long
EMULATE = {
    "a_s": [1e-6] * 4,
    "b_s": [0.05] * 4,
    "slowdowns": [
        {"ranks": [step % 4], "factor": 6.0, "first_step": step, "steps": 1} for step in SLOW
    ],
}
# Far from what a busy machine makes of ranks that are alike (1.0), and from 2.7 otherwise.
PARAMETERS = {"saving": 0.4, "back": 0.3, "hold": 2}


@pytest.mark.timeout(1200)
def test_it_goes_to_relaxed_steps_and_back(tmp_path: Path) -> None:
    with Stack(tmp_path / "data", 0) as stack:
        run = stack.api(
            "POST",
            "/runs",
            {
                "script": relaxed_script.__file__,
                "args": [str(tmp_path)],
                "nproc": 4,
                "policy": "paceline-relaxed",
                "parameters": PARAMETERS,
                "env": {
                    "PACELINE_EMULATE": json.dumps(EMULATE),
                    "PYTHONPATH": str(Path(relaxed_script.__file__).parents[1]),
                },
            },
        )["id"]

        def chosen() -> list[dict[str, Any]]:
            return list(stack.api("GET", f"/runs/{run}/report")["chosen"])

        until(lambda: len(chosen()) == 3, "relaxed steps, and an end of them", 150, PAUSE_S)
        (tmp_path / "enough").touch()
        wait_for_end(stack, run)
        first, there, back = chosen()
        coverage = stack.api("GET", f"/runs/{run}/coverage")
        rounds = stack.api("GET", f"/runs/{run}/rounds")
        steps = all_steps(stack, run)
        with Store.open(f"sqlite:///{stack.data / 'paceline.db'}") as store:
            again = replay(store, run)

    assert [period["synchroniser"] for period in (first, there, back)] == [
        "allreduce",
        "pairwise",
        "allreduce",
    ]
    assert SLOW.start < there["from"] < SLOW.stop < back["from"]
    assert "times the throughput" in there["why"]
    assert coverage["exact"] is True
    assert again.exact
    assert again.segments > 3
    assert rounds
    assert all(there["from"] <= round_["step"] < back["from"] for round_ in rounds)
    step, step_s = np.array(steps["step"]), np.array(steps["step_s"])
    waited = step_s[(step >= SLOW.start) & (step < there["from"])].mean()
    alone = step_s[(step >= there["from"]) & (step < SLOW.stop)].mean()
    assert alone < 0.7 * waited
    ranks = [(tmp_path / f"replicas-{rank}").read_text().splitlines() for rank in range(4)]
    for epoch in zip(*(map(json.loads, lines) for lines in ranks), strict=True):
        assert len({replica for _, replica, _ in epoch}) == 1
