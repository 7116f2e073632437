"""`session.wrap` with odd scripts: gradients are those of one process over the global batch."""

from __future__ import annotations

from functools import partial

import pytest

from support import odd_scripts as odd
from support.ranks import Ranks

pytestmark = pytest.mark.ranks


PLAIN = {
    "simple": (odd.plain, odd.simple),
    "frozen": (odd.frozen_low, odd.simple),
    "layer_twice": (odd.Twice, odd.simple),
    "complex": (odd.Complex, odd.simple),
    "mixed": (odd.Mixed, odd.simple),
    "buffers": (odd.Counting, odd.simple),
    "two_forwards_one_backward": (odd.plain, odd.two_forwards_one_backward),
    "two_losses_at_once": (odd.plain, odd.two_losses_at_once),
    "retained_in_no_sync": (odd.plain, odd.retained_in_no_sync),
    "penalty_after": (odd.plain, odd.penalty_after),
    "penalty_before_forward": (odd.plain, odd.penalty_before_forward),
    "penalty_in_the_loss": (odd.plain, odd.penalty_in_the_loss),
    "put_before_backward": (odd.plain, odd.put_before_backward),
    "put_after_backward": (odd.plain, odd.put_after_backward),
    "input_gradient_penalty": (odd.plain, odd.input_gradient_penalty),
    "lbfgs": (odd.plain, odd.lbfgs),
    "doubling_hooks": (odd.plain, odd.doubling_hooks),
    "post_hooks": (odd.plain, odd.post_hooks),
    "evaluates_in_the_loop": (odd.plain, odd.evaluates_in_the_loop),
    "evaluates_on_one_rank": (odd.plain, odd.evaluates_on_one_rank),
    "leaves_out_steps": (odd.plain, odd.leaves_out_steps),
    "forward_without_backward": (odd.plain, odd.forward_without_backward),
    "filler_is_nan": (odd.plain, odd.filler_is_nan),
    "gan": (odd.pair, odd.gan),
    "encoder_and_decoder": (odd.pair, odd.encoder_and_decoder),
    "sharing": (odd.sharing, odd.encoder_and_decoder),
    "dict": (partial(odd.Returning, "dict"), odd.structured),
    "dataclass": (partial(odd.Returning, "dataclass"), odd.structured),
    "tuple": (partial(odd.Returning, "tuple"), odd.structured),
    "namedtuple": (partial(odd.Returning, "namedtuple"), odd.structured),
    "list": (partial(odd.Returning, "list"), odd.structured),
    "keywords": (odd.with_keywords, odd.keyword_arguments),
    "checkpointed": (partial(odd.Checkpointed, False), odd.simple),
    "checkpointed_reentrant": (partial(odd.Checkpointed, True), odd.simple),
    "compiled_first": (odd.compiled_first, odd.simple),
    "compiles_wrapped": (odd.plain, odd.compiles_wrapped),
}
FIND = {"find_unused_parameters": True}
WITH_OPTIONS = {
    "freezes_later_find": ([odd.Halves, odd.freezes_later], {"wrap": FIND}),
    "freezes_by_turns": ([odd.Halves, odd.freezes_by_turns], {"wrap": FIND}),
    "by_steps": ([odd.Branches, odd.by_steps], {"wrap": FIND}),
    "by_row": ([odd.ByRow, odd.simple], {"wrap": FIND}),
    "find_dict": ([partial(odd.Returning, "dict"), odd.structured], {"wrap": FIND}),
    "bucket_view_put": (
        [odd.plain, odd.penalty_before_forward],
        {"wrap": {"gradient_as_bucket_view": True}},
    ),
    "static_graph_twice": ([odd.Twice, odd.simple], {"wrap": {"static_graph": True}}),
    "static_graph_reentrant": (
        [partial(odd.Checkpointed, True), odd.simple],
        {"wrap": {"static_graph": True}},
    ),
    "early_optimizer": ([odd.plain, odd.simple], {"early": True}),
}


NOT_REDUCED = {
    # DistributedDataParallel does not reduce these either. Ranks' gradients differ: a warning.
    "retained": (odd.plain, odd.retained),
    "penalty_between": (odd.plain, odd.penalty_between),
    "gradients_by_autograd_grad": (odd.plain, odd.gradients_by_autograd_grad),
    "steps_in_backward": (odd.plain, odd.steps_in_backward),
    "passes_by": (odd.plain, odd.passes_by),
}
REFUSED = {
    "unfreezes_later": (
        odd.frozen_low,
        odd.unfreezes_later,
        "was frozen when session.wrap() wrapped its model",
    ),
    "freezes_later": (odd.Halves, odd.freezes_later, "`find_unused_parameters=True`"),
    "by_steps_without_find": (odd.Branches, odd.by_steps, "`find_unused_parameters=True`"),
    "backward_of_some": (odd.Halves, odd.backward_of_some, "`find_unused_parameters=True`"),
}


@pytest.mark.parametrize("name", [*PLAIN, *WITH_OPTIONS])
def test_gradients_are_those_of_one_process(ranks: Ranks, name: str) -> None:
    (build, script), options = WITH_OPTIONS.get(name) or (PLAIN[name], {})
    results = ranks.run(partial(odd.compare, build, script, **options))
    samples = list(zip(*(each["samples"] for each in results), strict=True))
    assert any(first != second and 0 not in (first, second) for first, second in samples)
    assert any(0 in step for step in samples), "a rank has no samples in a step"
    assert max(each["off"] for each in results) < 2e-5
    assert not any("differ between ranks" in said for said in results[0]["warnings"])


@pytest.mark.parametrize("name", list(NOT_REDUCED))
def test_rank_0_warns_where_gradients_are_not_reduced(ranks: Ranks, name: str) -> None:
    build, script = NOT_REDUCED[name]
    results = ranks.run(partial(odd.compare, build, script))
    assert any(
        "steps a model of session.wrap(), but its gradients differ between ranks" in said
        for said in results[0]["warnings"]
    ), results[0]["warnings"]


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_reduced_ends_with_the_mend(ranks: Ranks, name: str) -> None:
    build, script, says = REFUSED[name]
    for said in ranks.run(partial(odd.error_of, build, script)):
        assert says in said
