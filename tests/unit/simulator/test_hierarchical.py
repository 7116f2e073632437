"""RNA's groups on the virtual clock: timelines worked out by hand, and in simulations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.wire.synchronisation import Synchronisation, convert
from paceline_backend.simulator import Scenario, Simulation
from paceline_backend.simulator.sync import Costs, SimulatedTimeline, Work, make, step_time_s
from support.simulated import train

SOLO = {"probes": None, "staleness": 4, "mean": False}
RNA = {"probes": 2, "staleness": 4, "mean": True}
SSP = {"quorum": 1, "staleness": None, "lead": 2, "mean": False}


def hierarchical(groups: list[list[int]], **given: Any) -> Synchronisation:
    return convert("hierarchical", {"groups": groups, "every": 4, "mean": True} | given)


def run(what: Synchronisation, work_s: Any, costs: Costs, seed: int = 0) -> SimulatedTimeline:
    work_s = np.array(work_s, float)
    work = Work(0, work_s, np.ones(work_s.shape, int), np.zeros_like(work_s), costs)
    return make(what, work_s.shape[1], seed).run(np.zeros(work_s.shape[1]), work)


def test_groups_go_their_own_ways_until_all_meet() -> None:
    """Two ranks with steps of 1 s, and two with steps of 3 s; a round takes 0.25 s."""
    what = hierarchical([[3, 1], [0, 2]], **SOLO)
    costs = Costs(round_s=0.25, pair_s=0.5, bytes=7)
    timeline = run(what, [[1, 3, 1, 3]] * 2, costs)
    # A group is known by its first rank, which tells.
    figures = [
        (record.rank, record.world, record.number, record.ended_at) for record in timeline.rounds
    ]
    assert figures == [(0, 2, 0, 1.25), (0, 2, 1, 2.25), (1, 2, 0, 3.25), (1, 2, 1, 6.25)]
    assert {
        (record.contributors, record.reduced_s, record.bytes) for record in timeline.rounds
    } == {(2, 0.25, 7)}
    # Rank 1's last push is answered at 6.75. Then two reductions among all, until 7.25.
    assert timeline.wait_s.tolist() == [[0, 0, 0, 0], [5.25, 1.25, 5.25, 1.25]]
    assert not timeline.communication_s.any()


def test_the_server_takes_one_push_at_a_time() -> None:
    """Of three groups two end at the same moment; that of the server itself takes no time."""
    what = hierarchical([[0], [1], [2]], **SOLO)
    costs = Costs(pair_s=0.5, call_s=0.125)
    timeline = run(what, [[1, 1, 1]], costs)
    # A round is over at 1.125, as it takes a call; pushes from 1.25 to 1.75, and to 2.25.
    assert timeline.wait_s.tolist() == [[1.25, 1.25, 1.25]]
    # The server's group is the last: others' pushes were answered long ago.
    timeline = run(what, [[9, 1, 1]], costs)
    assert timeline.wait_s.tolist() == [[0.125, 8.125, 8.125]]


def test_a_groups_rounds_are_of_its_ranks_only() -> None:
    costs = Costs(round_s=1.0, group_s=lambda ranks: 0.125 * ranks, pair_s=0.0)
    timeline = run(hierarchical([[0, 1], [2, 3, 4]], **SOLO), [[1, 1, 1, 1, 1]], costs)
    assert [(record.rank, record.reduced_s) for record in timeline.rounds] == [
        (0, 0.25),
        (2, 0.375),
    ]
    assert timeline.wait_s.tolist() == [[2.375] * 5]


@given(
    shape=st.tuples(st.integers(1, 6), st.integers(1, 10), st.integers(0, 2**31)),
    rounds_of=st.sampled_from([SOLO, RNA, SSP]),
)
def test_a_group_goes_as_if_it_was_alone(
    shape: tuple[int, int, int], rounds_of: dict[str, Any]
) -> None:
    """As a partial all-reduce of its ranks, with the same draws: but for where all meet."""
    world, steps, seed = shape
    rng = np.random.default_rng(seed)
    work_s = rng.choice([0.0, 0.5, 1.0, 2.5], (steps, world))
    of = rng.integers(0, 3, world)
    groups = sorted(np.flatnonzero(of == group).tolist() for group in set(of.tolist()))
    costs = Costs(0.25, 0.125, pair_s=0.5)
    whole = run(hierarchical(groups, **rounds_of), work_s, costs)
    ends = work_s.sum(axis=0) + whole.wait_s.sum(axis=0)
    assert np.ptp(ends) < 1e-9
    alone_until = []
    for group in groups:
        alone = run(convert("partial", rounds_of), work_s[:, group], costs, seed=0)
        assert whole.wait_s[:-1, group].tolist() == alone.wait_s[:-1].tolist()
        mine = [record for record in whole.rounds if record.rank == group[0]]
        assert [replace(record, rank=0, world=None) for record in mine] == alone.rounds
        assert {record.world for record in mine} == {len(group)}
        alone_until.append(float((work_s[:, group] + alone.wait_s).sum(axis=0).max()))
    pushes_s = ends[0] - max(alone_until) - 2 * 0.25
    assert -1e-9 <= pushes_s <= (len(groups) - 1) * 0.5 + 0.125 + 1e-9
    if len(groups) == 1:
        assert abs(pushes_s) < 1e-9


def test_the_mean_time_of_a_step() -> None:
    """Slow ranks in a group of their own hold nobody up; fast ranks take over some batches."""
    work_s = np.tile([0.01, 0.03, 0.01, 0.03], (96, 1))
    what = hierarchical([[0, 2], [1, 3]], **SOLO)
    costs = Costs(round_s=0.004)
    # In each segment of 32 steps: the last round, a push, two reductions.
    together_s = 4 / (2 / 0.01 + 2 / 0.03)
    expected = together_s + 3 * (0.004 + 0.004 + 2 * 0.004) / 96
    assert expected <= step_time_s(what, work_s, costs, 32) <= expected + 0.01 / 32


def scenario(**fields: Any) -> Scenario:
    plain = {
        "name": "two speeds",
        "workers": 6,
        "global_batch": 24,
        "epochs": 2,
        "sizes": {"distribution": "lognormal", "mean": 45, "dif": 10, "samples": 2400},
        "devices": {"unit_s": 1e-3, "delay_s": [0.0, 0.05], "factors": [1, 1, 5, 1, 5, 5]},
        "communication": {"latency_s": 1e-4, "fixed_s": 0.002},
        "policy": "rna-hierarchical",
    }
    return Scenario.of({**plain, **fields})


def test_gradients_are_not_older_for_ranks_that_are_slow_all_the_time() -> None:
    """Under RNA those of slow ranks are; in a group of their own they are not late."""
    oldest = {}
    for name in ("rna", "rna-hierarchical"):
        ran = train(Simulation.of(scenario(policy=name)))
        late = [trained for trained in ran if trained.plan.first_step >= 64]
        ages = np.sum([record.staleness for trained in late for record in trained.rounds], axis=0)
        oldest[name] = ages[-1] / ages.sum()
    assert oldest["rna"] > 0.01
    assert oldest["rna-hierarchical"] < 0.3 * oldest["rna"]
