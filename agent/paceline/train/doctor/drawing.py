"""Checks whether a sample's random numbers depend on the rank that trains the sample."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.data import Stream
from paceline.node.starting.examining import Finding, Level
from paceline.train.doctor.checks import collated, load
from paceline.train.doctor.watching import ScriptRecord, SeenSession, random_state
from paceline.train.seeding import Epoch, seeded

# States of torch's, NumPy's and Python's random numbers.
_States = tuple[object, object, object]
_LOADED = 3
_BY_INDEX = (
    "In __getitem__, put the transforms below `with paceline.seeded(index):`, or draw from "
    "paceline.generator(index): the same numbers on every rank, other numbers in each epoch."
)


def model(seen: ScriptRecord) -> Iterator[Finding]:
    """Report whether the model draws random numbers in its forward pass, such as for dropout."""
    for known in seen.sessions:
        for calls in known.calls:
            if not calls.called or not known.steps:
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
                "for the whole batch of a rank. Which numbers a sample gets depends on its rank "
                "and on the other samples of the batch: training matches plain DDP in "
                "distribution, but not number by number.",
                "No action needed if that is acceptable. session.generator(index) draws random "
                "numbers per sample.",
            )


def _drops(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    rate = getattr(module, "dropout", 0)
    return isinstance(rate, float) and rate > 0


def samples(seen: ScriptRecord) -> Iterator[Finding]:
    """Report whether loading or collating draws random numbers that depend on the rank."""
    for known in seen.sessions:
        # A stream's samples have no index by which to load them twice.
        if known.loader is None or isinstance(known.dataset, Stream):
            continue
        count = len(known.dataset)
        indices = sorted({0, count // 2, count - 1})[:_LOADED]
        loads = [_twice(partial(load, known, index)) for index in indices]
        if any(_drawn(*pair) for pair in loads):
            yield Finding(
                "random numbers",
                Level.NOTE,
                "The data set uses the process's global random generator to load a sample, so a "
                "sample's augmentation depends on the rank and on the DataLoader worker.",
                _BY_INDEX,
            )
        elif not all(same(first.value, second.value) for first, second in loads):
            yield Finding(
                "random numbers",
                Level.NOTE,
                "The data set returns another sample when the same index is loaded again, as if it "
                "had its own random generator, so a sample's augmentation depends on the rank and "
                "on the DataLoader worker.",
                _BY_INDEX,
            )
        elif _depends(*_twice(partial(_collated, known))):
            yield Finding(
                "random numbers",
                Level.NOTE,
                "collate_fn draws random numbers for a whole batch. Which numbers a sample gets "
                "depends on its rank and on the other samples of the batch.",
                "Draw random numbers in the data set's __getitem__ instead, from "
                "paceline.generator(index).",
            )
        else:
            says = "Loading a sample uses no random numbers that depend on the rank."
            yield Finding("random numbers", Level.OK, says)


@dataclass(frozen=True)
class _Made:
    """A function's result, and the states of the random generators before and after the call."""

    value: Any
    before: _States
    after: _States


def _collated(known: SeenSession) -> Any:
    return collated(known, [_made(partial(load, known, 0), 1).value])


def _twice(make: Callable[[], Any]) -> tuple[_Made, _Made]:
    return _made(make, 1), _made(make, 2)


def _made(make: Callable[[], Any], seed: int) -> _Made:
    with Epoch(seed, shared=False), seeded(0):
        before = _states()
        value = make()
        return _Made(value, before, _states())


def _states() -> _States:
    _, key, *rest = np.random.get_state(legacy=True)
    return random_state(), (np.asarray(key).tobytes(), *rest), random.getstate()


def _drawn(first: _Made, second: _Made) -> bool:
    """Return whether a function draws from the process's global random generators.

    The two calls began with different seeds. The result is False for a function that seeds a
    generator itself: then the generator has the same state after both calls.
    """
    states = zip(first.before, first.after, second.before, second.after, strict=True)
    return any(a != b and (a != was_a or b != was_b) for was_a, a, was_b, b in states)


def _depends(first: _Made, second: _Made) -> bool:
    return _drawn(first, second) or not same(first.value, second.value)


def same(a: Any, b: Any) -> bool:
    """Return whether two samples are equal. Values of unknown type count as equal."""
    if isinstance(a, torch.Tensor | np.ndarray) and isinstance(b, torch.Tensor | np.ndarray):
        equal: Any = (a == b) | ((a != a) & (b != b)) if a.shape == b.shape else None
        return equal is not None and bool(equal.all())
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, int | float | complex | str | bytes | np.generic):
        return bool(a == b or (a != a and b != b))
    return True
