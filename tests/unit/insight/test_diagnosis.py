"""How a run stands now: its level, and a line about it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from paceline_backend.insight.verdict import (
    ObservedSteps,
    VerdictLevel,
    diagnose,
    facts_of,
    judge,
    past,
)
from support.timings import FIRST, in_steps, observed, slow


def test_a_slow_rank_holds_the_run_up() -> None:
    now = diagnose(judge(observed(speed=slow(3, 2.0))))
    assert (now.level, now.what) == (VerdictLevel.HELD_UP, "rank 3 computes 2 × slower")
    assert now.was == "rank 3 computed 2 × slower"
    assert now.waste == pytest.approx(0.42, abs=0.03)
    assert now.step_s is not None and now.limit_s is not None
    assert now.limit_s < (1 - now.lost) * now.step_s * 1.2


def test_the_waste_is_of_all_of_the_time() -> None:
    """Five ranks wait 80 ms in each step, and all of them take part in the reduction."""
    seen = observed(speed=slow(3, 2.0), noise=0.0, reduce_s=0.16, data_s=0.0, between_s=0.0)
    verdict = judge(seen)
    waited_s, spent_s = 5 * 0.08, 6 * (0.16 + 0.16)
    assert diagnose(verdict).waste == pytest.approx(waited_s / spent_s)
    assert verdict.waste == pytest.approx(waited_s / spent_s)


def test_what_began_lately_counts_in_full() -> None:
    """Over all steps a slowness of the last 20 costs a fifth of what it costs now."""
    verdict = judge(observed(speed=in_steps(80, 99, 2, 2.0)))
    now = diagnose(verdict)
    assert now.level == VerdictLevel.HELD_UP
    assert now.what == f"rank 2 computes 2 × slower since step {FIRST + 80}"
    assert now.lost > 3 * verdict.cost_s / verdict.wall_s


def dealt(since: int, speed: np.ndarray) -> ObservedSteps:
    """100 steps: equal batches, and since a step batches that make up for the ranks' speeds."""
    load = np.full((100, 6), 40.0)
    load[since:] = 40.0 * 6 / (1 / speed).sum() / speed
    return dataclasses.replace(
        observed(load=load, speed=speed, samples=load / 10), switched=[FIRST + since]
    )


def test_what_the_policy_in_force_makes_up_for_holds_nobody_up() -> None:
    """Also if it came into force in the middle of the range."""
    seen = dealt(60, slow(3, 2.0))
    verdict = judge(seen)
    now = diagnose(verdict)
    assert (now.level, now.what) == (VerdictLevel.HEALTHY, "rank 3 computes 2 × slower")
    assert max(now.lost, now.waste) < 0.05
    assert now.step_s == pytest.approx(0.0935, rel=0.02)  # of the newest steps alone
    (cause,) = verdict.causes
    assert cause.hidden
    assert cause.cost_s == pytest.approx(60 * 0.08 + 40 * 0.007, rel=0.05)
    (facts,) = facts_of(verdict)["causes"]
    assert f"Since step {FIRST + 60} the plan gives less to do there" in facts["words"]
    assert facts["to_do"] == "look at its machine"
    # Of nine steps nothing is said yet.
    assert diagnose(judge(dealt(91, slow(3, 2.0)))).level == VerdictLevel.HELD_UP


def test_a_policy_that_makes_up_for_nothing_any_more() -> None:
    seen = dealt(0, slow(3, 2.0))
    equal = observed(speed=slow(3, 2.0))
    late = np.arange(100)[:, None] >= 60
    both = {
        name: np.where(late, getattr(equal, name), getattr(seen, name))
        for name in ("samples", "load", "squares", "longest", "compute_s", "sync_s")
    }
    verdict = judge(dataclasses.replace(seen, **both, switched=[FIRST + 60]))
    assert not verdict.causes[0].hidden
    assert verdict.causes[0].cost_s == pytest.approx(60 * 0.007 + 40 * 0.08, rel=0.05)
    assert diagnose(verdict).level == VerdictLevel.HELD_UP
    assert diagnose(verdict).lost == pytest.approx(0.08 / 0.164, abs=0.03)


def test_in_a_policys_first_steps_it_is_not_said_to_make_up_for_anything() -> None:
    """Whether it does is not known yet."""
    seen = dataclasses.replace(dealt(0, slow(3, 2.0)), switched=[FIRST + 94])
    words = facts_of(judge(seen))["causes"][0]["words"]
    assert words.startswith("Rank 3 computes 2 × slower. That costs")


def test_batches_are_uneven_under_one_policy_only() -> None:
    rng = np.random.default_rng(0)
    loads = rng.lognormal(np.log(40), 0.3, (100, 6))
    for rows, since, until, words in (
        (slice(0, 60), None, FIRST + 59, f"in steps {FIRST:,}–{FIRST + 59:,} only"),
        (slice(60, 100), FIRST + 60, None, f"since step {FIRST + 60:,}"),
    ):
        uneven = np.broadcast_to(loads.mean(axis=1, keepdims=True), loads.shape).copy()
        uneven[rows] = loads[rows]
        seen = dataclasses.replace(observed(load=uneven), switched=[FIRST + 60])
        (facts,) = facts_of(judge(seen))["causes"]
        assert (facts["kind"], facts["since"], facts["until"]) == ("data", since, until)
        assert f"Batches of the same step cost differently {words}. That costs" in facts["words"]
        level = diagnose(judge(seen)).level
        assert (level == VerdictLevel.HEALTHY) == (until is not None)


@pytest.mark.parametrize(("factor", "noise"), [(3.0, 0.015), (5.0, 0.015), (3.0, 0.005)])
def test_a_rank_becomes_slow_late_under_a_plan_that_makes_up_for_it(
    factor: float, noise: float
) -> None:
    """Its time hardly changes, as its batches get smaller: the batches' costs must not look fixed.

    Found by somebody who had read the documentation alone.
    """
    speed, load = np.ones((300, 6)), np.full((300, 6), 40.0)
    speed[180:, 2] = factor
    load[184:] = 240 / (5 + 1 / factor)
    load[184:, 2] /= factor
    seen = observed(6, 300, noise=noise, load=load, speed=speed, samples=load)
    verdict = judge(dataclasses.replace(seen, squares=load, longest=np.ones_like(load)))
    (cause,) = verdict.causes
    assert (cause.kind, cause.ranks, cause.hidden) == ("node", (2,), True)
    assert facts_of(verdict)["causes"][0]["since"] == FIRST + 180
    assert cause.factor == pytest.approx(factor, rel=0.05)
    late_s = 4 * 0.08 * (factor - 1)
    hidden_s = 116 * 2e-3 * (240 / (5 + 1 / factor) - 40)
    assert cause.cost_s == pytest.approx(late_s + hidden_s, rel=0.15)
    assert diagnose(verdict).level == VerdictLevel.HEALTHY


def test_a_second_switch_takes_nothing_back() -> None:
    """Both policies make up for the slow rank, whether few or many steps are of the second."""
    once = judge(dealt(60, slow(3, 2.0)))
    for second in (65, 84):
        seen = dataclasses.replace(dealt(60, slow(3, 2.0)), switched=[FIRST + 60, FIRST + second])
        verdict = judge(seen)
        assert diagnose(verdict).level == VerdictLevel.HEALTHY
        assert verdict.cost_s == pytest.approx(once.cost_s, rel=0.02)
        words = facts_of(verdict)["causes"][0]["words"]
        assert f"Since step {FIRST + 60} the plan" in words
    throughout = judge(dealt(0, slow(3, 2.0)))
    seen = dataclasses.replace(dealt(0, slow(3, 2.0)), switched=[FIRST + 70])
    assert judge(seen).cost_s == pytest.approx(throughout.cost_s, rel=0.02)
    assert "slower. The plan gives less" in facts_of(judge(seen))["causes"][0]["words"]


def test_a_range_that_begins_with_a_few_steps_of_another_policy() -> None:
    assert observed().policies == [slice(0, 100)]
    for switched, expected in (
        ([FIRST], [slice(0, 100)]),
        ([FIRST + 5], [slice(0, 100)]),
        ([FIRST + 5, FIRST + 50], [slice(0, 50), slice(50, 100)]),
        ([FIRST + 50, FIRST + 55], [slice(0, 55), slice(55, 100)]),
        ([FIRST + 50, FIRST + 95], [slice(0, 50), slice(50, 100)]),
        ([FIRST - 20, FIRST + 300], [slice(0, 100)]),
    ):
        assert dataclasses.replace(observed(), switched=switched).policies == expected


def test_uneven_batches_after_a_plan_that_made_up_for_a_slow_rank() -> None:
    """What the plan dealt counts once, as the slow rank's."""
    seen, rng = dealt(0, slow(3, 2.0)), np.random.default_rng(1)
    loads = rng.lognormal(np.log(40), 0.4, (100, 6))
    after = observed(load=loads, speed=slow(3, 2.0))
    late = np.arange(100)[:, None] >= 60
    both = {
        name: np.where(late, getattr(after, name), getattr(seen, name))
        for name in ("samples", "load", "squares", "longest", "compute_s", "sync_s")
    }
    verdict = judge(dataclasses.replace(seen, **both, switched=[FIRST + 60]))
    causes = {cause["kind"]: cause for cause in facts_of(verdict)["causes"]}
    assert set(causes) == {"node", "data"}
    assert (causes["data"]["since"], causes["node"]["hidden"]) == (FIRST + 60, False)
    assert all(cause["cost_s"] > 0.3 for cause in causes.values())


def test_what_is_said_is_of_a_rank_that_is_waited_for() -> None:
    """Not of one that costs more over the range, and that the plan makes up for now."""
    speed = np.broadcast_to(slow(3, 3.0), (100, 6)).copy()
    speed[80:, 1] = 1.6
    seen = dealt(60, slow(3, 3.0))
    both = observed(load=seen.load, speed=speed, samples=seen.samples)
    now = diagnose(judge(dataclasses.replace(both, switched=[FIRST + 60])))
    assert now.level == VerdictLevel.HELD_UP
    assert now.what == f"rank 1 computes 1.59 × slower since step {FIRST + 80}"


def test_what_came_back_under_another_policy_only_is_over() -> None:
    speed = np.ones((100, 6))
    speed[5:60:10, 2] = 6.0
    seen = observed(speed=speed)
    assert diagnose(judge(seen)).level == VerdictLevel.HELD_UP
    now = diagnose(judge(dataclasses.replace(seen, switched=[FIRST + 60])))
    assert now.level == VerdictLevel.HEALTHY


def test_what_has_passed_is_healthy() -> None:
    now = diagnose(judge(observed(speed=in_steps(10, 29, 2, 3.0))))
    assert now.level == VerdictLevel.HEALTHY
    assert now.what.startswith("rank 2 was 3 × slower in steps")


def test_waiting_in_turn_is_to_watch() -> None:
    now = diagnose(judge(observed(16, noise=0.08)))
    assert now.level == VerdictLevel.WATCH
    assert "in turn" in now.what


def test_the_node_is_named_where_there_are_several() -> None:
    seen = dataclasses.replace(observed(speed=slow(3, 2.0)), nodes=["a", "a", "a", "b", "b", "b"])
    assert diagnose(judge(seen)).what == "rank 3 on b computes 2 × slower"


def test_too_few_steps() -> None:
    seen = observed()
    verdict = judge(seen.of(np.arange(len(seen.step)) < 3))
    assert diagnose(verdict).level == VerdictLevel.UNKNOWN


def test_the_past_keeps_names_of_nodes() -> None:
    for node in ("compute-3", "gpu-compute", "compute.rack", "compute"):
        present = f"rank 3 on {node} computes 3.0× as long"
        assert past(present) == f"rank 3 on {node} computed 3.0× as long"


def test_the_past() -> None:
    assert past("ranks 0–3 wait for the data loader") == "ranks 0–3 waited for the data loader"
