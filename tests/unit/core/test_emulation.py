"""Emulated devices: what they cost, that ranks and simulator see the same, what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.cost import Cost, Features
from paceline.core.emulation import Emulation, Slowdown

WORLD = 3


def batch(samples: int, load: float, longest: float = 0.0, squares: float = 0.0) -> Features:
    return Features(*(np.full(WORLD, v) for v in (samples, load, squares, longest)))


def made(**fields: Any) -> Emulation:
    return Emulation(a_s=[1.0, 2.0, 4.0], b_s=[0.5, 0.5, 0.0], **fields)


@pytest.mark.parametrize(
    ("fields", "threads", "expected"),
    [
        ({}, 1, [10.5, 20.5, 40.0]),
        ({"c_s": [0.0, 1.0, 2.0]}, 1, [10.5, 24.5, 48.0]),
        ({"cost": Cost(kappa=0.1)}, 1, [13.5, 26.5, 52.0]),
        ({"cost": Cost(padded=True)}, 1, [16.5, 32.5, 64.0]),
        ({"cost": Cost(kappa=0.5, padded=True)}, 1, [48.5, 96.5, 192.0]),
        ({"serial": 0.5}, 4, [6.75, 13.0, 25.0]),
        ({"serial": 0.5}, 0, [10.5, 20.5, 40.0]),  # a segment that leaves threads as they are
        ({"slowdowns": [Slowdown([0, 2], 2.0)]}, 1, [21.0, 20.5, 80.0]),
        ({"slowdowns": [Slowdown([2], 2.0), Slowdown([2], 3.0)]}, 1, [10.5, 20.5, 240.0]),
        ({"delay_s": (7.0, 7.0)}, 1, [17.5, 27.5, 47.0]),
    ],
)
def test_what_a_step_takes(fields: dict[str, Any], threads: int, expected: list[float]) -> None:
    of = batch(4, 10.0, longest=4.0, squares=30.0)
    assert made(**fields).compute_s(5, of, threads) == pytest.approx(expected)


def test_a_rank_without_samples_takes_no_time() -> None:
    delayed = made(delay_s=(1.0, 2.0), slowdowns=[Slowdown([0], 3.0)])
    assert delayed.compute_s(0, batch(0, 0.0)).tolist() == [0.0] * WORLD
    assert delayed.rank_s(0, 0, Features(0, 0.0, 0.0, 0.0)) == 0.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("slow", "steps"),
    [
        (Slowdown([0], 2.0), list(range(12))),
        (Slowdown([0], 2.0, first_step=3), list(range(3, 12))),
        (Slowdown([0], 2.0, first_step=3, steps=2), [3, 4]),
        (Slowdown([0], 2.0, first_step=1, steps=2, every=5), [1, 2, 6, 7, 11]),
        (Slowdown([0], 2.0, chance=0.0), []),
    ],
)
def test_slowdowns_pass(slow: Slowdown, steps: list[int]) -> None:
    factors = np.array([made(slowdowns=[slow]).factors(step) for step in range(12)])
    assert np.flatnonzero(factors[:, 0] == 2.0).tolist() == steps
    assert (factors[:, 1:] == 1.0).all()


def test_chance_noise_and_delays_are_as_asked() -> None:
    """Over many steps: the share of slow ones, the mean and spread of the others."""
    slow = made(slowdowns=[Slowdown([0, 1], 5.0, chance=0.3)])
    factors = np.array([slow.factors(step) for step in range(2_000)])
    assert (factors == 5.0).mean(axis=0) == pytest.approx([0.3, 0.3, 0.0], abs=0.04)
    assert ((factors == 5.0).all(axis=1)).sum() == 0, "rank 2 is not among them"
    assert (factors[:, 0] != factors[:, 1]).any(), "each rank by itself"
    times = np.array([made(noise=0.1).compute_s(k, batch(4, 10.0)) for k in range(2_000)])
    assert times.mean(axis=0) == pytest.approx([10.5, 20.5, 40.0], rel=0.02)
    assert (times.std(axis=0) / times.mean(axis=0)) == pytest.approx([0.1] * 3, rel=0.1)
    late = made(delay_s=(1.0, 3.0))
    times = np.array([late.compute_s(k, batch(4, 10.0)) for k in range(2_000)])
    assert times.min(axis=0) == pytest.approx([11.5, 21.5, 41.0], abs=0.05)
    assert times.max(axis=0) == pytest.approx([13.5, 23.5, 43.0], abs=0.05)


emulations = st.builds(
    Emulation,
    a_s=st.just([1e-3, 2e-3, 5e-3]),
    b_s=st.just([0.0, 0.1, 0.2]),
    c_s=st.sampled_from([[], [0.01, 0.0, 0.02]]),
    cost=st.builds(Cost, kappa=st.sampled_from([0.0, 0.1]), padded=st.booleans()),
    slowdowns=st.lists(
        st.builds(
            Slowdown,
            ranks=st.lists(st.integers(0, 2), max_size=3, unique=True),
            factor=st.sampled_from([0.5, 3.0]),
            first_step=st.integers(0, 3),
            steps=st.sampled_from([None, 2]),
            every=st.sampled_from([0, 4]),
            chance=st.sampled_from([1.0, 0.5]),
        ),
        max_size=3,
    ),
    delay_s=st.sampled_from([(0.0, 0.0), (0.0, 0.5), (0.2, 0.2)]),
    noise=st.sampled_from([0.0, 0.3]),
    serial=st.sampled_from([1.0, 0.2, 0.0]),
    seed=st.integers(0, 3),
)


@settings(max_examples=3 * settings.default.max_examples)
@given(emulation=emulations, step=st.integers(0, 20), data=st.data())
def test_a_rank_gets_the_simulator_s_number(
    emulation: Emulation, step: int, data: st.DataObject
) -> None:
    """Bit for bit, though it computes its own alone."""
    threads = data.draw(st.lists(st.integers(0, 4), min_size=WORLD, max_size=WORLD))
    samples = data.draw(st.lists(st.integers(0, 5), min_size=WORLD, max_size=WORLD))
    of = Features(np.array(samples), *(np.array(samples) * value for value in (7.5, 60.25, 11.125)))
    every = emulation.compute_s(step, of, np.array(threads))
    alone = [
        emulation.rank_s(rank, step, Features(*(column[rank].item() for column in of)), k)
        for rank, k in enumerate(threads)
    ]
    assert alone == every.tolist()
    assert every.tolist() == emulation.compute_s(step, of, np.array(threads)).tolist()


@given(emulation=emulations)
def test_travels_as_json_and_in_hello(emulation: Emulation) -> None:
    text = msgspec.json.encode(emulation).decode()
    assert Emulation.parse(text, WORLD) == emulation
    assert msgspec.convert(emulation.as_dict(), Emulation) == emulation


def test_another_seed_gives_other_times() -> None:
    first, second = (made(noise=0.1, seed=seed).compute_s(0, batch(4, 10.0)) for seed in (0, 1))
    assert (first != second).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "PACELINE_EMULATE"),
        ('{"a_s": [1, 1, 1]}', "b_s"),
        ('{"a_s": [1, -1, 1], "b_s": [0, 0, 0]}', "a_s"),
        ('{"a_s": [1, 1, 1], "b_s": [0]}', "b_s"),
        ('{"a_s": [1, 1], "b_s": [0, 0, 0]}', "a_s = .*3 ranks"),
        ('{"a_s": [1, 1, 1], "b_s": [0, 0, 0], "speed": 1}', "speed"),
        ('{"a_s": [1, 1, 1], "b_s": [0, 0, 0], "delay_s": [2, 1]}', "delay_s"),
        ('{"a_s": [1, 1, 1], "b_s": [0, 0, 0], "serial": -1}', "serial"),
        ('{"a_s": [1, 1, 1], "b_s": [0, 0, 0], "cost": {"kappa": -1}}', "kappa"),
        (
            '{"a_s": [1, 1, 1], "b_s": [0, 0, 0], "slowdowns": [{"ranks": [3], "factor": 2}]}',
            r"slowdowns\[0\].ranks",
        ),
        (
            '{"a_s": [1, 1, 1], "b_s": [0, 0, 0], "slowdowns": [{"ranks": [0], "factor": 0}]}',
            r"slowdowns\[0\].factor",
        ),
        (
            '{"a_s": [1, 1, 1], "b_s": [0, 0, 0], '
            '"slowdowns": [{"ranks": [0], "factor": 2, "chance": 2}]}',
            r"slowdowns\[0\].chance",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Emulation.parse(text, WORLD)
