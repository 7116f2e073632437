"""Models sharded by `fully_shard`: the update is that of one process over the global batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.wire.synchronisation import convert
from support import fsdp
from support.fsdp import Log, Sharding
from support.ranks import Ranks

pytestmark = pytest.mark.ranks
WORLD = 4
BOUND = 1e-5  # docs/invariants.md, invariant 2
SYNCHRONOUS = ["bsp", "paceline", "lbb", "static-batching", "chronica", "sata", "boa"]
QUIET = [HealthCheck.function_scoped_fixture]


COUNTS = st.lists(st.integers(0, 5), min_size=WORLD, max_size=WORLD).filter(any)
SHARDINGS = st.builds(
    Sharding,
    replicas=st.sampled_from([1, 2]),
    reshard=st.sampled_from([None, True, False]),
    units=st.booleans(),
)


@settings(max_examples=20, suppress_health_check=QUIET)
@given(
    kind=st.sampled_from(sorted(fsdp.KINDS)),
    counts=COUNTS,
    mean=st.sampled_from(["samples", "size"]),
    seed=st.integers(0, 1000),
    how=SHARDINGS,
)
def test_weighted_gradient_is_that_of_one_process(
    ranks: Ranks, kind: str, counts: list[int], mean: str, seed: int, how: Sharding
) -> None:
    for errors in ranks.run(fsdp.compare, kind, counts, mean, seed, how):
        assert max(errors) <= BOUND


@settings(max_examples=30, suppress_health_check=QUIET)
@given(
    kind=st.sampled_from(["mlp", "tower"]),
    steps=st.lists(COUNTS, min_size=2, max_size=3),
    kept=st.sampled_from(["gradients", "partial", "nothing"]),
    how=SHARDINGS,
)
def test_accumulated_gradient_is_that_of_one_process(
    ranks: Ranks, kind: str, steps: list[list[int]], kept: str, how: Sharding
) -> None:
    for errors in ranks.run(fsdp.accumulate, kind, steps, kept, 7, how):
        assert max(errors) <= BOUND


@pytest.mark.parametrize("reduce", [None, torch.float32])
@pytest.mark.parametrize("replicas", [1, 2])
def test_in_half_precision_the_gradient_is_that_of_one_process_but_for_rounding(
    ranks: Ranks, replicas: int, reduce: torch.dtype | None
) -> None:
    how = Sharding(replicas, dtype=torch.bfloat16, reduce=reduce)
    for errors in ranks.run(fsdp.compare, "mlp", [0, 4, 1, 3], "samples", 3, how):
        assert max(errors) <= 0.03  # a rounding of bfloat16 is 2⁻⁹; unweighted it is 0.3 and more
    steps = [[0, 4, 1, 3], [2, 0, 5, 1]]
    for errors in ranks.run(fsdp.accumulate, "mlp", steps, "gradients", 3, how):
        assert max(errors) <= 0.03


def test_parameters_may_be_resharded_to_fewer_ranks(ranks: Ranks) -> None:
    for errors in ranks.run(fsdp.compare, "tower", [0, 3, 1, 2], "size", 3, Sharding(reshard=2)):
        assert max(errors) <= BOUND


def test_parameters_that_were_frozen_are_weighed_once_they_are_trained(ranks: Ranks) -> None:
    for errors in ranks.run(fsdp.thawed):
        assert max(errors) <= BOUND


@pytest.mark.parametrize("how", [Sharding(), Sharding(replicas=2)], ids=["fsdp", "hsdp"])
def test_presets_that_reduce_in_each_step_are_switched_between(ranks: Ranks, how: Sharding) -> None:
    """Segments of two steps, each by the next preset; ranks' measured speeds are 1 : 2 : 3 : 4."""
    plans = partial(fsdp.by_presets, SYNCHRONOUS)
    logs: list[Log] = ranks.run(partial(fsdp.train, plans, 2, how))
    assert set(logs[0].policies) == set(SYNCHRONOUS)
    steps = zip(*(map(len, log.parts) for log in logs), strict=True)
    assert any(len(set(counts)) > 1 for counts in steps)
    for log in logs:
        assert len(log.errors) == 16
        assert max(log.errors) <= BOUND
        assert log.parameters <= BOUND


def test_clipping_sees_the_norm_of_the_global_batch_s_gradient(ranks: Ranks) -> None:
    plans = partial(fsdp.by_presets, ["paceline"])
    for log in ranks.run(partial(fsdp.train, plans, 1, Sharding(), clip=0.05)):
        assert max(log.errors + log.norms) <= BOUND
        assert log.parameters <= BOUND


def test_batchnorm_is_synchronised_over_all_ranks(ranks: Ranks) -> None:
    plans = partial(fsdp.by_presets, ["paceline", "bsp"])
    for log in ranks.run(partial(fsdp.train, plans, 1, Sharding(), batchnorm="sync")):
        assert max(log.errors) <= BOUND
        assert log.parameters <= BOUND


@pytest.mark.parametrize(
    "rules",
    [
        ("partial", {"probes": 1, "staleness": 4, "mean": True}),
        ("averaging", {"every": 3}),
        ("pairwise", {}),
    ],
    ids=lambda rules: rules[0],
)
def test_under_a_relaxed_policy_gradients_stay_reduced(
    ranks: Ranks, rules: tuple[str, dict[str, object]]
) -> None:
    plans = partial(fsdp.by_synchronisers, [convert(*rules)])
    logs = ranks.run(partial(fsdp.train, plans, 1, Sharding()))
    for log in logs:
        assert not log.relaxed
        assert "the model is sharded by fully_shard" in log.fallback
        assert max(log.errors) <= BOUND


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_waiting_in_collectives_is_no_computing(ranks: Ranks, where: str) -> None:
    """Rank 2 computes for 0.2 s longer in a unit that is called twice.

    The others wait for it where a unit's parameters are gathered, or its gradients reduced.
    """
    for rank, times in enumerate(ranks.run(fsdp.timed, 2, 0.2, where)):
        for compute_s, sync_s, spent in times[1:]:
            assert compute_s + sync_s <= spent
            if rank == 2:
                assert compute_s > 0.4
            else:
                assert sync_s > 0.3
                assert compute_s < sync_s / 2


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (
            "part",
            "0 is sharded by FSDP2 (fully_shard), but the model passed to session.wrap is not",
        ),
        ("ignored", "parameter 1.weight is not sharded by fully_shard"),
        ("mesh", "the model is sharded over 2 of 4 ranks"),
        ("factor", "the model has a gradient divide factor of 1.0"),
        ("hook", "the model has a custom all-reduce hook"),
        ("option", "find_unused_parameters=…) is an option of DistributedDataParallel"),
        ("batchnorm", "2 is a BatchNorm1d: it computes statistics over the local batch"),
        ("micro_batches", "leave micro_batches out"),
        ("twice", "already wrapped by a session"),
        ("profile", "no rank can run trial batches alone"),
        ("later", "the model has a gradient divide factor of 1.0"),
        ("logged", "weight is a DTensor, of which each rank has a part: give its full_tensor()"),
    ],
)
def test_what_would_train_wrongly_is_refused(ranks: Ranks, kind: str, says: str) -> None:
    messages = ranks.run(fsdp.refused, kind)
    late = [message for message in messages if "an error ended its loop in step 0" in message]
    assert len(late) < len(messages)
    assert all(says in message for message in messages if message not in late)


def test_a_model_of_a_closed_session_may_be_wrapped_again(ranks: Ranks) -> None:
    for same, hooks in ranks.run(fsdp.closed):
        assert same
        assert max(hooks) == 2  # FSDP's own


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Sharding(), Sharding()),
        (Sharding(), Sharding(replicas=2)),
        (Sharding(replicas=2), None),
        (None, Sharding(reshard=True)),
    ],
    ids=["fsdp", "fsdp-hsdp", "hsdp-ddp", "ddp-fsdp"],
)
def test_checkpoints_hold_a_sharded_model_and_its_optimiser(
    ranks: Ranks, tmp_path: Path, before: Sharding | None, after: Sharding | None
) -> None:
    """An epoch has six steps. What goes on from the first one's end trains as if without a stop."""
    reference = ranks.run(fsdp.save_and_go_on, str(tmp_path / "whole"), 2, None)
    first = ranks.run(fsdp.save_and_go_on, str(tmp_path / "parts"), 1, before)
    again = ranks.run(fsdp.save_and_go_on, str(tmp_path / "parts"), 2, after)
    for (_, ended, _), (_, middle, _), (began, last, step) in zip(
        reference, first, again, strict=True
    ):
        assert step == 6
        torch.testing.assert_close(began, middle)
        torch.testing.assert_close(last, ended)
