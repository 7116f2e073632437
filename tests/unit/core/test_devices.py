"""Capacities from devices alone: by cores, by data sheets, or by a trial, never by a mixture."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batch_limits.devices import capacities, need_trial, summary
from paceline.core.emulation import EmulatedDevice, Emulation
from paceline.wire import RankDevice
from paceline_backend.simulator.simulation import remaining

GIB = 2**30


def cpu(cores: int, threads: int = 0, flops: float | None = None) -> RankDevice:
    return RankDevice("cpu", "Some Xeon", cores, 16 * GIB, threads, flops)


def gpu(name: str, flops: float | None = None) -> RankDevice:
    return RankDevice("cuda", name, 8, 80 * GIB, flops=flops)


T4, A100, UNKNOWN = gpu("Tesla T4"), gpu("NVIDIA A100-SXM4-40GB"), gpu("NVIDIA X9")


@pytest.mark.parametrize(
    ("devices", "values", "by"),
    [
        ([cpu(3), cpu(5), cpu(12)], (3.0, 5.0, 12.0), "cores"),  # the paper's Fig. 3
        ([cpu(8, threads=1), cpu(2)], (1.0, 2.0), "cores"),  # a thread computes on one core
        ([cpu(2, threads=8), cpu(2)], (2.0, 2.0), "cores"),
        ([T4, A100], (65e12, 312e12), "FLOP/s"),
        ([UNKNOWN, UNKNOWN], (1.0, 1.0), "equal devices"),
        ([T4, UNKNOWN], (), ""),
        ([T4, cpu(64)], (), ""),
        ([T4, gpu("NVIDIA A100-SXM4-40GB MIG 1g.5gb")], (), ""),  # a seventh of it
        ([gpu("Tesla T4", 4e13), cpu(2, flops=1e11)], (4e13, 1e11), "trial"),
        ([gpu("Tesla T4", 4e13), cpu(2)], (), ""),  # one of them could not
        ([], (), ""),
    ],
)
def test_capacities(devices: list[RankDevice], values: tuple[float, ...], by: str) -> None:
    made = capacities(devices)
    assert (made.values, made.by) == (values, by)
    assert need_trial(devices) == (bool(devices) and not values)


some_devices = st.lists(
    st.builds(
        RankDevice,
        kind=st.sampled_from(["cpu", "cuda", "xpu"]),
        name=st.sampled_from(["Tesla T4", "NVIDIA L4", "NVIDIA X9"]),
        cores=st.integers(1, 256),
        memory_bytes=st.integers(0, 2**40),
        threads=st.integers(0, 256),
        flops=st.none() | st.floats(1, 1e15),
    ),
    max_size=6,
)


@given(some_devices)
def test_there_is_a_capacity_above_0_for_each_rank_or_none(devices: list[RankDevice]) -> None:
    values, by = capacities(devices)
    assert len(values) in (0, len(devices))
    assert all(0 < value < math.inf for value in values)
    assert bool(by) == bool(values)


@given(some_devices, st.randoms())
def test_capacities_do_not_depend_on_the_order_of_ranks(
    devices: list[RankDevice], random: np.random.RandomState
) -> None:
    values, by = capacities(devices)
    order = list(range(len(devices)))
    random.shuffle(order)
    moved, same = capacities([devices[rank] for rank in order])
    assert (moved, same) == (tuple(values[rank] for rank in order) if values else (), by)


def test_a_summary_has_each_name_once() -> None:
    assert summary([T4, cpu(1), T4, A100]) == "Tesla T4 + cpu + NVIDIA A100-SXM4-40GB"
    assert summary([cpu(1), cpu(8)]) == "cpu"
    assert summary([msgspec.structs.replace(T4, emulated=True)]) == "Tesla T4 (emulated)"
    assert summary([]) == ""


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"cores": 0}, "cores = 0: give a whole number ≥ 1"),
        ({"memory_bytes": -1}, "memory_bytes = -1"),
        ({"flops": math.nan}, "flops = nan"),
        ({"name": ""}, "name = ''"),
        ({"kind": "c\n"}, r"kind = 'c\n'"),
    ],
)
def test_a_defect_names_its_field(fields: dict[str, object], says: str) -> None:
    assert T4.defect() is None
    assert says in str(msgspec.structs.replace(T4, **fields).defect())


def test_emulated_devices() -> None:
    text = (
        '{"a_s": [1, 1], "b_s": [0, 0], "devices": [{"kind": "cuda", "name": "Tesla T4"}, '
        '{"kind": "cpu", "name": "Xeon", "cores": 12, "memory_bytes": 5}]}'
    )
    made = Emulation.parse(text, 2)
    assert msgspec.convert(made.as_dict(), Emulation) == made, "as a run that goes on has it"
    first, second = (device.of(cpu(4, threads=1)) for device in made.devices)
    assert first == RankDevice("cuda", "Tesla T4", 4, 16 * GIB, emulated=True)
    assert second == RankDevice("cpu", "Xeon", 12, 5, emulated=True)
    for devices, says in [
        ([EmulatedDevice("cpu", "Xeon")], "devices = 1 devices: give one for each of 2 ranks"),
        ([EmulatedDevice("cpu", "Xeon"), EmulatedDevice("cpu", "", 2)], "devices[1].name = ''"),
        ([EmulatedDevice("cpu", "X", 0), EmulatedDevice("cpu", "X")], "devices[0].cores = 0"),
    ]:
        assert says in str(msgspec.structs.replace(made, devices=devices).defect(2))


def test_ranks_that_stay_keep_their_devices() -> None:
    """As in a simulation in which a rank is lost."""
    emulated = [EmulatedDevice("cpu", name) for name in ("a", "b", "c")]
    made = remaining(Emulation([1.0, 2.0, 3.0], [0.0] * 3, devices=emulated), [0, 2])
    assert (made.a_s, [device.name for device in made.devices]) == ([1.0, 3.0], ["a", "c"])
    assert made.defect(2) is None
