"""Whether random numbers depend on which rank has a sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.node.starting.examining import Finding, Level
from paceline.train.doctor.checks import collated, load
from paceline.train.doctor.watching import Seen, SeenSession
from paceline.train.seeding.samples import Epoch, seeded

_LOADED = 3  # samples


def model(seen: Seen) -> Iterator[Finding]:
    """Random numbers that the model draws in its forward pass, such as dropout's."""
    for known in seen.sessions:
        for calls in known.calls:
            if not calls.of_parts or not known.steps:
                continue
            if not calls.draws:
                says = "The model draws no random numbers in its forward pass."
                yield Finding("random numbers", Level.OK, says)
                continue
            dropping = [name for name, module in calls.model.named_modules() if _drops(module)]
            named = f" (dropout in {', '.join(dropping[:3])}{', …' * (len(dropping) > 3)})"
            yield Finding(
                "random numbers",
                Level.NOTE,
                f"The model draws random numbers in its forward pass{named if dropping else ''}, "
                "for a rank's batch as a whole. Which ones a sample meets depends on its rank and "
                "on the samples beside it: training is that of plain DDP in distribution, and not "
                "number by number.",
                "Nothing, if that is fine. session.generator(index) has random numbers by sample.",
            )


def _drops(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    rate = getattr(module, "dropout", 0)
    return isinstance(rate, float) and rate > 0


def samples(seen: Seen) -> Iterator[Finding]:
    """Random numbers that loading a sample, or collating a batch, takes from the process."""
    for known in seen.sessions:
        if known.loader is None:
            continue
        count = len(known.dataset)
        indices = sorted({0, count // 2, count - 1})[:_LOADED]
        if not all(same(_loaded(known, i, 1), _loaded(known, i, 2)) for i in indices):
            yield Finding(
                "random numbers",
                Level.NOTE,
                "The data set draws from the process's random numbers when it loads a sample. So "
                "how a sample is augmented depends on the rank and on the DataLoader worker.",
                "In __getitem__ write with paceline.seeded(index): around the transforms, or draw "
                "with paceline.generator(index): the same on any rank, other in each epoch.",
            )
        elif not same(_collated(known, 1), _collated(known, 2)):
            yield Finding(
                "random numbers",
                Level.NOTE,
                "collate_fn draws random numbers for a batch as a whole. Which ones a sample meets "
                "depends on its rank and on the samples beside it.",
                "Move it into the data set's __getitem__, and draw with paceline.generator(index).",
            )
        else:
            says = "Loading a sample takes no random numbers that depend on the rank."
            yield Finding("random numbers", Level.OK, says)


def _loaded(known: SeenSession, index: int, seed: int) -> Any:
    """A sample, loaded with these random numbers of the process."""
    with Epoch(seed, shared=False).loading(), seeded(0):
        return load(known, index)


def _collated(known: SeenSession, seed: int) -> Any:
    loaded = [_loaded(known, 0, 1)]
    with Epoch(seed, shared=False).loading(), seeded(0):
        return collated(known, loaded)


def same(a: Any, b: Any) -> bool:
    """Whether two samples are equal; what cannot be compared counts as equal."""
    if isinstance(a, torch.Tensor | np.ndarray) and isinstance(b, torch.Tensor | np.ndarray):
        equal: Any = (a == b) | ((a != a) & (b != b)) if a.shape == b.shape else None
        return equal is not None and bool(equal.all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, int | float | str | bytes | bool):
        return bool(a == b)
    return True
