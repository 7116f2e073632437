"""Switches between relaxed synchronisers in a real run. Their presets are not registered yet."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline_backend.stack import Stack
from support import relaxed_script
from support.chains import switch
from support.e2e import wait_for_end, wait_for_step

pytestmark = pytest.mark.ranks

NAMES = ["backup-workers", "eager-sgd", "local-sgd", "n-soft", "rna", "ssp"]
EMULATE = {"a_s": [1e-5, 1e-5, 1.5e-5, 3e-5], "b_s": [0.003] * 4}
STEPS = 6


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A server that finds them as it does a third party's."""
    about = tmp_path / "packages" / "relaxed-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: relaxed\nVersion: 0\n")
    lines = [f"{n} = paceline_backend.policies.{n.replace('-', '_')}:preset" for n in NAMES]
    (about / "entry_points.txt").write_text("\n".join(["[paceline.policies]", *lines, ""]))
    monkeypatch.setenv("PYTHONPATH", str(about.parent))
    with Stack(tmp_path / "data", 0) as running:
        yield running


@pytest.mark.timeout(240)
def test_switches_among_all_relaxed_presets(stack: Stack, tmp_path: Path) -> None:
    chain = ["bsp", *NAMES, "paceline"]
    run = stack.api(
        "POST",
        "/runs",
        {
            "script": relaxed_script.__file__,
            "args": [str(tmp_path)],
            "nproc": 4,
            "policy": chain[0],
            "env": {
                "PACELINE_EMULATE": json.dumps(EMULATE),
                "PYTHONPATH": str(Path(relaxed_script.__file__).parents[1]),
            },
        },
    )["id"]
    wait_for_step(stack, run, STEPS)
    for number, name in enumerate(chain[1:], 1):
        switch(stack, run, number, name, STEPS)
    (tmp_path / "enough").touch()
    wait_for_end(stack, run)

    coverage = stack.api("GET", f"/runs/{run}/coverage")
    assert coverage["exact"] is True
    planned = {
        segment["policy"]
        for segment in stack.api("GET", f"/runs/{run}/segments")
        if segment["source"] == "controller"
    }
    assert planned == set(chain)

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
