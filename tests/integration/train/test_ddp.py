"""The update is the single process's over the same global batch, however it is split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import gradients
from support.ranks import Ranks

pytestmark = pytest.mark.ranks
BOUND = 1e-5  # docs/invariants.md, invariant 2
KINDS = sorted(gradients.MODELS)


@pytest.fixture(
    scope="module", params=[3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))]
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    pool = Ranks(request.param)
    yield pool
    pool.stop()


def options(kind: str) -> dict[str, Any]:
    return {"find_unused_parameters": True} if kind == "unused" else {}


def counts(world: int) -> st.SearchStrategy[list[int]]:
    """Samples per rank, often none, at least one in all."""
    return st.lists(st.integers(0, 5), min_size=world, max_size=world).filter(any)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_weighted_gradient_is_that_of_one_process(ranks: Ranks, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    split = data.draw(counts(ranks.world))
    mean = data.draw(st.sampled_from(["samples", "size"]))
    seed = data.draw(st.integers(0, 1000))
    for errors in ranks.run(gradients.compare, kind, split, mean, seed, options(kind)):
        assert max(errors) <= BOUND


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_accumulated_gradient_is_that_of_one_process(ranks: Ranks, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["mlp", "unused"]))
    how = data.draw(st.sampled_from(["each", "all", "twice", "synced"]))
    view = data.draw(st.booleans())
    steps = data.draw(st.lists(counts(ranks.world), min_size=2, max_size=3))
    wanted = options(kind) | {"gradient_as_bucket_view": view}
    for errors in ranks.run(gradients.accumulate, kind, steps, how, 7, wanted):
        assert max(errors) <= BOUND


@pytest.mark.parametrize(
    "wanted",
    [
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb_list": [1e-4, 2e-4]},  # several buckets
        {"find_unused_parameters": True},
        {"forward_sync_buffers": True},
    ],
    ids=lambda wanted: next(iter(wanted)),
)
def test_options_of_ddp_keep_the_gradient(ranks: Ranks, wanted: dict[str, Any]) -> None:
    split = [0, 3, 1, 2][: ranks.world]
    for errors in ranks.run(gradients.compare, "conv", split, "samples", 3, wanted):
        assert max(errors) <= BOUND
    steps = [split, split[::-1], split]
    for how in ("each", "all"):
        for errors in ranks.run(gradients.accumulate, "conv", steps, how, 3, wanted):
            assert max(errors) <= BOUND


def test_a_static_graph_keeps_the_gradient_and_cannot_accumulate(ranks: Ranks) -> None:
    split = [0, 3, 1, 2][: ranks.world]
    wanted = {"static_graph": True}
    for errors in ranks.run(gradients.compare, "conv", split, "size", 3, wanted):
        assert max(errors) <= BOUND
    for text in ranks.run(gradients.no_sync_of_static_graph):
        assert "static_graph=False" in text


def test_zero_grad_after_the_forward_pass_discards_an_accumulation(ranks: Ranks) -> None:
    assert max(ranks.run(gradients.discard_late)) <= BOUND


def test_a_backward_pass_outside_its_forward_s_no_sync_is_weighted(ranks: Ranks) -> None:
    assert max(ranks.run(gradients.backward_outside)) <= BOUND


def test_two_models_in_one_step(ranks: Ranks) -> None:
    """Their reductions are told apart: the first one's wait is not the second one's computing."""
    split = [2, 0, 1, 3][: ranks.world]
    for errors, times in ranks.run(gradients.two_models, split):
        assert max(errors) <= BOUND
        compute_s, sync_s, whole_s = times
        assert compute_s + sync_s <= whole_s


def test_small_models_have_one_bucket_and_send_no_buffers(ranks: Ranks) -> None:
    for buckets, sends in ranks.run(gradients.buckets):
        assert buckets == 1
        assert not sends


@pytest.mark.parametrize("how", ["before", "after"])
def test_parameters_have_no_hooks_where_no_gradients_add_up(ranks: Ranks, how: str) -> None:
    """A hook takes some µs of each step, and a large model has hundreds of parameters."""
    for hooked, error in ranks.run(gradients.hooks, how):
        assert hooked == 0
        assert error <= BOUND


def test_parameters_get_hooks_in_the_pass_that_needs_them(ranks: Ranks) -> None:
    for hooked, error in ranks.run(gradients.hooks, "not"):
        assert hooked > 0
        assert error <= BOUND


@pytest.mark.parametrize("how", ["before", "after", "not"])
def test_a_compiled_wrapped_model_has_the_gradient(ranks: Ranks, how: str) -> None:
    for _, error in ranks.run(gradients.hooks, how, True):
        assert error <= BOUND


def test_gradients_add_up_where_nobody_sees_what_the_loss_is_made_of(ranks: Ranks) -> None:
    assert max(ranks.run(gradients.hidden_outputs, False)) <= BOUND
    for text in ranks.run(gradients.hidden_outputs, True):
        assert "zero_grad() before the forward pass" in text


def test_gradients_add_up_after_a_pass_through_the_frozen_model(ranks: Ranks) -> None:
    """As under a GAN, whose discriminator keeps its gradients while the generator is trained."""
    assert max(ranks.run(gradients.frozen_between)) <= BOUND
