"""What ranks learn where their memory runs out, and what that makes of their limits."""

from __future__ import annotations

import contextlib
import json
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batch_limits.budget import Budget
from paceline.core.errors import PacelineError
from paceline.train.environment import Environment
from paceline.train.features import memory
from paceline.train.features.memory import Learned, Memory, learned_by, with_learned
from paceline.train.profile import Limits
from paceline.wire import RankDevice

LOADS = st.floats(1e-3, 1e9)


@given(LOADS, st.lists(LOADS))
def test_what_is_learned_is_less_than_what_ran_out_and_at_least_half(
    ran_out: float, held: list[float]
) -> None:
    learned = Learned.of(ran_out, max(held, default=0.0))
    assert ran_out / 2 <= learned.limit <= 0.9 * ran_out
    if any(ran_out / 2 <= load <= 0.9 * ran_out for load in held):
        assert learned.limit in (max(held), 0.9 * ran_out)


@given(st.floats(1.0, 100.0), st.lists(st.floats(0.1, 200.0), min_size=1, max_size=40))
def test_memory_runs_out_once_where_half_of_it_was_held(room: float, loads: list[float]) -> None:
    """A device with so much room; the run goes on each time, and keeps to what was learned."""
    limit, held, ran_out = np.inf, 0.0, []
    for planned in loads:
        load = min(planned, limit)
        if load <= room:
            held = max(held, load)
            continue
        ran_out.append((load, held))
        limit, held = Learned.of(load, held).limit, 0.0
    for (load, most), (later, _) in pairwise(ran_out):
        assert later < load
        assert most < load / 2  # else it would not have run out again


def out_of(memory: Memory, error: BaseException) -> None:
    """An error ends the loop and then the script."""
    with contextlib.suppress(type(error)):
        try:
            raise error
        finally:
            memory.close()


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), None]
)
def test_it_is_kept_for_later_attempts(
    tmp_path: Path, error: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    if error is None:  # a script that wraps it
        error = RuntimeError("step 7")
        error.__cause__ = MemoryError()
    path = tmp_path / "memory" / "1.json"
    memory = Memory(path, 3)
    assert memory.known is None
    memory.fitted(60.0)
    memory.left(80.0)
    out_of(memory, error)
    assert Memory(path, 0).known == Learned(60.0, 80.0, 60.0)
    assert "rank 3 ran out of memory with a batch of 80" in caplog.text
    assert "gets at most 60" in caplog.text
    assert path.stat().st_mode & 0o77 == 0


def test_it_is_learned_where_the_interpreter_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "last_value", MemoryError(), raising=False)
    memory = Memory(tmp_path / "0.json", 0)
    memory.left(80.0)
    memory.close()
    assert json.loads((tmp_path / "0.json").read_text())["limit"] == 40.0


@pytest.mark.parametrize(
    ("left", "error"),
    [(80.0, KeyError("x")), (None, MemoryError()), (0.0, MemoryError())],
    ids=["another error", "outside of the loop", "a filler"],
)
def test_nothing_is_learned_from_what_says_nothing(
    tmp_path: Path, left: float | None, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory(tmp_path / "0.json", 0)
    memory.left(80.0)
    memory.fitted(60.0)  # another loop, after the script has caught the first error
    if left is not None:
        memory.left(left)
    out_of(memory, error)
    assert not list(tmp_path.iterdir())
    assert not caplog.text


def test_outside_of_a_run_the_script_is_told_what_to_give(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = Memory(None, 2)
    memory.left(80.0)
    out_of(memory, MemoryError())
    assert "Give Session token_limits: 40 for this rank" in caplog.text


def test_a_damaged_file_is_left_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "0.json").write_text("{")
    assert Memory(tmp_path / "0.json", 0).known is None
    assert "cannot be read" in caplog.text


def test_each_place_of_a_node_has_its_file() -> None:
    variables = {"PACELINE_MEMORY": "/run/memory", "LOCAL_RANK": "3", "RANK": "11"}
    assert Environment.read(variables).memory == Path("/run/memory/3.json")
    assert Environment.read({"LOCAL_RANK": "3"}).memory is None


BUDGET = Budget(20.0, np.array([1.0, 4.0, 2.0]))


def test_learned_limits_are_the_least_and_others_stay_unbound() -> None:
    learned = [None, Learned(8.0, 10.0, 8.0)]
    assert with_learned(Limits([]), [None, None], BUDGET) == Limits([])
    assert with_learned(Limits([]), learned, BUDGET).tokens == [20.0, 8.0]
    assert with_learned(Limits([], tokens=[19.0, 7.0]), learned, BUDGET).tokens == [19.0, 7.0]
    assert with_learned(Limits([], tokens=[19.0, 9.0]), learned, BUDGET).tokens == [19.0, 8.0]


def test_a_step_that_fits_nowhere_any_more_is_refused() -> None:
    learned = [Learned(11.0, 12.0, 11.0), Learned(8.0, 10.0, 8.0)]
    with pytest.raises(
        PacelineError, match=r"\[0, 1\].*of up to 15 are sure to fit.*micro_batches"
    ):
        with_learned(Limits([]), learned, BUDGET)
    assert with_learned(Limits([], True), learned, BUDGET).tokens_of_micro_batches == [11.0, 8.0]
    assert with_learned(Limits([], True), learned, BUDGET).tokens_of_parts == []


def test_ranks_on_such_a_device_learn_with_micro_batches() -> None:
    devices = [RankDevice("cuda", name, 8, 80 << 30) for name in ("A", "B", "A")]
    learned = [None, None, Learned(8.0, 10.0, 8.0)]
    made = with_learned(Limits([], True), learned, BUDGET, devices)
    assert made.tokens == [8.0, 20.0, 8.0]
    assert with_learned(Limits([]), learned, BUDGET, devices).tokens == [20.0, 20.0, 8.0]


def test_a_micro_batch_holds_the_largest_sample() -> None:
    several, alone = Learned(3.0, 6.0, 0.0), Learned(3.0, 4.0, 3.0)
    assert with_learned(Limits([], True), [several, None], BUDGET).tokens == [4.0, 20.0]
    with pytest.raises(PacelineError, match=r"3 on rank 0, and the largest sample has size 4"):
        with_learned(Limits([], True), [alone, None], BUDGET)


def test_of_ranks_that_share_a_batch_the_least_memory_decides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks 0 and 1 are a group, and 2 and 3."""
    words = {0: Learned(9.0, 10.0, 9.0), 1: Learned(6.0, 8.0, 6.0)}
    monkeypatch.setattr(memory, "gathered", lambda world, _: [words.get(r) for r in range(world)])
    startup = SimpleNamespace(world=2, lanes=SimpleNamespace(ranks=[[0, 2], [1, 3]]))
    assert learned_by(cast(Any, startup), None) == [words[1], None]
