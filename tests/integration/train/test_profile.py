"""The profiling phase on real ranks: what the control plane hears of it, and how it fails."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from paceline.policies.presets.lbb import Cubic, fit_profile
from paceline.policies.solve.minmax import minmax
from support import profiling
from support.ranks import RankError, Ranks


@pytest.mark.ranks
def test_profiles_reach_the_control_plane(ranks: Ranks) -> None:
    """Emulated devices hold, one rank's memory ends, and training goes on as without."""
    # λ is 2 in the mean, λ² 14/3: 2 samples take 2·(2 + 0.5·14/3)·a + 2·c + b.
    emulate = (
        '{"a_s": [0.001, 0.003], "b_s": [0.005, 0], "c_s": [0, 0.001], "cost": {"kappa": 0.5}}'
    )
    every = ranks.run(profiling.train, 8, env={"PACELINE_EMULATE": emulate, "PACELINE_RUN": "r"})
    for rank, (profile, hello, _, _) in enumerate(every):
        a, b, c = [(0.001, 0.005, 0.0), (0.003, 0.0, 0.001)][rank]
        assert [samples for samples, _ in profile.times] == (
            [2, 4, 8, 12] if rank == 0 else [2, 4, 8]
        )
        for samples, seconds in profile.times:
            assert seconds >= samples * ((2 + 0.5 * 14 / 3) * a + c) + b
        assert profile.limit == (None if rank == 0 else 8)
        if rank == 0:
            assert hello.limits == [12, 8]
            assert hello.profiles[0] == profile.times
    assert every[0][1].profiles[1] == every[1][0].times
    plain = ranks.run(profiling.train, None)
    for (_, _, after, seen), (_, _, want, also) in zip(every, plain, strict=True):
        assert seen == also
        torch.testing.assert_close(after, want)


@pytest.mark.ranks
def test_typical_batches_have_the_quantiles_of_all_sizes(ranks: Ranks) -> None:
    """Of 24 samples the sizes are 1, 2, 3, 1, 2, 3, …"""
    for seen, said, times, read in ranks.run(profiling.typical):
        assert [samples for samples, _ in times] == list(seen) == [2, 4, 8, 12]
        sizes = {n: [1 + index % 3 for index in indices] for n, indices in seen.items()}
        assert sizes[2] == [1, 3]
        assert sizes[4] == [1, 2, 2, 3]
        assert sizes[12] == [1] * 4 + [2] * 4 + [3] * 4
        assert len(set(seen[12])) == 12
        assert read == 2 + 4 + 8 + 12, "a batch is read once, however often it is timed"
        assert said == ["typical: call it only inside the function that session.profile runs"] * 2


@pytest.mark.ranks
def test_a_failure_is_told_on_every_rank_and_another_try_succeeds(ranks: Ranks) -> None:
    said = ranks.run(profiling.fail_on, 1)
    assert [words for words, _ in said] == [
        "PacelineError: profile: on rank 1: KeyError: 'no such layer'",
        "KeyError: 'no such layer'",
    ]
    assert [[n for n, _ in again.times] for _, again in said] == [[2, 4, 8, 12]] * 2


@pytest.mark.ranks
def test_only_before_training_and_only_once(ranks: Ranks) -> None:
    for said in ranks.run(profiling.too_late):
        assert said == ["profile: call it once, and before the loader's first iteration"] * 2


@pytest.mark.ranks
def test_limits_must_hold_a_global_batch(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"\[4, 4\] samples fit into the ranks' memory"):
        ranks.run(profiling.limited, 4)
    assert ranks.run(profiling.limited, [4, 8]) == [[4, 8], [4, 8]]


UNPROFILED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "ranks wait for each other before the gradients, in allreduce": (("in loop",), {}),
    "rank 0: ranks wait for each other before the gradients, in allreduce": (("in model",), {}),
    "before the gradients, in allreduce": (("sync",), {}),
    # The ranks have different numbers of passes here, so they would wait forever.
    "before the gradients, in barrier": (("barrier",), {"limits": [8, 12]}),
    "before the gradients, in all_reduce": (("functional",), {}),
    "a plain DistributedDataParallel": (("plain",), {}),
    "RuntimeError: shape '[8, -1]' is invalid": (("fixed",), {}),
    "a compiled model compiles for each number of samples": (("compiled",), {}),
    "prove=False is set": ((), {"prove": False}),
    "limits leave a rank without samples": ((), {"limits": [0, 16]}),
    "shapes allows only some numbers of samples": ((), {"shapes": 4}),
    "with token_budget batches have no fixed count": (
        (),
        {"global_batch": None, "token_budget": 32},
    ),
}


@pytest.mark.ranks
def test_a_run_that_begins_under_lbb_is_profiled_and_left_as_it_was(ranks: Ranks) -> None:
    """Model, gradients, optimiser, random numbers and the order of samples do not change."""
    emulate = '{"a_s": [0.001, 0.002], "b_s": [0.004, 0.004]}'
    env = {"PACELINE_EMULATE": emulate, "PACELINE_POLICY": "lbb"}
    every = ranks.run(profiling.begin, env=env)
    off = {**env, "PACELINE_POLICY": '{"lbb": {"profile": "off"}}'}
    for begun, plain in zip(every, ranks.run(profiling.begin, env=off), strict=True):
        assert [[n for n, _ in times] for times in begun.times] == [[2, 4, 8, 16]] * 2
        for rank, times in enumerate(begun.times):
            for n, seconds in times:  # a mean size is 2
                assert seconds >= 0.004 + 2 * n * 0.001 * (1 + rank)
        assert begun.times == every[0].times
        before, inside = begun.before, begun.inside
        assert before["state"].keys() == inside["state"].keys()
        assert all(torch.equal(v, inside["state"][n]) for n, v in before["state"].items())
        assert inside["gradients"] == [] == before["gradients"]
        assert inside["calls"] == inside["optimizer"] == 0
        assert torch.equal(before["random"], inside["random"])
        assert begun.samples == plain.samples
        assert (plain.times, plain.said.count("profile")) == ([], 0)
    said = "paceline: lbb has profiled ranks 0, 1 with 2, 4, 8, 16 samples. That took"
    assert said in every[0].said
    assert every[1].said == ""


@pytest.mark.ranks
def test_without_a_profile_a_run_begins_as_before_and_says_why(ranks: Ranks) -> None:
    every = ranks.run(
        profiling.begin_each, list(UNPROFILED.values()), env={"PACELINE_POLICY": "lbb"}
    )
    for why, begun, other in zip(UNPROFILED, *every, strict=True):
        assert (begun.times, other.times) == ([], []), why
        assert "lbb begins without a profile of the ranks, because " in begun.said, why
        assert why in begun.said
        assert len(begun.samples) == 1, why


@pytest.mark.ranks
def test_a_profile_finds_where_memory_ends_and_keeps_to_limits(ranks: Ranks) -> None:
    cases: list[Any] = [(("large",), {}), ((), {"limits": [8, 12]}), (("called",), {})]
    env = {"PACELINE_POLICY": "lbb"}
    large, limited, called = ranks.run(profiling.begin_each, cases, env=env)[0]
    assert [[n for n, _ in times] for times in large.times] == [[2, 4, 8, 16], [2, 4, 8]]
    assert large.limits == [16, 8]
    words = "rank 0 with 2, 4, 8, 16 samples (limit 16); rank 1 with 2, 4, 8 samples (limit 8)"
    assert words in large.said
    assert [[n for n, _ in times] for times in limited.times] == [[2, 4, 8], [2, 4, 8, 12]]
    assert [n for n, _ in called.times[0]] == [2, 4, 8, 16]
    assert "profile" not in called.said, "the script's own profile is enough"


@pytest.mark.ranks
def test_other_policies_have_no_profile(ranks: Ranks) -> None:
    for policy in ("bsp", "dynamic-batching"):
        for begun in ranks.run(profiling.begin, env={"PACELINE_POLICY": policy}):
            assert (begun.times, begun.said.count("profile")) == ([], 0)


@pytest.mark.ranks
def test_a_low_limit_that_a_profile_found_ends_no_run(ranks: Ranks) -> None:
    """With a loss that allows only equal batches, the run trains as it does without a profile."""
    env = {"PACELINE_POLICY": "lbb"}
    balanced = ranks.run(partial(profiling.narrow, fits=True), env=env)
    assert [begun.limits for begun in balanced] == [[16, 4]] * 2
    assert [[len(step) for step in begun.samples] for begun in balanced] == [[12, 12], [4, 4]]
    for begun in ranks.run(partial(profiling.narrow, fits=False), env=env):
        assert [len(step) for step in begun.samples] == [8, 8]


@pytest.mark.ranks
def test_a_run_without_steps_is_not_profiled(ranks: Ranks) -> None:
    env = {"PACELINE_POLICY": "lbb"}
    for steps, said in ranks.run(partial(profiling.without_steps, asked=False), env=env):
        assert (steps, said.count("profile")) == ("0", 0)
    _, said = ranks.run(partial(profiling.without_steps, asked=True), env=env)[0]
    assert "without a profile of the ranks, because rank 0: the run was asked to end" in said


@pytest.mark.ranks
def test_the_first_planned_counts_follow_the_profile(ranks: Ranks) -> None:
    """Equal steps, which the leader has divided before the first plan, do not count."""
    emulate = '{"a_s": [0.001, 0.005], "b_s": [0.004, 0.004]}'
    env = {"PACELINE_EMULATE": emulate, "PACELINE_POLICY": "lbb"}
    (profiles, first), (_, second) = ranks.run(profiling.first_planned, env=env)
    cubic = Cubic(np.array([fit_profile(each) for each in profiles]))
    wanted = minmax(cubic, 16, np.array([16, 16])).tolist()
    assert wanted[0] > 11
    assert [first[-1], second[-1]] == wanted
    assert set(first[:-1]) == {8}, "the leader divides the steps before the first plan"
