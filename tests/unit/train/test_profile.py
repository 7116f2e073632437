"""The profiling phase: what it measures, where memory ends, and what the control plane hears."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.core.errors import PacelineError
from paceline.core.terms import Terms
from paceline.core.trials import most_samples
from paceline.planning.policy_in_force import PolicyInForce
from paceline.train.device import Device
from paceline.train.environment import Environment
from paceline.train.plan_shard import LocalStep
from paceline.train.profile import (
    FreeMemory,
    Profile,
    limits_of,
    listed_limits,
    measure,
    measure_with,
    shared_typical,
)
from support.contexts import run_context


def done() -> None:
    """A device that does nothing beside the host: nothing to wait for."""


def at_once(samples: int, began: float) -> None:
    """A real device: nothing to wait for."""


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (2, [2]), (3, [2, 3]), (8, [2, 4, 8]), (20, [2, 4, 8, 16, 20])],
)
def test_batches_double_up_to_the_most(most: int, sizes: list[int]) -> None:
    seen: list[int] = []
    profile = measure(seen.append, most, done, at_once)
    assert [samples for samples, _ in profile.times] == sizes
    assert seen == [sizes[0]] + [n for n in sizes for _ in range(3)]  # one to warm up
    assert profile.limit is None


def test_the_median_of_three_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One disturbed timing of each size does not."""
    held: list[int] = []
    now = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr("paceline.train.profile.time", clock)

    def hold(samples: int, began: float) -> None:
        nonlocal now
        held.append(samples)
        disturbed = len(held) % 3 == 2
        now += 100.0 if disturbed else samples

    profile = measure(lambda samples: None, 16, done, hold)
    assert profile.times == [(2, 2.0), (4, 4.0), (8, 8.0), (16, 16.0)]


def gigantic(samples: int) -> None:
    torch.empty(2**58, dtype=torch.uint8)


def lists(samples: int) -> None:
    raise MemoryError


def accelerator(samples: int) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def saying(words: str) -> Callable[[int], None]:
    def fail(samples: int) -> None:
        raise RuntimeError(words)

    return fail


@pytest.mark.parametrize(
    "allocate",
    [
        gigantic,
        lists,
        accelerator,
        saying("CUDA error: out of memory"),
        saying("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        saying("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        saying("MPS backend out of memory (MPS allocated: 9.1 GB, max allowed: 9.1 GB)"),
    ],
)
def test_memory_ends_it(allocate: object) -> None:
    """PyTorch's CPU allocator, Python's own, an accelerator's and its libraries'."""

    def run_batch(samples: int) -> None:
        if samples > 8:
            assert callable(allocate)
            allocate(samples)

    profile = measure(run_batch, 64, done, at_once)
    assert profile.limit == 8
    assert [samples for samples, _ in profile.times] == [2, 4, 8]
    with pytest.raises(PacelineError, match="at the first batch, of 2 samples"):
        measure(gigantic, 64, done, at_once)


def test_another_error_is_the_user_s() -> None:
    def run_batch(samples: int) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="shapes"):
        measure(run_batch, 64, done, at_once)


def test_limits() -> None:
    met, unmet = Profile([(2, 0.1)], limit=8), Profile([(2, 0.1)])
    assert limits_of([], [], 20, 2).samples == []
    assert limits_of([], [unmet, unmet], 20, 2).samples == []
    assert limits_of([], [met, unmet], 20, 2).samples == [8, 20]
    assert limits_of([30, 5], [met, unmet], 10, 2).samples == [8, 5]
    assert limits_of([16], [], 20, 2).samples == [16, 16]
    with pytest.raises(PacelineError, match=r"\[8, 8\] samples fit .* global batch of 20"):
        limits_of([], [met, met], 20, 2)
    with pytest.raises(ValueError, match="each of 3 ranks"):
        limits_of([1, 2], [], 20, 3)


@pytest.mark.parametrize(
    ("limits", "listed"),
    [
        (None, []),
        (3, [3]),
        (np.int64(3), [3]),
        ((3, np.int32(4)), [3, 4]),
        (np.array([3, 4]), [3, 4]),
        (torch.tensor([3, 4]), [3, 4]),
    ],
)
def test_limits_may_come_in_any_form(limits: object, listed: list[int]) -> None:
    assert listed_limits(limits) == listed
    assert all(type(limit) is int for limit in listed_limits(limits))


@pytest.mark.parametrize("limits", [-1, 3.5, [3, 4.5], np.array([1.5]), True, "12", [[1, 2], [3]]])
def test_what_is_no_limit_is_refused_by_name(limits: object) -> None:
    with pytest.raises((TypeError, ValueError), match="limits is "):
        listed_limits(limits)


@pytest.mark.parametrize(
    ("model", "waited_for"),
    [("cuda:1", torch.device("cuda:1")), ("cpu", None)],  # None: the current device
)
def test_timings_wait_for_the_model_s_device(
    monkeypatch: pytest.MonkeyPatch, model: str, waited_for: torch.device | None
) -> None:
    """It need not be the process's current one."""
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    device = Device(None, 0, 1)
    device.use(torch.device(model))
    measure(lambda samples: None, 2, device.finish, at_once)
    assert waited == [waited_for] * 8  # around each of four batches


def step(threads: int, samples: int = 4) -> LocalStep:
    return LocalStep(0, 3, 0, list(range(samples)), 40.0, 400.0, 10.0, 1.0, None, threads)


@pytest.fixture
def own_threads() -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield 1
    torch.set_num_threads(before)


def test_threads_are_the_plan_s_and_then_the_script_s_again(own_threads: int) -> None:
    device = Device(None, 0, 1)
    seen = []
    for wanted in (0, 2, 3, 0, 0, 2):
        assert device.begin(step(wanted)) is None
        seen.append(torch.get_num_threads())
    assert seen == [own_threads, 2, 3, own_threads, own_threads, 2]


def test_threads_of_an_emulated_device_shorten_its_time_alone(own_threads: int) -> None:
    device = Device('{"a_s": [0.1], "b_s": [1], "serial": 0.5}', 0, 1)
    assert device.begin(step(threads=0)) == pytest.approx(5.0)
    assert device.begin(step(threads=4)) == pytest.approx(0.1 * 40 * 0.625 + 1)
    assert device.begin(step(threads=4, samples=0)) is None
    assert torch.get_num_threads() == own_threads


def test_each_timing_has_its_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("paceline.train.device.time.sleep", slept.append)
    hold = Device('{"a_s": [100], "b_s": [0], "noise": 0.2}', 0, 1).trial(5, (1.0, 1.0))
    for _ in range(3):
        hold(10, time.perf_counter())
    assert len({round(seconds) for seconds in slept}) == 3


def test_typical_samples_are_the_quantiles_of_the_sizes() -> None:
    store = torch.distributed.HashStore()
    sizes = np.array([5.0, 1.0, 4.0, 2.0, 3.0, 6.0])
    assert shared_typical(store, sizes, 3) == [3, 2, 5]
    assert shared_typical(store, None, 3) == [3, 2, 5]


LBB, OTHER = PolicyInForce("lbb"), PolicyInForce("bsp")


@pytest.mark.parametrize(
    ("environment", "policy", "profiles"),
    [
        (Environment(), LBB, True),
        (Environment(), PolicyInForce("lbb", {"profile": "off"}), False),
        (Environment(), OTHER, False),
        (Environment(run="r", bus="b", first_policy=LBB), OTHER, True),
        # A later attempt, before which the policy may have been switched.
        (Environment(run="r", bus="b"), LBB, False),
        (Environment(run="r"), LBB, True),  # rank 0 plans
    ],
)
def test_which_runs_begin_with_a_profile(
    environment: Environment, policy: PolicyInForce, profiles: bool
) -> None:
    context = run_context(Terms(8, 4, 0, False, "samples", 2), environment, policy=policy)
    first = context.first_policy
    assert (first is not None and first.profiles) is profiles


def test_a_profile_by_default_ends_at_twice_an_equal_share() -> None:
    assert most_samples(30, 4, None) == 16
    assert most_samples(30, 1, None) == 30
    assert [most_samples(30, 4, limit) for limit in (30, 9, 0)] == [16, 9, 0]


class Clock:
    """A device whose passes take a second for each sample, and which may read and warm up."""

    def __init__(self, patch: pytest.MonkeyPatch, reading_s: float, warmup_s: float) -> None:
        self.now, self.warmup_s, self.reading_s = 0.0, warmup_s, reading_s
        self.seen: list[int] = []
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        patch.setattr("paceline.train.profile.time", clock)

    def time_batch(self, samples: int) -> float:
        if samples not in self.seen:
            self.now += self.reading_s * samples
        self.seen.append(samples)
        took_s, self.warmup_s = samples + self.warmup_s, 0.0
        self.now += took_s
        return took_s


@pytest.mark.parametrize(
    ("reading_s", "warmup_s", "sizes", "ended_s"),
    [
        (0.0, 0.0, [2, 4, 8, 16], 92),  # 32 would end after 188 s
        (3.0, 0.0, [2, 4, 8], 86),  # 16 would end after 182 s
        (0.0, 40.0, [2, 4, 8], 84),
        (0.0, 200.0, [], 202),  # as soon as the first pass is over
        (200.0, 0.0, [], 402),
    ],
)
def test_a_profile_ends_in_time(
    monkeypatch: pytest.MonkeyPatch,
    reading_s: float,
    warmup_s: float,
    sizes: list[int],
    ended_s: float,
) -> None:
    clock = Clock(monkeypatch, reading_s, warmup_s)
    profile = measure_with(clock.time_batch, 64, most_s=100)
    assert [samples for samples, _ in profile.times] == sizes
    assert profile.limit is None
    assert clock.now == ended_s


@pytest.mark.parametrize(("fits", "limit", "sizes"), [(13, 12, [8, 12]), (11, 8, [8])])
def test_where_memory_runs_out_an_equal_share_is_tried(
    fits: int, limit: int, sizes: list[int]
) -> None:
    def time_batch(samples: int) -> float:
        if samples > fits:
            raise MemoryError
        return 1.0

    profile = measure_with(time_batch, 24, share=12)
    assert profile.limit == limit
    assert [samples for samples, _ in profile.times] == [2, 4, *sizes]


def test_a_size_that_may_need_more_than_the_free_memory_is_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 100 bytes two ranks have 50 each; a sample takes 3 bytes."""
    peak = 40
    monkeypatch.setattr("paceline.train.profile._peak_bytes", lambda: peak)
    monkeypatch.setattr(
        "paceline.train.profile.psutil",
        SimpleNamespace(
            virtual_memory=lambda: SimpleNamespace(available=100),
            Process=lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=30)),
        ),
    )
    memory = FreeMemory(2)

    def time_batch(samples: int) -> float:
        nonlocal peak
        peak = max(peak, 30 + 3 * samples)
        return 1.0

    profile = measure_with(time_batch, 64, has_room=memory.has_room)
    assert [samples for samples, _ in profile.times] == [2, 4, 8, 16]
    assert (peak, memory.is_short, profile.limit) == (78, True, None)
