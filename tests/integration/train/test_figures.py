"""`session.figures`: how this rank's newest step went, for the script's own tracker."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest

from support import sessions
from support.ranks import Ranks

pytestmark = pytest.mark.ranks
HOLD_S = (0.02, 0.06)


def test_figures_are_of_the_step_before(ranks: Ranks) -> None:
    env = {"PACELINE_EMULATE": json.dumps({"a_s": [0, 0], "b_s": HOLD_S})}
    for rank, (first, steps) in enumerate(ranks.run(sessions.figures, 12, 4, env=env)):
        assert first == {} == steps[0][-1]
        assert [step for step, *_ in steps] == [0, 1, 2]
        for (_, samples, load, _), (*_, figures) in pairwise(steps):
            assert figures["paceline/samples"] == samples
            assert figures["paceline/load"] == load
            assert figures["paceline/compute_s"] >= HOLD_S[rank] * 0.99
            assert figures["paceline/step_s"] >= figures["paceline/compute_s"]
            assert all(math.isfinite(value) and value >= 0 for value in figures.values())
            assert set(figures) == {
                f"paceline/{name}"
                for name in ("samples", "load", "data_s", "compute_s", "sync_s", "step_s")
            }
            if rank == 0:  # it waits for the slower rank
                assert figures["paceline/sync_s"] > 0
