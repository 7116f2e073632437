"""`paceline.torchft.Batches` with managers that do what torchft's do, without processes."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import PacelineError
from paceline.torchft import Batch, Batches
from paceline.train.epochs import epoch_order


class Quorum:
    """The groups of a step, and their all-reduce."""

    def __init__(self, number: int, groups: int, *, fails: bool = False) -> None:
        self.number = number
        self.groups = groups
        self.fails = fails
        self._tensors: list[torch.Tensor] = []
        self._barrier = Barrier(groups, timeout=60)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._tensors.append(tensor.clone())
        self._barrier.wait()
        tensor.copy_(torch.stack(self._tensors).sum(0))


class Manager:
    """What `Batches` uses of a `torchft.Manager` with a synchronous quorum."""

    def __init__(self, *, use_async_quorum: bool = False, ranks: int = 1) -> None:
        self._use_async_quorum = use_async_quorum
        self._group_world_size = ranks
        self._quorum_future: object = None
        self._quorum_id = -1
        self._step = 0

    def start_quorum(self, quorum: Quorum, rank: int | None, step: int) -> None:
        self._quorum, self._rank, self._step = quorum, rank, step
        self._quorum_future, self._quorum_id = object(), quorum.number

    def current_step(self) -> int:
        return self._step

    def num_participants(self) -> int:
        return self._quorum.groups

    def participating_rank(self) -> int | None:
        return self._rank

    def errored(self) -> bool:
        return self._quorum.fails

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: Any) -> Manager:
        assert reduce_op == torch.distributed.ReduceOp.SUM
        if not self._quorum.fails:
            self._quorum.all_reduce(tensor)
        return self

    def wait(self) -> bool:
        return not self._quorum.fails


def batches(**options: Any) -> Batches:
    manager: Any = Manager()
    return Batches(manager, **{"samples": 20, "global_batch": 6, **options})


def step_of(made: list[Batches], step: int, number: int = 0, *, fails: bool = False) -> list[Batch]:
    quorum = Quorum(number, len(made), fails=fails)
    for rank, each in enumerate(made):
        manager: Any = each._manager
        manager.start_quorum(quorum, rank, step)
    with ThreadPoolExecutor(len(made)) as threads:
        return list(threads.map(Batches.next, made))


@settings(deadline=None)
@given(
    turns=st.lists(st.tuples(st.integers(1, 4), st.sampled_from("CCCFR")), min_size=1, max_size=12),
    sizes=st.lists(st.integers(1, 9), min_size=20, max_size=20),
    by_size=st.booleans(),
)
def test_each_committed_sample_once_whatever_groups_there_are(
    turns: list[tuple[int, str]], sizes: list[int], by_size: bool
) -> None:
    # C: the step is committed; R: not, after a whole step; F: not, because the exchange fails.
    mean = "size" if by_size else "samples"
    members = [batches(sizes=sizes, loss_mean=mean, seed=5) for _ in range(4)]
    used: Counter[tuple[int, int]] = Counter()
    step = 0
    for number, (groups, outcome) in enumerate(turns):
        parts = step_of(members[:groups], step, number, fails=outcome == "F")
        if outcome == "F":
            assert [part.weight for part in parts] == [0.0] * groups
            continue
        epoch, first = divmod(step, 4)
        wanted = epoch_order(20, 5, epoch)[6 * first :][:6]
        trained = np.concatenate([part.indices for part in parts if part.weight])
        assert sorted(trained) == sorted(wanted)
        assert all(len(part.indices) for part in parts)
        whole = sum(sizes[i] for i in wanted) if by_size else len(wanted)
        for part in parts:
            own = sum(sizes[i] for i in part.indices) if by_size else len(part.indices)
            assert part.weight in (0.0, pytest.approx(groups * own / whole))
            part.weigh(torch.ones(()))
        if outcome == "C":
            used.update((epoch, int(index)) for index in trained)
            step += 1
    assert set(used.values()) <= {1}
    assert sum(used.values()) == sum([6, 6, 6, 2][k % 4] for k in range(step))


def test_the_epoch_and_its_last_batch() -> None:
    made = batches(seed=1)
    assert made.steps_per_epoch == 4
    assert [len(made.global_batch(step)) for step in range(4)] == [6, 6, 6, 2]
    assert made.global_batch(4).tolist() == epoch_order(20, 1, 1)[:6].tolist()
    manager: Any = made._manager
    manager._step = 7
    assert made.epoch == 1
    assert batches(drop_last=True).steps_per_epoch == 3


def test_measured_times_make_a_slow_groups_part_smaller() -> None:
    made = [batches(samples=600, global_batch=60) for _ in range(2)]
    for each, seconds in zip(made, (0.01, 0.03), strict=True):
        each._seconds.append(seconds)
    assert [len(part.indices) for part in step_of(made, 0)] == [45, 15]
    new = batches(samples=600, global_batch=60)  # counts as the mean of the others until measured
    assert [len(part.indices) for part in step_of([*made, new], 0, 1)] == [33, 11, 16]


def test_the_time_until_the_loss_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    (made,) = members = [batches(sizes=[2] * 20)]
    now = iter([10.0, 11.5, 20.0])
    monkeypatch.setattr(made._clock, "stamp", lambda: next(now))
    (part,) = step_of(members, 0)
    loss = torch.tensor(3.0, requires_grad=True)
    assert part.weigh(loss).item() == 3.0
    step_of(members, 1)
    assert list(made._seconds) == [1.5 / 12]


def test_a_group_is_as_fast_as_its_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    # The loads are 6 and 3 on this group's two ranks.
    manager: Any = Manager(ranks=2)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    other = torch.tensor([[0.0, 0.0], [9.0, 3.0]], dtype=torch.float64)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.add_(other))
    group: Any = object()
    made = Batches(manager, samples=20, global_batch=9, group=group)
    monkeypatch.setattr(made._clock, "between", lambda *_: 2.0)
    made._given = Batch(0, np.arange(6), 1.0, made._clock, made._clock.stamp())
    made._given.weigh(torch.ones(()))
    made._measure()
    assert list(made._seconds) == [9.0 * 2 / (6 + 3)]


def test_a_committed_step_whose_loss_was_not_weighed_is_an_error() -> None:
    made = batches()
    (part,) = step_of([made], 0)
    (part,) = step_of([made], 0)  # the step was not committed
    part.weigh(torch.ones(()))
    step_of([made], 1)
    with pytest.raises(PacelineError, match=r"Batch\.weigh: step 1 was committed"):
        step_of([made], 2)


def test_a_group_that_is_no_participant_trains_a_filler() -> None:
    made = batches()
    manager: Any = made._manager
    manager.start_quorum(Quorum(0, 1), None, 0)
    part = made.next()
    assert part.weight == 0
    assert part.indices.tolist() == made.global_batch(0)[:1].tolist()


def test_different_plans_are_noticed_in_the_next_step() -> None:
    made = [batches(), batches(sizes=range(1, 21))]
    for part in step_of(made, 0):
        part.weigh(torch.ones(()))
    with pytest.raises(PacelineError, match="divided the last step in different ways"):
        step_of(made, 1)


def test_different_steps_are_noticed() -> None:
    made = [batches(), batches()]
    quorum = Quorum(0, 2)
    for rank, each in enumerate(made):
        manager: Any = each._manager
        manager.start_quorum(quorum, rank, 3 + rank)
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(each.next) for each in made]:
            with pytest.raises(PacelineError, match=r"workers are at the steps \[3, 4\]"):
                future.result()


def test_a_quorum_for_each_step() -> None:
    made = batches()
    with pytest.raises(PacelineError, match="no quorum has been started for this step"):
        made.next()
    step_of([made], 0)
    with pytest.raises(PacelineError, match="no quorum has been started for this step"):
        made.next()


def test_parts_within_limits() -> None:
    made = [batches(limits=4) for _ in range(2)]
    made[0]._seconds.append(1.0)
    made[1]._seconds.append(9.0)
    assert [len(part.indices) for part in step_of(made, 0)] == [4, 2]
    with pytest.raises(ValueError, match="limits: all ranks together hold 4 items, not 6"):
        step_of(made[:1], 0, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"global_batch": 21}, "global_batch=21: give 1 to 20"),
        ({"sizes": [1, 2]}, "sizes: give 20 numbers above 0"),
        ({"sizes": [0] * 20}, "sizes: give 20 numbers above 0"),
        ({"loss_mean": "tokens"}, 'loss_mean=\'tokens\': give "samples" or "size"'),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        batches(**options)


def test_managers_that_do_not_fit_are_refused() -> None:
    unfit: Any = Manager(use_async_quorum=True)
    with pytest.raises(PacelineError, match="use_async_quorum=False"):
        Batches(unfit, samples=20, global_batch=6)
    unfit = Manager()
    del unfit._quorum_id
    with pytest.raises(PacelineError, match="no _quorum_id: install torchft-nightly 2026"):
        Batches(unfit, samples=20, global_batch=6)
    unfit = Manager(ranks=2)
    with pytest.raises(PacelineError, match="group: this replica group has 2 ranks"):
        Batches(unfit, samples=20, global_batch=6)
