"""Who holds a run up, why, since when, and what it costs."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_backend.insight.verdict import (
    THRESHOLDS,
    ObservedSteps,
    Verdict,
    cause_of,
    facts_of,
    judge,
    named,
    rank_words,
    to_do,
    words,
)
from support.timings import FIRST, in_steps, observed, slow


def only(verdict: Verdict, kind: str, *ranks: int) -> None:
    """There is one cause, of this kind, with these ranks."""
    assert [(cause.kind, cause.ranks) for cause in verdict.causes] == [(kind, ranks)]


@pytest.mark.parametrize(("world", "noise"), [(2, 0.05), (16, 0.05), (6, 0.0), (6, 0.1)])
def test_noise_is_no_cause(world: int, noise: float) -> None:
    verdict = judge(observed(world, noise=noise))
    assert verdict.causes == []
    headline = "No straggler" if verdict.waste <= 0.05 else "No cause stands out"
    assert words(verdict).startswith(f"{headline}: in these 100 steps ranks spend ")


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_slow_rank_is_named_with_its_cost(noise: float) -> None:
    verdict = judge(observed(noise=noise, speed=slow(3, 2.0)))
    only(verdict, "node", 3)
    [cause] = verdict.causes
    assert (cause.since, cause.until, cause.trend) == (None, None, None)
    assert cause.factor == pytest.approx(2.0, rel=0.03)
    assert cause.cost_s == pytest.approx(100 * 0.08, rel=0.1)
    assert words(verdict).startswith("Rank 3 computes 2 × slower. That costs 4")
    assert to_do(verdict, cause).startswith("look at its machine")


def test_since_when() -> None:
    """A rank that has been slow for the last third is not "slower on average"."""
    verdict = judge(observed(speed=in_steps(70, 99, 2, 5.0)))
    only(verdict, "node", 2)
    assert verdict.causes[0].since == 70
    assert verdict.causes[0].factor == pytest.approx(5.0, rel=0.03)
    assert f"Rank 2 computes 5 × slower since step {FIRST + 70}." in words(verdict)


def test_a_slowness_that_grows_is_told_as_then_and_now() -> None:
    speed = np.ones((300, 6))
    speed[100:, 2] = np.linspace(1, 3, 200)
    verdict = judge(observed(steps=300, speed=speed))
    only(verdict, "node", 2)
    cause = verdict.causes[0]
    assert cause.trend == pytest.approx((1.0, 3.0), rel=0.05)
    assert cause.since == pytest.approx(100, abs=15)
    assert "Rank 2 computes slower and slower since step" in words(verdict)


def test_rare_long_pauses_are_found() -> None:
    speed = np.ones((300, 6))
    speed[20::50, 2] = 15.0
    verdict = judge(observed(steps=300, speed=speed))
    only(verdict, "periodic", 2)
    cause = verdict.causes[0]
    assert (cause.period, cause.times, cause.since) == (50, 6, 20)
    assert cause.cost_s / verdict.wall_s == pytest.approx(0.21, abs=0.02)
    assert "Rank 2 is 15 × slower every 50 steps. That costs" in words(verdict)


def test_what_comes_back_has_a_begin_if_it_was_due_before() -> None:
    speed = np.ones((300, 6))
    speed[120::50, 2] = 15.0
    verdict = judge(observed(steps=300, speed=speed))
    assert f"Rank 2 is 15 × slower every 50 steps since step {FIRST + 120}." in words(verdict)
    assert facts_of(verdict)["causes"][0]["since"] == FIRST + 120


def test_what_passed_is_told_with_its_steps() -> None:
    verdict = judge(observed(speed=in_steps(20, 49, 2, 4.0)))
    only(verdict, "transient", 2)
    assert (verdict.causes[0].since, verdict.causes[0].until) == (20, 49)
    assert "Rank 2 was 4 × slower in steps 120–149 only, and is fine since." in words(verdict)


def test_what_has_just_begun_is_not_yet_lasting() -> None:
    verdict = judge(observed(speed=in_steps(90, 99, 2, 3.0)))
    only(verdict, "transient", 2)
    assert "Rank 2 is 3 × slower since step 190." in words(verdict)


def test_many_slow_ranks_are_one_group() -> None:
    speed = np.where(np.arange(64) >= 32, 1.5, 1.0)
    nodes = ["a"] * 32 + ["b"] * 32
    verdict = judge(observed(64, speed=speed, nodes=nodes))
    only(verdict, "node", *range(32, 64))
    assert words(verdict).startswith("All 32 ranks of b compute 1.49 × slower.")


def test_ranks_that_are_differently_slow_are_told_with_a_range() -> None:
    verdict = judge(observed(speed=[1, 1, 1, 1, 1.5, 3.0]))
    only(verdict, "node", 4, 5)
    assert words(verdict).startswith("Ranks 4 and 5 compute 1.49 to 3 × slower.")


def test_the_network_is_a_cause() -> None:
    verdict = judge(observed(reduce_s=0.4))
    only(verdict, "network")
    assert verdict.causes[0].cost_s / verdict.wall_s == pytest.approx(0.83, abs=0.02)
    assert "Reducing the gradients takes 83 % of the wall time." in words(verdict)


def test_checkpoints_are_told_with_their_distance() -> None:
    between_s = np.where(np.arange(200) % 20 == 19, 0.5, 0.001)
    verdict = judge(observed(steps=200, between_s=between_s))
    only(verdict, "between")
    assert "No rank computes between steps every 20 steps. That costs" in words(verdict)


def test_slow_planning_is_no_slow_loader() -> None:
    data_s = np.where(np.arange(96) % 8 == 0, 0.2, 0.001)[:, None]
    verdict = judge(observed(steps=96, data_s=data_s))
    only(verdict, "planning")
    assert words(verdict).startswith("Ranks wait for the plan in the first step of segments")


def test_uneven_batches_are_data() -> None:
    rng = np.random.default_rng(0)
    verdict = judge(observed(load=rng.lognormal(3.7, 0.5, (100, 6))))
    only(verdict, "data")
    assert words(verdict).startswith("Batches of the same step cost differently.")


def test_a_rank_that_always_has_the_larger_batches_is_named() -> None:
    verdict = judge(observed(load=40 * slow(1, 1.5)))
    only(verdict, "data", 1)
    assert "The larger ones go to rank 1." in words(verdict)


def test_what_a_plan_makes_up_for_is_a_cause_all_the_same() -> None:
    cut = slow(3, 0.5)
    verdict = judge(observed(load=40 * cut, samples=4 * cut, speed=slow(3, 2.0)))
    only(verdict, "node", 3)
    assert verdict.causes[0].hidden
    # Six ranks do the work of 5.5 in the time that 5.5 ÷ 6 of it would take.
    assert verdict.causes[0].cost_s / verdict.wall_s == pytest.approx(1 - 5.5 / 6, abs=0.02)
    assert "so nobody waits; the others do that work" in words(verdict)


def test_several_causes_are_told_by_cost() -> None:
    speed = in_steps(20, 29, 2, 5.0) * slow(4, 2.0)
    verdict = judge(observed(speed=speed, between_s=0.0))
    assert [(cause.kind, cause.ranks) for cause in verdict.causes] == [
        ("node", (4,)),
        ("transient", (2,)),
    ]
    assert [cause_of(verdict, rank) is None for rank in (0, 2, 4)] == [True, False, False]
    assert rank_words(verdict, 0, 1.0) == "Rank 0 is as fast as the others."
    assert rank_words(verdict, 0, 0.5) == "Rank 0 computes 2× faster than the median."
    assert rank_words(verdict, 4, 2.0).startswith("Rank 4 computes 2 × slower")
    assert rank_words(verdict, 1, None).startswith("Rank 1 had samples in too few steps")


def test_hidden_behind_a_slower_rank() -> None:
    """The second cause counts, and costs nothing while the first is there."""
    speed = slow(4, 3.0) * in_steps(0, 99, 1, 1.0)
    speed[5::10, 1] = 2.0
    verdict = judge(observed(speed=speed))
    kinds = {cause.kind: cause for cause in verdict.causes}
    assert set(kinds) == {"node", "periodic"}
    assert kinds["periodic"].cost_s == pytest.approx(0.0, abs=0.01 * verdict.wall_s)
    assert "Fixing this alone saves nothing" in words(verdict)


def test_under_a_relaxed_synchroniser_a_slow_rank_costs_its_own_steps() -> None:
    """Nobody waits: of eight ranks one at a fifth of the speed takes a tenth of the work away."""
    verdict = judge(observed(8, speed=slow(3, 5.0, 8), apart=True, reduce_s=0.0, between_s=0.0))
    only(verdict, "node", 3)
    # The rank's row is of one step here, so its time is five times the others'.
    assert verdict.causes[0].cost_s / verdict.wall_s == pytest.approx(4 / 12, abs=0.02)
    assert verdict.waste == 0.0


def test_ranks_that_became_slow_one_after_the_other_cost_much_together() -> None:
    """Each alone saves little, as the others hold the steps up as long."""
    speed = np.ones((300, 6))
    for rank, since in ((1, 60), (2, 75), (3, 90)):
        speed[since:, rank] = 2.0
    verdict = judge(observed(steps=300, speed=speed))
    assert sorted((cause.kind, cause.ranks) for cause in verdict.causes) == [
        ("node", (1,)),
        ("node", (2,)),
        ("node", (3,)),
    ]
    assert sum(cause.cost_s for cause in verdict.causes) < 0.1 * verdict.wall_s
    assert verdict.cost_s == pytest.approx(240 * 0.08, rel=0.1)
    assert "Together they cost 4" in words(verdict)


def test_who_waits_longest_is_named_beside_all_who_wait() -> None:
    data_s = np.full((300, 8), 0.012)
    data_s[:, 3] = 0.06
    data_s[150:, 3] = 0.1
    verdict = judge(observed(8, 300, data_s=data_s))
    named_ranks = {cause.ranks for cause in verdict.causes if cause.kind == "input"}
    assert {(3,), tuple(range(8))} <= named_ranks


@pytest.mark.parametrize("steps", [4, 25])
def test_noise_is_no_cause_in_few_steps(steps: int) -> None:
    alarms = 0
    for seed in range(25):
        seen = observed(8, steps, noise=0.0)
        noise = 1 + 0.1 * np.random.default_rng(seed).standard_normal(seen.compute_s.shape)
        compute_s = seen.compute_s * noise
        sync_s = compute_s.max(axis=1, keepdims=True) - compute_s + 0.002
        alarms += bool(judge(dataclasses.replace(seen, compute_s=compute_s, sync_s=sync_s)).causes)
    assert alarms <= 1


def test_ranks_that_are_no_longer_there_are_no_lost_records() -> None:
    seen = observed(8, 300, reduce_s=np.where(np.arange(300) < 200, 0.002, 0.1))
    gone = np.zeros((300, 8), bool)
    gone[100:, 4:] = True
    columns = ("samples", "load", "squares", "longest", "data_s", "compute_s", "sync_s")
    seen = dataclasses.replace(
        seen, **{name: np.where(gone, np.nan, getattr(seen, name)) for name in columns}
    )
    only(judge(seen), "network")


def test_few_steps() -> None:
    assert "3 steps with at least two ranks are too few" in words(judge(observed(steps=3)))
    assert judge(observed(steps=THRESHOLDS.fewest_steps)).causes == []
    alone = judge(observed(1))
    assert alone.steps == 0, "one rank alone waits for nobody"
    assert words(alone).startswith("A verdict compares ranks")


def test_ranks_without_samples_and_lost_records() -> None:
    seen = observed(speed=slow(3, 2.0))
    nothing = np.arange(6) == 1
    compute_s = np.where(nothing, 0.0, seen.compute_s)
    compute_s[::7, 3] = np.nan
    seen = dataclasses.replace(
        seen, samples=np.where(nothing, 0.0, seen.samples), compute_s=compute_s
    )
    only(judge(seen), "node", 3)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "Rank 3"),
        ([1, 2], "Ranks 1 and 2"),
        ([2, 3, 4], "Ranks 2–4"),
        ([0, 2, 3, 4, 6], "Ranks 0, 2–4 and 6"),
        (list(range(8)), "Every rank"),
        ([4, 5, 6, 7], "All 4 ranks of b"),
    ],
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert named(ranks, 8, ["a"] * 4 + ["b"] * 4) == text


def test_many_ranks_are_not_listed() -> None:
    assert named(range(0, 100, 2), 100) == "Ranks 0, 2, 4, 6 and 46 others"


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 7))
def test_any_records_have_a_verdict(seed: int, steps: int, world: int) -> None:
    """Costs are never negative, nor larger than the wall time."""
    rng = np.random.default_rng(seed)
    shape = (steps, world)
    samples = rng.integers(0, 4, shape).astype(float)
    load = samples * rng.uniform(0.1, 100, shape)
    lost = rng.random(shape) < 0.2
    wild = rng.exponential(1.0, (7, *shape))
    values = [samples, load, load**2, load, *wild[:3] * (samples > 0)]
    values = [np.where(lost, np.nan, column) for column in values]
    seen = ObservedSteps(
        np.arange(steps),
        *values,
        rng.exponential(0.1, steps),
        rng.random(steps) < 0.2,
        rng.random(steps) < 0.2,
        [f"n{rank % 2}" for rank in range(world)],
    )
    verdict = judge(seen)
    for cause in verdict.causes:
        assert 0 <= cause.cost_s <= verdict.wall_s * (1 + 1e-9)
        assert to_do(verdict, cause)
    assert words(verdict)


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="load"):
        dataclasses.replace(observed(), load=np.ones((100, 7)))
    with pytest.raises(ValueError, match="nodes: 2"):
        dataclasses.replace(observed(), nodes=["a", "b"])
    with pytest.raises(ValueError, match="between_s"):
        dataclasses.replace(observed(), between_s=np.ones(3))
