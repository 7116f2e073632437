"""The loop of a plain DDP script, with the session in place of sampler and DDP."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data.distributed import DistributedSampler

import paceline
from paceline.train.profile import Limits
from support import sessions
from support.ranks import Ranks
from support.sessions import Log, Numbered, Sized
from support.waiting import DEADLINE_S

pytestmark = pytest.mark.ranks
WORLD = 3


def by_step(logs: list[Log]) -> dict[tuple[int, int], list[list[int]]]:
    """(epoch, step) → samples of each rank."""
    steps: dict[tuple[int, int], list[list[int]]] = {}
    for log in logs:
        for epoch, step, indices in log.batches:
            steps.setdefault((epoch, step), []).append(indices)
    return steps


def used(logs: list[Log]) -> dict[int, list[int]]:
    """Epoch → all samples used in it, sorted."""
    epochs: dict[int, list[int]] = {}
    for (epoch, _), parts in by_step(logs).items():
        epochs.setdefault(epoch, []).extend(chain(*parts))
    return {epoch: sorted(samples) for epoch, samples in epochs.items()}


# Batches


def test_batches_and_weights_are_those_of_plain_ddp(ranks: Ranks) -> None:
    """N is a multiple of the global batch: then plain DDP pads nothing either."""
    ours = ranks.run(sessions.train, 36, 3, {"global_batch": 12, "seed": 7})
    plain = ranks.run(sessions.plain_ddp, 36, 3, 12, 7)
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.batches == theirs.batches
        torch.testing.assert_close(mine.parameters, theirs.parameters)


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_epoch_ends_with_a_smaller_batch_or_without_it(ranks: Ranks, drop_last: bool) -> None:
    options = {"global_batch": 6, "seed": 7, "drop_last": drop_last}
    logs = ranks.run(sessions.train, 20, 2, options)
    steps = by_step(logs)
    sizes = [sum(map(len, parts)) for parts in steps.values()]
    assert sizes == ([6, 6, 6] if drop_last else [6, 6, 6, 2]) * 2
    assert [step for _, step in steps] == list(range(len(sizes)))
    for samples in used(logs).values():
        assert len(set(samples)) == len(samples) == (18 if drop_last else 20)
    if not drop_last:  # the last step leaves one rank without samples
        assert sorted(map(len, steps[0, 3])) == [0, 1, 1]


def test_a_single_process_sees_the_sampler_s_order() -> None:
    data = Numbered(10)
    session = paceline.Session(data, global_batch=4, seed=3)
    loader = session.loader()
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, seed=3)
    assert len(loader) == 3
    for epoch in session.epochs(3):
        sampler.set_epoch(epoch)
        seen = [indices.tolist() for indices, _, _ in loader]
        assert list(chain(*seen)) == list(sampler)
        assert [len(batch) for batch in seen] == [4, 4, 2]
    session.close()


def test_every_iteration_is_the_next_epoch_and_leaving_one_drops_its_rest(ranks: Ranks) -> None:
    logs = ranks.run(sessions.loop_twice, 24, {"global_batch": 6}, 0)
    steps = by_step(logs)
    assert [epoch for epoch, _ in steps] == [0, 1, 1, 1, 1]
    assert used(logs)[1] == list(range(24))
    numbers = [step for _, step in steps]
    assert numbers == sorted(set(numbers)), "no step number is used twice"


@pytest.mark.parametrize("persistent", [False, True])
def test_data_loader_workers_change_nothing(ranks: Ranks, persistent: bool) -> None:
    loading = {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": persistent}
    options = {"global_batch": 5, "seed": 2}
    assert (
        [log.batches for log in ranks.run(sessions.train, 22, 2, options, loading)]
        == [log.batches for log in ranks.run(sessions.train, 22, 2, options)]
    )  # fmt: skip


def test_batch_tells_samples_load_and_weight(ranks: Ranks) -> None:
    options = {"global_batch": 5, "loss_mean": "size"}
    logs = ranks.run(sessions.train, 10, 1, options)
    sizes = Sized(10).sizes
    for log in logs:
        assert log.loads == [sum(sizes[i] for i in part) for _, _, part in log.batches]
    for k in range(2):
        total = sum(log.loads[k] for log in logs)
        assert [log.weights[k] for log in logs] == [log.loads[k] / total for log in logs]


# Gradients, end to end


def test_ranks_without_samples_change_nothing(ranks: Ranks) -> None:
    """Two samples a step for three ranks: the same training as in one process."""
    options = {"global_batch": 2, "seed": 1}
    alone = sessions.train(14, 2, options)
    for log in ranks.run(sessions.train, 14, 2, options):
        torch.testing.assert_close(log.parameters, alone.parameters)


def test_mixed_precision_with_a_scaler_is_that_of_one_process(ranks: Ranks) -> None:
    alone = sessions.mixed_precision(1024.0)
    for got in ranks.run(sessions.mixed_precision, 1024.0):
        torch.testing.assert_close(got, alone, rtol=2e-2, atol=2e-3)  # bfloat16 activations


@pytest.mark.parametrize("policy", ["bsp", "paceline"])
@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("discard", ["", "early", "late"])
def test_accumulation_is_that_of_one_process(
    ranks: Ranks, tmp_path: Path, discard: str, around: bool, policy: str
) -> None:
    """5 steps an epoch, the last one smaller, accumulated by 3: an epoch ends within.

    With a policy, the loss is checked first: the check must not enter contexts of the script.
    """
    options = {"global_batch": 4, "seed": 1}
    alone = sessions.accumulate(18, 3, options, discard, around)
    env = {"PACELINE_POLICY": policy, "PACELINE_DATA": str(tmp_path)}
    for got in ranks.run(sessions.accumulate, 18, 3, options, discard, around, env=env):
        torch.testing.assert_close(got, alone)


# Refusals


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (nn.BatchNorm1d(4), "batchnorm='sync'.* or accept the difference with .*batchnorm='local'"),
        (nn.Embedding(4, 4, sparse=True), "sparse=False"),
    ],
)
def test_layers_that_would_train_wrongly_are_refused(layer: nn.Module, says: str) -> None:
    session = paceline.Session(Numbered(4), global_batch=2)
    with pytest.raises(ValueError, match=says):
        session.wrap(nn.Sequential(nn.Linear(4, 4), layer))
    session.close()


MEND = "model = session.wrap(model) in place of DistributedDataParallel"


@pytest.mark.parametrize("around", ["ddp", "framework", "nothing"])
def test_a_model_that_was_not_wrapped_is_refused_in_the_first_step(
    ranks: Ranks, around: str
) -> None:
    """On each rank, and before anything is trained wrongly."""
    for message, step, untouched in ranks.run(sessions.unwrapped, around):
        assert "no model was given to session.wrap()" in message
        assert MEND in message
        assert (step, untouched) == (0, True)


def test_of_two_sessions_in_one_loop_either_may_wrap_the_model(ranks: Ranks) -> None:
    alone = sessions.zipped()
    for got in ranks.run(sessions.zipped):
        torch.testing.assert_close(got, alone)


@pytest.mark.parametrize("kind", ["nothing", "one optimiser"])
def test_a_second_model_that_trains_apart_is_told_of(ranks: Ranks, kind: str) -> None:
    """As a GAN's discriminator: once, by rank 0."""
    (warnings, first), *others = ranks.run(sessions.adversaries, kind)
    assert ["discriminator = session.wrap(discriminator)" in text for text in warnings] == [True]
    for said, parameters in others:
        assert not said
        assert not torch.equal(parameters, first)


@pytest.mark.parametrize("kind", ["session", "ddp", "script"])
def test_a_second_model_whose_gradients_are_reduced_is_not_told_of(ranks: Ranks, kind: str) -> None:
    (_, first), *_ = answers = ranks.run(sessions.adversaries, kind)
    for warnings, parameters in answers:
        assert not warnings
        assert torch.equal(parameters, first)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_wrapped_generator_and_discriminator_train_as_in_one_process(
    ranks: Ranks, sharded: bool
) -> None:
    """Adam in one process, or divided among the ranks by ZeroRedundancyOptimizer."""
    _, alone = sessions.gan(False)
    for warnings, trained in ranks.run(sessions.gan, sharded):
        assert not warnings
        torch.testing.assert_close(trained, alone)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("ddp", ["the model is already a DistributedDataParallel: give session.wrap the plain"]),
        ("part", ["1 is already a DistributedDataParallel"]),
        ("twice", ["the model is already a WeightedDDP: give session.wrap the plain model, once"]),
        (
            "dtensor",
            ["parameter 0.0.weight is a DTensor", "before parallelize_module or distribute_tensor"],
        ),
    ],
)
def test_models_that_something_else_has_wrapped_are_refused(
    ranks: Ranks, kind: str, says: list[str]
) -> None:
    for message in ranks.run(sessions.wrapped_elsewhere, kind):
        assert all(words in message for words in says)


def test_a_framework_that_replaces_samplers_is_refused() -> None:
    session = paceline.Session(Numbered(4), global_batch=2)
    loader = session.loader()
    with pytest.raises(paceline.PacelineError, match="Remove the call that prepares a DataLoader"):
        _ = loader.sampler
    assert getattr(loader, "sampler", None) is None, "scripts ask before sampler.set_epoch"
    session.close()


def test_a_wrapper_around_a_wrapped_model_is_refused(ranks: Ranks) -> None:
    for message in ranks.run(sessions.wrapped_again):
        assert "remove DistributedDataParallel, and any call that adds it" in message


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("twice", "the model is already a SingleProcess: give session.wrap the plain model, once"),
        ("fsdp1", "the model is a FullyShardedDataParallel, which reduces gradients before"),
        ("fsdp1", "leave FSDP out"),
    ],
)
def test_wrapped_models_are_refused_in_a_single_process_too(kind: str, says: str) -> None:
    assert says in sessions.wrapped_elsewhere(kind)


def test_a_learning_rate_schedule_counts_steps_per_epoch(ranks: Ranks) -> None:
    """Docs: OneCycleLR over `epochs * session.steps_per_epoch` ends where training ends."""
    assert ranks.run(sessions.one_cycle, 20, 2, 6) == [(4, 4, 8)] * 3
    assert sessions.one_cycle(20, 2, 6) == (4, 4, 8)


@pytest.mark.parametrize(
    "option", ["process_group", "device_mesh", "mixed_precision", "param_to_hook_all_reduce"]
)
def test_options_that_would_bypass_the_weights_are_refused(option: str) -> None:
    session = paceline.Session(Numbered(4), global_batch=2)
    with pytest.raises(ValueError, match=option):
        session.wrap(nn.Linear(4, 4), **{option: object()})
    session.close()


def test_another_hook_and_join_are_refused(ranks: Ranks) -> None:
    for hook, join in ranks.run(sessions.hook_and_join):
        assert "allows only one" in hook
        assert "leave join() out" in join


@pytest.mark.parametrize("option", ["batch_size", "shuffle", "sampler", "drop_last", "in_order"])
def test_loader_options_that_the_plan_decides_are_refused(option: str) -> None:
    session = paceline.Session(Numbered(4), global_batch=2)
    with pytest.raises(TypeError, match=option):
        session.loader(**{option: False})
    session.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"global_batch": 0}, "global_batch is 0"),
        ({"global_batch": 9}, "more than the data set's 8"),
        ({"global_batch": 2.0}, "global_batch is 2.0"),
        ({"global_batch": True}, "global_batch is True"),
        ({"global_batch": 2, "seed": -1}, "seed is -1"),
        ({"global_batch": 2, "seed": 2**63}, "it must be below"),
        ({"global_batch": 2, "loss_mean": "mean"}, "loss_mean is 'mean'"),
        ({"global_batch": 2, "coast_steps": 5}, "coast_steps is 5"),
        ({"global_batch": 2, "sizes": None}, "sizes is None"),
        ({"global_batch": 2, "sizes": [1.0] * 7}, "7 entries but the data set has 8"),
        ({"global_batch": 2, "sizes": [1.0] * 9}, "9 entries but the data set has 8"),
        ({"global_batch": 2, "sizes": [1.0] * 7 + [-2.0]}, r"sizes\[7\] is -2"),
        ({"global_batch": 2, "sizes": [0.0] + [1.0] * 7}, r"sizes\[0\] is 0"),
        ({"global_batch": 2, "sizes": [1.0] * 7 + [math.nan]}, r"sizes\[7\] is nan"),
        ({"global_batch": 2, "sizes": [1.0] * 7 + [math.inf]}, r"sizes\[7\] is inf"),
        ({"global_batch": 2, "sizes": [1.0] * 7 + [None]}, "sizes"),
        ({"global_batch": 2, "sizes": ["long"] * 8}, "not a number"),
        ({"global_batch": 2, "sizes": "long"}, "not a list of numbers"),
        ({"global_batch": 2, "sizes": np.ones((8, 2))}, r"shape \[8, 2\]"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        paceline.Session(Numbered(8), **options)


@pytest.mark.parametrize(("data", "error"), [([], ValueError), ((i for i in range(3)), TypeError)])
def test_data_without_a_length_is_refused(data: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="dataset"):
        paceline.Session(data, global_batch=1)


@pytest.mark.parametrize(
    "sizes",
    [
        [2, 1, 3, 4],
        (2.0, 1.0, 3.0, 4.0),
        np.array([2, 1, 3, 4], np.int32),
        torch.tensor([2, 1, 3, 4]),
        lambda sample: [2, 1, 3, 4][sample[0]],
    ],
)
def test_sizes_come_from_anywhere(sizes: Any) -> None:
    session = paceline.Session(Numbered(4), global_batch=4, sizes=sizes)
    for _ in session.loader():
        assert session.batch.load == 10
    assert session.filler == 1
    session.close()


def test_sizes_default_to_the_data_set_s_or_to_equal_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for data, load in [(Sized(4), 7.0), (Numbered(4), 4.0)]:
        session = paceline.Session(data, global_batch=4)
        for _ in session.loader():
            assert session.batch.load == load
        session.close()
    assert caplog.text.count("all samples count as equal") == 1


# Ranks that disagree


def test_what_differs_between_ranks_is_named(ranks: Ranks) -> None:
    first, *others = ranks.run(sessions.different_arguments, 12)
    for rank, text in enumerate(others, 1):
        assert text.startswith(f"global_batch is {4 + rank} on rank {rank} but 4 on rank 0")
    assert first == others[0]


def test_a_rank_that_cannot_reach_rank_0_is_named_on_every_rank(ranks: Ranks) -> None:
    for text in ranks.run(sessions.unreachable, 1):
        assert text.startswith("rank 1 cannot reach rank 0's store at 127.0.0.1:")


def test_sizes_that_fail_on_rank_0_fail_on_every_rank(ranks: Ranks) -> None:
    for text in ranks.run(sessions.bad_sizes, "negative"):
        assert text.startswith("ValueError: sizes[0] is -1 (8 of 8 are invalid)")
    first, *others = ranks.run(sessions.bad_sizes, "raises")
    assert first.startswith("KeyError")
    for text in others:
        assert text == "PacelineError: on rank 0: KeyError: 'no such recording'"


def test_an_epoch_begun_on_one_rank_only_is_an_error(ranks: Ranks) -> None:
    _, *others = ranks.run(sessions.peek_on_rank_0, 24, {"global_batch": 6})
    for rank, text in enumerate(others, 1):
        # Whichever is found first: by the plan, or by comparing what the ranks have published.
        behind = text.startswith(f"rank {rank} is in epoch 0 but the leader is in epoch 1")
        assert behind or text.startswith("rank 0 is out of step: it left its loop in step 0")


def test_lookahead_that_differs_between_ranks_is_an_error(ranks: Ranks) -> None:
    first, *others = ranks.run(sessions.uneven_workers, 12, {"global_batch": 6})
    assert first == ""
    assert all("num_workers" in text for text in others)


# Life and resuming


def test_nothing_is_in_hand_outside_the_loop() -> None:
    session = paceline.Session(Numbered(4), global_batch=2)
    with pytest.raises(paceline.PacelineError, match="loop over"):
        _ = session.batch
    with pytest.raises(paceline.PacelineError, match="loop over"):
        session.log(loss=1.0)
    loader = session.loader()
    with pytest.raises(paceline.PacelineError, match="loader already"):
        session.loader()
    session.close()
    session.close()
    with pytest.raises(paceline.PacelineError, match="closed"):
        next(iter(loader))


def test_a_forked_child_leaves_the_session_open() -> None:
    session = paceline.Session(Numbered(4), global_batch=2)

    def child() -> None:
        session.close()
        session.state_dict()  # refused when closed

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == 0
    session.close()


@pytest.mark.parametrize("save_at", [0, 2, 4, 7])
def test_a_resumed_epoch_uses_the_rest_exactly_once(ranks: Ranks, save_at: int) -> None:
    """23 samples in steps of 5: step 4 is the last of epoch 0, and a segment holds two steps."""
    options = {"global_batch": 5, "seed": 3}
    before = ranks.run(sessions.train, 23, 2, options, {}, None, save_at)
    assert before[0].state["step"] == save_at + 1
    after = ranks.run(sessions.train, 23, 2, options, {}, before[0].state, None)
    together = [Log(batches=a.batches + b.batches) for a, b in zip(before, after, strict=True)]
    assert [step for _, step in by_step(together)] == list(range(10))
    assert used(together) == {0: list(range(23)), 1: list(range(23))}
    assert after[0].epochs == ([0, 1] if save_at <= 4 else [1])


def test_a_checkpoint_may_be_resumed_by_another_number_of_ranks(ranks: Ranks) -> None:
    options = {"global_batch": 5, "seed": 3}
    before = ranks.run(sessions.train, 23, 1, options, {}, None, 1)
    after = sessions.train(23, 1, options, {}, before[0].state, None)
    assert sorted(used(before)[0] + used([after])[0]) == list(range(23))


def test_prefetched_steps_are_not_counted_as_used(ranks: Ranks) -> None:
    options = {"global_batch": 3, "seed": 3}
    loading = {"num_workers": 1, "prefetch_factor": 3}
    before = ranks.run(sessions.train, 30, 1, options, loading, None, 2)
    assert sorted(before[0].state["used"].tolist()) == used(before)[0]
    assert len(used(before)[0]) == 9


def test_states_that_do_not_fit_are_refused(ranks: Ranks) -> None:
    options = {"global_batch": 5}
    first, second, _ = ranks.run(sessions.train, 23, 1, options, {}, None, 1)
    session = paceline.Session(Numbered(23), global_batch=5)
    with pytest.raises(ValueError, match="save the state of rank 0"):
        session.load_state_dict(second.state)
    next(iter(session.loader()))
    with pytest.raises(paceline.PacelineError, match="before the loader's first"):
        session.load_state_dict(first.state)
    session.close()
    other = paceline.Session(Numbered(24), global_batch=5)
    with pytest.raises(ValueError, match="23 samples"):
        other.load_state_dict(first.state)
    other.close()


# Shapes


def test_numbers_of_samples_lie_on_the_grid_and_so_do_fillers(ranks: Ranks) -> None:
    """7 samples remain for an epoch's last step: one rank gets 4, one 3, and one a filler."""
    options = {"global_batch": 12, "shapes": 4, "sizes": [1.0] * 31}
    logs = ranks.run(sessions.train, 31, 1, options)
    counts = [sorted(map(len, parts)) for parts in by_step(logs).values()]
    assert counts == [[4, 4, 4], [4, 4, 4], [0, 3, 4]]
    assert used(logs)[0] == list(range(31))
    for step in range(3):
        assert sum(log.weights[step] for log in logs) == pytest.approx(1.0)


def test_a_rank_without_samples_gets_as_many_fillers_as_the_least_batch() -> None:
    session = paceline.Session(Sized(4), global_batch=4, shapes=2)
    loop = session._loop
    assert loop.fillers == [session.filler] * 2
    loop.context = replace(loop.context, limits=Limits([1]))  # as a profile may find later
    assert loop.fillers == [session.filler]
    loop.context = replace(loop.context, limits=Limits([0]))
    assert loop.fillers == [session.filler]
    loop.context = replace(loop.context, limits=Limits([3]))
    assert loop.fillers == [session.filler] * 2


@pytest.mark.parametrize("before", [True, False])
def test_each_rank_says_once_that_its_model_compiles_for_each_size(
    ranks: Ranks, before: bool
) -> None:
    """Of 20 samples an epoch's last step has 2: some ranks have batches of 2 and of 1."""
    for warnings in ranks.run(partial(sessions.compiled, before=before), 20, {"global_batch": 6}):
        [warning] = warnings
        assert "a model is compiled" in warning if before else "times in a step" in warning
        assert "Session(shapes=N)" in warning
        assert "must divide global_batch, 6" in warning


def test_with_a_grid_no_rank_says_so(ranks: Ranks) -> None:
    options = {"global_batch": 6, "shapes": 2}
    assert ranks.run(partial(sessions.compiled, before=True), 20, options) == [[], [], []]


@pytest.mark.parametrize(("first", "epochs"), [(0, 2), (1, 2), (5, 1)])
def test_set_epoch_gives_the_order_of_distributed_sampler(first: int, epochs: int) -> None:
    data = Numbered(20)
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=7)
    with contextlib.closing(paceline.Session(data, global_batch=4, seed=7)) as session:
        loader = session.loader()
        for epoch in range(first, first + epochs):
            sampler.set_epoch(epoch)
            loader.set_epoch(epoch)
            assert [i for indices, *_ in loader for i in indices.tolist()] == list(sampler)
            assert session.epoch == epoch
        assert session._loop.progress.trained.upto(session.step) == 20 * epochs
        assert list(session.epochs(first + epochs + 1)) == [first + epochs]
        with pytest.raises(paceline.PacelineError, match="the next pass over the loader is epoch"):
            loader.set_epoch(first)
        with pytest.raises(ValueError, match="set_epoch"):
            loader.set_epoch(-1)
        loader.set_epoch(first + epochs + 3)
        for _ in loader:
            with pytest.raises(paceline.PacelineError, match="before the loop"):
                loader.set_epoch(first + epochs + 3)
