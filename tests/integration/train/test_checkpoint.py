"""`Session.checkpoint`: when checkpoints are saved, and that training goes on as from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.wire.synchronisation import Synchronisation, convert
from support import checkpoints
from support.checkpoints import Log
from support.ranks import Ranks
from support.sessions import Numbered, network

pytestmark = pytest.mark.ranks
WORLD = 2
PARTIAL = convert("partial", {"probes": 1, "staleness": 4, "mean": True})
AVERAGING = convert("averaging", {"every": 3})


def saved(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in directory.iterdir())


@pytest.mark.parametrize(
    ("chain", "steps"),
    [
        # Steps 0 to 3 are all-reduced; an epoch has 9 steps, and its last segment one.
        ([PARTIAL], [2, 4, 8, 13, 17]),
        ([AVERAGING], [2, 4, 9, 18]),
    ],
    ids=["partial", "averaging"],
)
def test_a_relaxed_policy_saves_where_ranks_have_met(
    ranks: Ranks, tmp_path: Path, chain: list[Synchronisation], steps: list[int]
) -> None:
    """Two steps apart, or as soon after that as replicas are equal."""
    directory = str(tmp_path / "checkpoints")
    logs = ranks.run(checkpoints.train, directory, 2, {"every_steps": 2, "keep": 99}, chain, 1, 36)
    assert logs[0].saved == logs[1].saved == steps
    assert saved(tmp_path / "checkpoints") == steps
    for step in steps:
        first, second = (log.after[step - 1] for log in logs)
        assert torch.equal(first, second)
    again = ranks.run(checkpoints.train, directory, 3, {"every_steps": 2}, chain, 1, 36)
    for log in again:
        assert torch.equal(log.began, logs[0].after[steps[-1] - 1])
        assert log.steps == list(range(steps[-1], 27))


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_outer_optimiser_goes_on_over_epochs_and_from_a_checkpoint(
    ranks: Ranks, tmp_path: Path, overlap: int
) -> None:
    """Its steps are those of torch's SGD with Nesterov momentum, on what the means have changed.

    An epoch has nine steps and ends between two outer steps. After the first of three epochs
    training goes on from a checkpoint.
    """
    rate, momentum = 0.7, 0.9
    rules = {"every": 4, "outer": {"rate": rate, "momentum": momentum}, "parts": 2}
    what = convert("averaging", rules | ({"overlap": 1, "keep": 0.5} if overlap else {}))
    steps: list[checkpoints.OuterStep] = []
    begins: list[torch.Tensor] = []
    for epochs in (1, 3):
        given = str(tmp_path), epochs, {"every_steps": 2}, [what], 1, 36, what
        logs: list[Log] = ranks.run(checkpoints.train, *given)
        for mine, others in zip(logs[0].outer, logs[1].outer, strict=True):
            assert torch.equal(mine.becomes, others.becomes)
        steps += logs[0].outer
        begins += [logs[0].after[0]] if epochs == 1 else []  # step 0 is all-reduced
    # Step 9 is all-reduced: a script's first step, after a restart, too.
    due = [(step, 0 if step % 4 == 3 else 1) for step in range(1, 27, 2) if step != 9]
    # A mean on its way comes into force a step later, but where the second epoch ends at once.
    due = [(step + (overlap if step != 17 else 0), part) for step, part in due]
    assert [(each.step, each.part) for each in steps] == due
    lengths = [len(next(each.mean for each in steps if each.part == part)) for part in (0, 1)]
    assert sum(lengths) == len(begins[0])
    for part, begin in enumerate(begins[0].split(lengths)):
        anchor = torch.nn.Parameter(begin.clone())
        reference = torch.optim.SGD([anchor], rate, momentum=momentum, nesterov=True)
        for each in steps:
            if each.part == part:
                anchor.grad = anchor.detach() - each.mean
                reference.step()
                torch.testing.assert_close(each.becomes, anchor.detach())


def test_ranks_agree_on_checkpoints_by_time(ranks: Ranks, tmp_path: Path) -> None:
    """At the end of each segment, as each lasts longer than that; segments have four steps."""
    logs: list[Log] = ranks.run(checkpoints.train, str(tmp_path), 1, {"every_s": 1e-9, "keep": 9})
    assert logs[0].saved == logs[1].saved == saved(tmp_path) == [4, 6]
    more = {"every_s": 1e9}
    later: list[Log] = ranks.run(checkpoints.train, str(tmp_path), 3, more)
    assert later[0].saved == later[1].saved == []


def test_gradients_that_accumulate_are_not_lost(ranks: Ranks, tmp_path: Path) -> None:
    """The optimiser steps in every third step: checkpoints are due every second one."""
    options = {"every_steps": 2, "keep": 9}
    logs: list[Log] = ranks.run(checkpoints.train, str(tmp_path), 2, options, None, 3)
    assert logs[0].saved == logs[1].saved == [3, 6, 9, 12]


def test_another_number_of_ranks_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    """A single process, without a process group, goes on in the middle of an epoch, and back."""
    options = {"every_steps": 4}
    before: list[Log] = ranks.run(checkpoints.train, str(tmp_path), 1, options)
    assert saved(tmp_path) == [4]
    alone = checkpoints.train(str(tmp_path), 2, options)
    assert torch.equal(alone.began, before[0].after[3])
    assert alone.momentum.numel()
    assert alone.steps == list(range(4, 12))
    assert sorted(alone.used[8:]) == list(range(24))
    assert saved(tmp_path) == [8, 12]
    after: list[Log] = ranks.run(checkpoints.train, str(tmp_path), 3, options)
    for log in after:
        assert torch.equal(log.began, alone.after[11])
        assert log.steps == list(range(12, 18))


def test_training_goes_on_where_a_checkpoint_cannot_be_saved(ranks: Ranks, tmp_path: Path) -> None:
    (steps, words), (_, others) = ranks.run(checkpoints.full_disk, str(tmp_path))
    assert steps == list(range(6))
    assert saved(tmp_path) == [2, 6]
    assert words == [
        "no checkpoint was saved at step 4: rank 1: OSError: [Errno 28] No space left on device; "
        "a restart begins at step 2"
    ]
    assert others == []


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ({"every_steps": 5}, "ValueError: session.checkpoint was called with {'directory'"),
        ({"every_steps": 4, "keep": 1}, "'keep': 1"),
    ],
)
def test_ranks_with_different_arguments_are_refused(
    ranks: Ranks, tmp_path: Path, second: dict[str, Any], says: str
) -> None:
    ours = {0: {"every_steps": 4}, 1: second}
    for answer in ranks.run(checkpoints.refused, str(tmp_path), ours):
        assert says in answer
        assert answer.endswith("on rank 0: give every rank the same values")


def test_every_rank_says_that_the_directory_cannot_be_used(ranks: Ranks, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    ours = {rank: {"every_steps": 4} for rank in range(WORLD)}
    for answer in ranks.run(checkpoints.refused, str(file), ours):
        assert answer.startswith(f"PacelineError: checkpoint directory {file}: ")


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    checkpoints.train(str(tmp_path), 1, {"every_steps": 4})
    with pytest.raises(ValueError, match="is of a data set of 24 samples, this one has 28"):
        checkpoints.train(str(tmp_path), 1, {"every_steps": 4}, count=28)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    checkpoints.train(str(tmp_path), 1, {"every_steps": 4})
    (data,) = (tmp_path / "step-000000004").glob("*.distcp")
    data.write_bytes(b"")
    with pytest.raises(paceline.PacelineError, match=r"step-000000004 cannot be read"):
        checkpoints.train(str(tmp_path), 1, {"every_steps": 4})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "give every_steps or every_s"),
        ({"every_steps": 0}, "every_steps is 0"),
        ({"every_steps": 1.5}, "every_steps is 1.5"),
        ({"every_s": 0}, "every_s is 0"),
        ({"every_s": float("nan")}, "every_s is nan"),
        ({"every_s": 1, "keep": 0}, "keep is 0"),
        ({"every_s": 1, "scheduler": 3}, "scheduler is a int"),
        ({"every_s": 1, "model": None}, "model is a NoneType"),
    ],
)
def test_bad_arguments_are_named(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    model = network()
    session = paceline.Session(Numbered(8), global_batch=4)
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)} | options
    with pytest.raises((TypeError, ValueError), match=says):
        session.checkpoint(tmp_path, **given)
    session.close()


def test_checkpoints_are_declared_once_and_before_training(tmp_path: Path) -> None:
    model = network()
    session = paceline.Session(Numbered(8), global_batch=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session.checkpoint(tmp_path, model, optimizer, every_steps=1)
    with pytest.raises(paceline.PacelineError, match="call it only once"):
        session.checkpoint(tmp_path, model, optimizer, every_steps=1)
    next(iter(session.loader()))
    with pytest.raises(paceline.PacelineError, match="before the loader's first iteration"):
        session.checkpoint(tmp_path, model, optimizer, every_steps=1)
    session.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_that_cannot_be_taken_leaves_training_running(
    ranks: Ranks, tmp_path: Path, rank: int
) -> None:
    """No rank waits for the failed one, and the next checkpoint is saved."""
    answers = ranks.run(checkpoints.failing_state, str(tmp_path), rank)
    assert [steps for steps, _ in answers] == [list(range(6))] * WORLD
    assert saved(tmp_path) == [4, 6]
    (words,) = answers[rank][1]
    assert "no checkpoint was saved at step 2: state_dict() failed with KeyError" in words
    assert bool(answers[0][1]), "rank 0 says so, too"


def test_an_optimiser_with_a_part_of_its_state_on_each_rank_is_refused(
    ranks: Ranks, tmp_path: Path
) -> None:
    for words in ranks.run(checkpoints.refused_optimiser, str(tmp_path)):
        assert "optimizer is a ZeroRedundancyOptimizer" in words
        assert "fully_shard" in words and "consolidate_state_dict" in words
