"""Static batching: counts in proportion to capacities, whatever happens."""

from __future__ import annotations

import numpy as np
import pytest

from paceline import policies
from paceline.core.emulation import Emulation
from paceline.policies import Policy
from paceline.policies.presets.static_batching import counts_of
from paceline.wire import RankDevice
from paceline_backend.simulator import Simulation
from support.cluster import Cluster
from support.records import hello
from support.simulated import simulate


@pytest.mark.parametrize(
    ("capacity", "counts"),
    [
        ((9.0, 12.0, 18.0), [9, 12, 18]),  # the paper's 39 cores at heterogeneity level 2
        ((2.0, 17.0, 20.0), [2, 17, 20]),  # and at 10
        ((1e13, 1e13, 2e13), [10, 10, 19]),  # FLOP/s
        ((1e-9, 1.0, 1.0), [0, 20, 19]),
        ((), [13, 13, 13]),
        ((1.0, 2.0), [13, 13, 13]),  # the run came back with other ranks
    ],
)
def test_counts_are_in_proportion(capacity: tuple[float, ...], counts: list[int]) -> None:
    problem = Cluster(np.ones(390), np.ones(3), np.zeros(3), 39).problem(1, shuffle=False)
    assert counts_of(capacity, problem).tolist() == counts


def test_time_tells_it_nothing() -> None:
    devices = Emulation(a_s=[1e-3, 1e-3, 9e-3], b_s=[0.0] * 3)
    policy = policies.make("static-batching", {"capacity": [1, 2, 3]})
    ran = simulate(policy, devices, np.ones(120), 12, 30)
    assert ran.counts.tolist() == [[2, 4, 6]] * 30


CORES = [RankDevice("cpu", "Xeon", cores, 1 << 34) for cores in (3, 5, 12)]
GPUS = [
    RankDevice("cuda", name, 8, 1 << 34)
    for name in ("Tesla T4", "NVIDIA L4", "NVIDIA A100-SXM4-40GB")
]
TRIED = [
    RankDevice("cpu", "Xeon", 64, 1 << 34, flops=1e12),
    RankDevice("cuda", "NVIDIA X9", 1, 1 << 34, flops=9e12),
]


def first_counts(
    policy: Policy, emulated: Emulation, batch: int, devices: list[RankDevice]
) -> list[int]:
    """Of which nothing has been measured yet."""
    of = hello(
        len(devices), global_batch=batch, sizes=np.ones(10 * batch).tobytes(), devices=devices
    )
    counts: list[int] = Simulation(of, emulated, policy).advance().features.samples[0].tolist()
    return counts


@pytest.mark.parametrize(
    ("devices", "shares"),
    [(CORES, [3, 5, 12]), (GPUS, [65, 121, 312]), (TRIED, [1, 9]), (TRIED[:1] * 2, [1, 1])],
)
@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("static-batching", {}),
        ("dynamic-batching", {}),
        ("rna", {"batches": "static-batching"}),
    ],
)
def test_devices_tell_capacities(
    preset: str, parameters: dict[str, str], devices: list[RankDevice], shares: list[int]
) -> None:
    """Also under a synchroniser, whose batches it decides."""
    world, batch = len(devices), sum(shares)
    emulated = Emulation(a_s=[1e-3] * world, b_s=[0.0] * world)
    made = policies.make(preset, parameters)
    assert first_counts(made, emulated, batch, devices) == shares


@pytest.mark.parametrize("preset", ["static-batching", "dynamic-batching"])
def test_typed_capacities_win(preset: str) -> None:
    emulated = Emulation(a_s=[1e-3] * 3, b_s=[0.0] * 3)
    made = policies.make(preset, {"capacity": [1, 2, 3]})
    assert first_counts(made, emulated, 12, CORES) == [2, 4, 6]


def test_ranks_that_come_back_without_one_go_by_their_devices() -> None:
    """The typed capacities are of three ranks."""
    emulated = Emulation(a_s=[1e-3] * 2, b_s=[0.0] * 2)
    made = policies.make("static-batching", {"capacity": [1, 2, 3]})
    assert first_counts(made, emulated, 17, CORES[1:]) == [5, 12]
