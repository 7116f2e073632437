"""How a run stands now: its level, and a line about it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from paceline_backend.insight.verdict import Level, judge, past, standing_of
from support.timings import FIRST, in_steps, observed, slow


def test_a_slow_rank_holds_the_run_up() -> None:
    now = standing_of(judge(observed(speed=slow(3, 2.0))))
    assert (now.level, now.what) == (Level.HELD_UP, "rank 3 computes 2 × slower")
    assert now.was == "rank 3 computed 2 × slower"
    assert now.waste == pytest.approx(0.42, abs=0.03)
    assert now.step_s is not None and now.limit_s is not None
    assert now.limit_s < (1 - now.lost) * now.step_s * 1.2


def test_the_waste_is_of_all_of_the_time() -> None:
    """Five ranks wait 80 ms in each step, and all of them take part in the reduction."""
    seen = observed(speed=slow(3, 2.0), noise=0.0, reduce_s=0.16, data_s=0.0, between_s=0.0)
    verdict = judge(seen)
    waited_s, spent_s = 5 * 0.08, 6 * (0.16 + 0.16)
    assert standing_of(verdict).waste == pytest.approx(waited_s / spent_s)
    assert verdict.waste == pytest.approx(waited_s / spent_s)


def test_what_began_lately_counts_in_full() -> None:
    """Over all steps a slowness of the last 20 costs a fifth of what it costs now."""
    verdict = judge(observed(speed=in_steps(80, 99, 2, 2.0)))
    now = standing_of(verdict)
    assert now.level == Level.HELD_UP
    assert now.what == f"rank 2 computes 2 × slower since step {FIRST + 80}"
    assert now.lost > 3 * verdict.cost_s / verdict.wall_s


def test_noise_is_healthy() -> None:
    now = standing_of(judge(observed(6, noise=0.01)))
    assert (now.level, now.what) == (Level.HEALTHY, "no rank holds the others up")


def test_what_has_passed_is_healthy() -> None:
    now = standing_of(judge(observed(speed=in_steps(10, 29, 2, 3.0))))
    assert now.level == Level.HEALTHY
    assert now.what.startswith("rank 2 was 3 × slower in steps")


def test_waiting_in_turn_is_to_watch() -> None:
    now = standing_of(judge(observed(16, noise=0.08)))
    assert now.level == Level.WATCH
    assert "in turn" in now.what


def test_the_node_is_named_where_there_are_several() -> None:
    seen = dataclasses.replace(observed(speed=slow(3, 2.0)), nodes=["a", "a", "a", "b", "b", "b"])
    assert standing_of(judge(seen)).what == "rank 3 on b computes 2 × slower"


def test_too_few_steps() -> None:
    seen = observed()
    verdict = judge(seen.of(np.arange(len(seen.step)) < 3))
    assert standing_of(verdict).level == Level.UNKNOWN


def test_the_past_keeps_names_of_nodes() -> None:
    for node in ("compute-3", "gpu-compute", "compute.rack", "compute"):
        present = f"rank 3 on {node} computes 3.0× as long"
        assert past(present) == f"rank 3 on {node} computed 3.0× as long"


def test_the_past() -> None:
    assert past("ranks 0–3 wait for the data loader") == "ranks 0–3 waited for the data loader"
