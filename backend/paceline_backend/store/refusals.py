"""What is wrong with a telemetry message: no database takes it, or no reader could use it.

Each function returns a reason that names the field, or None. Messages come from any program that
can write to the bus, so types alone say little about them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from paceline.core.emulation import Emulation
from paceline.wire import Hello, NodeState, RunState, Segment

MOST_STEPS = 2**53  # a step's number is exact in JSON and in a double
MOST_RANKS = 2**17  # what is kept of each rank must fit into memory

_SMALL, _INT, _BIG = 2**15, 2**31, 2**63  # columns of 16, 32 and 64 bits
_DEPTH = 32  # of nested parameters
_LONGEST_NAME = 500  # characters: Postgres indexes no key above 2,704 bytes
_LONGEST_RANGE = 2**20  # steps of feedback


def of_builtins(value: Any, place: str, depth: int = 0) -> str | None:
    """What JSON has no way to say: extension types, keys that are no strings, NaN; or too deep."""
    if depth > _DEPTH:
        return f"{place} is nested more than {_DEPTH} deep"
    if value is None or isinstance(value, bool | int | str):
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{place} is {value}, not a finite number"
    if isinstance(value, list | tuple):
        reasons = (of_builtins(item, f"{place}[]", depth + 1) for item in value)
        return next(filter(None, reasons), None)
    if not isinstance(value, dict):
        return f"{place} is of type {type(value).__name__}, which JSON does not have"
    for key, item in value.items():
        if not isinstance(key, str):
            return f"{place} has the key {key!r}: keys must be strings"
        if reason := of_builtins(item, f"{place}.{key}"[:200], depth + 1):
            return reason
    return None


def of_segment(
    segment: Segment, world: int | None = None, samples: int | None = None
) -> str | None:
    """What is wrong with a segment that is said to have run.

    Args:
        segment: the segment.
        world: ranks of its attempt; None: unknown.
        samples: of the data set; None: unknown.
    """
    bounds = {
        "seq": _BIG,
        "epoch": _INT,
        "first_step": MOST_STEPS,
        "steps": _INT,
        "version": _INT,
        "moved": _INT,
    }
    return (
        _of_whole(segment, bounds)
        or _of_times(segment, ("plan_s",))
        or _of_shape(segment, world)
        or _of_indices(segment, samples)
        or _of_beliefs(segment)
        or segment.synchroniser.problem(world)
        or of_builtins(segment.memory, "memory")
    )


def _of_shape(segment: Segment, world: int | None) -> str | None:
    """What is wrong with its counts."""
    if segment.source not in ("controller", "coast"):
        return f"source is {segment.source!r}: it must be 'controller' or 'coast'"
    if not segment.counts:
        return "counts is empty: a segment has at least one step"
    width = len(segment.counts[0]) if world is None else world
    if not width or any(len(row) != width for row in segment.counts):
        return f"counts is not [steps][{width or 1} ranks]"
    if not all(min(row) >= 0 and max(row) < _INT for row in segment.counts):
        return "counts holds a number that is negative or too large"
    total = sum(map(sum, segment.counts))
    if len(segment.indices) != 4 * total:
        return f"indices has {len(segment.indices)} bytes for {total} samples"
    return None


def _of_indices(segment: Segment, samples: int | None) -> str | None:
    if samples is None or not segment.indices:
        return None
    most = int(np.frombuffer(segment.indices, "<u4").max())
    return f"indices holds {most} of {samples} samples" if most >= samples else None


def _of_beliefs(segment: Segment) -> str | None:
    """What is wrong with what its plan rested on."""
    width = len(segment.counts[0])
    if segment.ett_s and [len(row) for row in segment.ett_s] != [width] * segment.steps:
        return "ett_s does not fit counts"
    if len(segment.shares) not in (0, width):
        return f"shares are {len(segment.shares)} of {width} ranks"
    if len(segment.threads) not in (0, width):
        return f"threads are {len(segment.threads)} of {width} ranks"
    if not all(all(map(math.isfinite, row)) for row in [segment.shares, *segment.ett_s]):
        return "shares or ett_s holds what is not a finite number"
    for start, end in segment.feedback:
        if not 0 <= start < end <= min(start + _LONGEST_RANGE, MOST_STEPS):
            return f"feedback holds {[start, end]}, which is no range of steps"
    return None


def of_hello(hello: Hello) -> str | None:
    """What is wrong with a leader's introduction."""
    bounds = {
        "attempt": _SMALL,
        "global_batch": _INT,
        "seed": _BIG,
        "lookahead": _INT,
        "epoch": _INT,
        "step": MOST_STEPS,
    }
    if reason := _of_whole(hello, bounds) or _of_times(hello, ("started_at",)):
        return reason
    if not 1 <= hello.world <= MOST_RANKS:
        return f"world is {hello.world}: it must be 1 to {MOST_RANKS}"
    if hello.global_batch < 1:
        return "global_batch is 0: it must be at least 1"
    if hello.loss_mean not in ("samples", "size"):
        return f"loss_mean is {hello.loss_mean!r}: it must be 'samples' or 'size'"
    if hello.epochs is not None and not 0 <= hello.epochs < _BIG:
        return f"epochs is {hello.epochs}: it must be at least 0"
    return _of_samples(hello) or _of_ranks(hello) or _of_emulated(hello)


def _of_samples(hello: Hello) -> str | None:
    if not hello.sizes or len(hello.sizes) % 8:
        return "sizes is not a sequence of float64, one for each sample"
    sizes = hello.sizes_array()
    if not (np.isfinite(sizes).all() and (sizes >= 0).all()):
        return "sizes holds what is not a finite number of at least 0"
    if len(hello.used) % 4:
        return "used is not a sequence of uint32"
    used = np.frombuffer(hello.used, "<u4")
    if len(used) and int(used.max()) >= len(sizes):
        return f"used holds {used.max()} of {len(sizes)} samples"
    return None


def _of_ranks(hello: Hello) -> str | None:
    if len(hello.limits) not in (0, hello.world):
        return f"limits are {len(hello.limits)} of {hello.world} ranks"
    if not all(0 <= limit < _BIG for limit in hello.limits):
        return "limits holds a number that is negative or too large"
    if len(hello.profiles) not in (0, hello.world):
        return f"profiles are {len(hello.profiles)} of {hello.world} ranks"
    trials = [trial for rank in hello.profiles for trial in rank]
    if not all(0 <= count < _INT and math.isfinite(time_s) for count, time_s in trials):
        return "profiles holds a trial that is no count of samples and seconds"
    return None


def _of_emulated(hello: Hello) -> str | None:
    if hello.emulated is None:
        return None
    if reason := of_builtins(hello.emulated, "emulated"):
        return reason
    try:
        devices = msgspec.convert(hello.emulated, Emulation)
    except msgspec.ValidationError as error:
        return f"emulated: {error}"
    reason = devices.problem(hello.world)
    return reason and f"emulated: {reason}"


def of_run_state(change: RunState) -> str | None:
    """What is wrong with a change of a run's life, but for the state's name."""
    bounds = {"attempt": _INT, "dropped": _BIG}
    if reason := _of_whole(change, bounds) or _of_times(change, ("at",)):
        return reason
    if change.exit_code is not None and not -_INT <= change.exit_code < _INT:
        return f"exit_code is {change.exit_code}: it must be a number of 32 bits"
    return None


def of_node_state(state: NodeState) -> str | None:
    """What is wrong with an agent's heartbeat."""
    if not 0 < len(state.node) <= _LONGEST_NAME:
        return f"node has {len(state.node)} characters: it must have 1 to {_LONGEST_NAME}"
    return _of_whole(state, {"cores": _INT, "memory_bytes": _BIG}) or _of_times(state, ("at",))


def _of_whole(message: Any, bounds: Mapping[str, int]) -> str | None:
    for name, bound in bounds.items():
        if not 0 <= getattr(message, name) < bound:
            return f"{name} is {getattr(message, name)}: it must be at least 0 and below {bound}"
    return None


def _of_times(message: Any, names: Sequence[str]) -> str | None:
    for name in names:
        if not math.isfinite(getattr(message, name)):
            return f"{name} is {getattr(message, name)}, not a finite number"
    return None
