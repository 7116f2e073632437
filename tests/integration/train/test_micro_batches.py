"""A part of a step that does not fit into memory is computed in several micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch

import paceline
from paceline.wire import ALLREDUCE
from paceline.wire.synchronisation import convert
from support import micro
from support.marks import some_long
from support.micro import Script, Trained
from support.ranks import RankError, Ranks
from support.sessions import Sized, network

pytestmark = pytest.mark.ranks
WORLD = 3

LIMITS = [2, 5, 12]  # of ranks whose parts have 8 samples each: 4, 2 and 1 micro-batches
OPTIONS = {"global_batch": 24, "limits": LIMITS}
SCRIPTS = {
    "momentum": Script(),
    "adamw, zeroes after": Script("adamw", zeroes_after=True),
    "clips": Script(clips=True),
    "clips, zeroes after": Script(clips=True, zeroes_after=True),
    "schedule": Script(schedule="step"),
    "schedule with an argument": Script(schedule="plateau"),
    "scaler": Script("adamw", scales=True),
    "scaler, zeroes after, clips": Script(scales=True, zeroes_after=True, clips=True),
    "scaler that overflows": Script(scales=True, overflows=True),
    "by size": Script(by_size=True),
    "loaded ahead": Script(loading={"num_workers": 1}),
}


def options(script: Script) -> dict[str, Any]:
    return OPTIONS | {"loss_mean": "size" if script.by_size else "samples"}


def same(trained: Trained, expected: Trained) -> None:
    torch.testing.assert_close(trained.parameters, expected.parameters, rtol=0, atol=1e-5)
    assert trained.rate == pytest.approx(expected.rate)


@pytest.mark.parametrize("name", SCRIPTS)
def test_training_is_that_of_one_process(ranks: Ranks, name: str) -> None:
    script = SCRIPTS[name]
    expected = micro.in_one_process(84, 3, 24, script)
    assert (expected.parameters - micro.parameters(network())).abs().max() > 0.05
    for trained in ranks.run(micro.train, 84, 3, options(script), script):
        same(trained, expected)


@pytest.mark.parametrize("name", some_long(SCRIPTS, 3))
def test_training_of_a_single_process_is_that_of_plain_torch(name: str) -> None:
    script = SCRIPTS[name]
    trained = micro.train(84, 3, options(script) | {"limits": 5}, script)
    same(trained, micro.in_one_process(84, 3, 24, script))


def test_turns_cover_each_step_and_stay_within_the_limits(ranks: Ranks) -> None:
    logs = ranks.run(micro.train, 84, 1, OPTIONS, Script())
    for rank, (log, limit) in enumerate(zip(logs, LIMITS, strict=True)):
        assert max(samples for _, samples, _, _ in log.turns) <= limit, rank
        steps = [step for step, _, last, _ in log.turns if last]
        assert steps == [0, 1, 2, 3]
    assert [samples for step, samples, _, _ in logs[0].turns if step == 0] == [2, 2, 2, 2]
    assert [samples for step, samples, _, _ in logs[1].turns if step == 0] == [4, 4]
    for step in range(4):
        weights = [turn[3] for log in logs for turn in log.turns if turn[0] == step]
        assert sum(weights) == pytest.approx(1.0)
    assert sorted(chain(*(chain(*log.samples) for log in logs))) == list(range(84))


def test_micro_batches_have_samples_of_similar_sizes(ranks: Ranks) -> None:
    log = ranks.run(micro.train, 72, 1, OPTIONS, Script())[0]
    sizes = [[1 + index % 3 for index in samples] for samples in log.samples[:4]]
    assert list(chain(*sizes)) == sorted(chain(*sizes))


def test_limits_do_not_bound_the_global_batch(ranks: Ranks) -> None:
    script = Script()
    small = OPTIONS | {"limits": 3}  # 3 ranks together hold 9 of 24
    for trained in ranks.run(micro.train, 72, 1, small, script):
        same(trained, micro.in_one_process(72, 1, 24, script))
    with pytest.raises(paceline.PacelineError, match="micro_batches=True"):
        paceline.Session(Sized(72), global_batch=24, limits=3)


@pytest.mark.parametrize("kind", ["partial", "averaging"])
def test_relaxed_synchronisers_take_the_gradients_of_whole_parts(ranks: Ranks, kind: str) -> None:
    """As without micro-batches, where all ranks take part in each round."""
    how = {"probes": 3, "staleness": 0, "mean": True} if kind == "partial" else {"every": 2}
    chained = [ALLREDUCE, convert(kind, how)]
    cut = ranks.run(micro.train, 96, 2, OPTIONS, Script(), chained)
    whole = ranks.run(micro.train, 96, 2, OPTIONS | {"limits": 24}, Script(), chained)
    assert any(not last for _, _, last, _ in cut[0].turns)
    for mine, other in zip(cut, whole, strict=True):
        same(mine, other)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (micro.closure, "closure"),
        (micro.saves, "session.batch.last"),
        (micro.accumulates, "no_sync"),
        (micro.steps_first, "session.batch.last"),
        (micro.adversary, "after its optimiser"),
        (micro.trains_another, "parameters of no wrapped model"),
    ],
)
def test_what_would_train_wrongly_is_refused(body: Callable[..., None], says: str) -> None:
    refusal = micro.refused(96, {"global_batch": 24, "limits": 5}, body)
    if body is micro.accumulates:  # in a single process there is nothing to be refused
        assert refusal == ""
        return
    assert says in refusal


def test_schedules_that_are_made_later_follow_steps(ranks: Ranks) -> None:
    for rates in ranks.run(micro.late_schedule, 96, OPTIONS):
        assert rates == [1.0, 0.5, 0.25, 0.125]


def test_a_profiling_phase_of_a_wrapped_model(ranks: Ranks) -> None:
    assert ranks.run(micro.profiled, 48, OPTIONS) == [3] * 3


def test_leaving_the_loop_in_the_middle_of_a_step_is_refused() -> None:
    assert "before its last micro-batch" in micro.leaves(48, {"global_batch": 24, "limits": 5})


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="uneven_steps and micro_batches"):
        paceline.Session(Sized(8), global_batch=4, uneven_steps=True, micro_batches=True)
    with pytest.raises(TypeError, match="micro_batches=1"):
        paceline.Session(Sized(8), global_batch=4, micro_batches=1)
    with pytest.raises(ValueError, match=r"limits is \[0\]"):
        paceline.Session(Sized(8), global_batch=4, limits=0, micro_batches=True)
    session = paceline.Session(Sized(8), global_batch=4, limits=2, micro_batches=True)
    for name in ("static_graph", "find_unused_parameters"):
        with pytest.raises(ValueError, match=name):
            session.wrap(network(), **{name: True})
    session.close()


# Refusals of which the ranks die: the last ones, as each pool of ranks takes long to start


def test_accumulating_by_hand_is_refused(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"no_sync\(\) and Session"):
        ranks.run(micro.expect, 48, OPTIONS, micro.accumulates)


def test_collectives_that_not_all_ranks_come_to_are_refused(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="before its last micro-batch"):
        ranks.run(micro.expect, 48, OPTIONS, micro.waits)
