"""`paceline.packed`: sequences end to end, and a model that sees each of them alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

import paceline

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any)


@given(LENGTHS)
def test_boundaries_give_the_sequences_back(lengths: list[int]) -> None:
    samples = [(torch.randn(n, 3), torch.full((n,), k)) for k, n in enumerate(lengths)]
    made = paceline.packed(samples)
    assert made.max_seqlen == max(lengths)
    assert made.cu_seqlens.dtype == torch.int32
    assert made.cu_seqlens.diff().tolist() == lengths
    ends = made.cu_seqlens.tolist()
    for (tokens, labels), start, end in zip(samples, ends, ends[1:], strict=False):
        assert torch.equal(made.values[0][start:end], tokens)
        assert torch.equal(made.values[1][start:end], labels)
        assert made.position_ids[start:end].tolist() == list(range(end - start))


def test_attention_within_the_boundaries_is_that_of_each_sequence() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randn(n, 4, generator=generator, dtype=torch.double) for n in (3, 1, 5)]
    made = paceline.packed(samples)
    (tokens,) = made.values
    sequence = torch.repeat_interleave(torch.arange(3), made.cu_seqlens.diff())
    mask = sequence[:, None] == sequence
    together = scaled_dot_product_attention(tokens[None], tokens[None], tokens[None], mask[None])
    alone = [scaled_dot_product_attention(s[None], s[None], s[None])[0] for s in samples]
    torch.testing.assert_close(together[0], torch.cat(alone))


@pytest.mark.parametrize(
    ("samples", "error", "why"),
    [
        ([], ValueError, "the list of samples is empty"),
        (
            [torch.ones(2), torch.tensor(1.0)],
            TypeError,
            "sample 1 of the batch is neither a tensor",
        ),
        ([[1, 2]], TypeError, "sample 0 of the batch is neither a tensor"),
        ([(torch.ones(2), torch.ones(3))], ValueError, r"lengths \[2, 3\]"),
        ([(torch.ones(2),), (torch.ones(2), torch.ones(2))], ValueError, "different numbers"),
    ],
)
def test_what_has_no_length_is_refused(samples: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        paceline.packed(samples)
