"""Cuts local batches that do not fit into a rank's memory at once into micro-batches."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.dealing import cut, cut_within
from paceline.core.terms import Terms
from paceline.train.parts import MicroBatch, Part

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def cut_part(part: Part, most: float, sizes: Floats, terms: Terms) -> Part:
    """Cut the steps of a rank's part with more than `most` into micro-batches.

    `most` is in samples, or in size units with a token budget. No step of the part is cut yet.
    `sizes` has λ of each sample, [N].
    """
    by_tokens = terms.token_budget is not None
    amounts = part.loads if by_tokens else part.counts
    if not any(amount > most for amount in amounts):
        return part
    flat = np.frombuffer(part.indices, dtype="<u4")
    ends = np.cumsum(part.counts)
    steps, micro = [], []
    for amount, samples in zip(amounts, np.split(flat, ends[:-1]), strict=True):
        whole, pieces = sizes[samples], list[Ints]()
        if amount > most:
            grid = terms.shapes.samples
            pieces = cut_within(whole, most) if by_tokens else cut(whole, int(most), grid)
        steps.append(samples[np.concatenate(pieces)] if pieces else samples)
        micro.append([_micro_batch(whole, whole[piece], terms) for piece in pieces])
    indices = np.concatenate(steps).astype("<u4").tobytes()
    return msgspec.structs.replace(part, indices=indices, micro=micro)


def _micro_batch(whole: Floats, sizes: Floats, terms: Terms) -> MicroBatch:
    """Describe a micro-batch with these sizes, cut from a local batch with the sizes `whole`."""
    share = len(sizes) / len(whole)
    if terms.loss_mean == "size":
        share = float(sizes.sum() / whole.sum())
    squares, longest = float((sizes**2).sum()), float(sizes.max())
    return MicroBatch(len(sizes), float(sizes.sum()), squares, longest, share)
