"""Whether what the model says of a sample depends on the samples that its batch has beside it.

A batch is padded to its longest sample, which is another one when ranks get other parts of a global
batch. So the smallest sample goes through the model alone, and padded beside the largest one, in
evaluation mode. The largest one goes through alone, and beside the smallest one, where nothing pads
it. Packed sequences are compared in front of another one, and behind it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.data import Stream
from paceline.node.starting.examining import Finding, Level
from paceline.train.amounts.packing import Packed
from paceline.train.doctor.calls import Call, Place, at, tensors
from paceline.train.doctor.checks import collated, extent, load, precision_of
from paceline.train.doctor.drawing import same
from paceline.train.doctor.watching import Seen, SeenSession
from paceline.train.fsdp.kinds import is_sharded

_LOOKED_AT = 16  # samples, for a small and a large one where sizes do not tell
_FINE, _GPU, _COARSE = 1e-4, 5e-3, 5e-2  # relative differences that are rounding
_MEND = (
    "Mask padded positions in each layer that mixes positions (attention, convolution, pooling, "
    "normalisation), or pack sequences. Else the same sample gives another gradient in another "
    "batch, and training differs from plain DDP's."
)
_LEAVE_OUT = (
    "Leave out what mixes the samples of a batch, since ranks get other ones than under plain DDP; "
    "or train under the policy bsp, which divides batches as plain DDP does."
)
_KEEP_APART = (
    "Keep sequences apart by cu_seqlens or position_ids in each layer that mixes positions "
    "(attention, convolution, recurrence, pooling): ranks pack other ones than under plain DDP."
)


class CannotTellError(Exception):
    """Why it cannot be told, in words that follow "this cannot be told: "."""


def _output(call: Call, batch: Any) -> list[tuple[Place, Tensor]]:
    """The floating-point tensors that a part of the model returns for another batch.

    Raises:
        CannotTellError: the call has a number that may be the other batch's longest sequence.
    """
    if isinstance(batch, Packed) and any(_whole_numbers([call.args, call.kwargs])):
        raise CannotTellError(
            "the model is called with a whole number, which may be max_seqlen of the batch that it "
            "was called with: give it the Packed, or compute it from cu_seqlens in the model"
        )
    arguments = {
        place: at(batch, source).to(tensor.device, tensor.dtype)
        for (place, tensor) in tensors([call.args, call.kwargs])
        if (source := call.places.get(place)) is not None
    }
    args, kwargs = _replaced([call.args, call.kwargs], arguments)
    returned = call.module(*args, **kwargs)
    return [(p, t.float()) for p, t in tensors(returned) if t.is_floating_point()]


def padding(seen: Seen) -> Iterator[Finding]:
    """What padding changes, of the first session whose loop was seen."""
    known = next((s for s in seen.sessions if s.loader is not None and s.calls), None)
    if known is None or not known.steps:
        return
    try:
        yield _compared(known, _tolerance(seen, known))
    except CannotTellError as reason:
        yield _unknown(str(reason))
    except Exception as error:  # of the script's own code
        yield _unknown(f"{type(error).__name__}: {error}")


def _unknown(reason: str) -> Finding:
    return Finding(
        "padding",
        Level.NOTE,
        f"Whether outputs depend on padding cannot be told: {reason}.",
        "Compare the model's output for a short sample alone with its output in a padded batch.",
    )


def _tolerance(seen: Seen, known: SeenSession) -> float:
    if precision_of(seen) is not None:
        return _COARSE
    devices = {p.device.type for calls in known.calls for p in calls.model.parameters()}
    return _FINE if devices == {"cpu"} else _GPU


def _compared(known: SeenSession, tolerance: float) -> Finding:
    small, large = _samples(known)
    alone, *batches = [
        collated(known, copy.deepcopy(samples))
        for samples in ([small], [small], [small, large], [large], [large, small])
    ]
    if not same(alone, batches[0]):
        raise CannotTellError("the same sample gives another batch when it is collated again")
    padded = _is_padded(*batches[:2])
    try:
        return _by_outputs(known, batches, padded, (extent(small), extent(large)), tolerance)
    except CannotTellError:
        if padded or isinstance(alone, Packed):
            raise
        return Finding("padding", Level.OK, "Batches are not padded.")


def _by_outputs(
    known: SeenSession, batches: list[Any], padded: bool, extents: tuple[int, int], tolerance: float
) -> Finding:
    """Compares what the model says of the samples.

    Args:
        known: the session.
        batches: of the small sample alone, of it and the large one, of the large one alone, and of
            the large one and the small one.
        padded: the small sample is padded beside the large one.
        extents: elements of the small sample, and of the large one.
        tolerance: relative difference that is rounding.

    Raises:
        CannotTellError: the model cannot be called with these batches.
    """
    if is_sharded(known.calls[0].model):
        raise CannotTellError(
            "the model is sharded by fully_shard, so all ranks would have to call it together"
        )
    call = _replayed(known)
    name = call.name or type(call.module).__name__
    with _evaluating(known.calls[0].model):
        small, small_beside, large, large_beside = (_output(call, batch) for batch in batches)
        again = dict(_output(call, batches[0]))
    if any(place in again and _relative(t, again[place]) > tolerance for place, t in small):
        raise CannotTellError(
            "the model says something else of the same batch when it is called again, "
            "as if it drew random numbers in evaluation mode, too"
        )
    if padded and all(tensor.ndim == 0 for _, tensor in small):
        return _by_loss([small, large, small_beside], extents, tolerance)
    packed = isinstance(batches[0], Packed)
    if packed:  # a causal layer changes nothing of what comes first
        mixed = max(
            _difference(large, large_beside, partial(_in_a_row, at_end=False)),
            _difference(large, small_beside, partial(_in_a_row, at_end=True)),
        )
    else:
        mixed = _difference(large, large_beside, _between)
    if mixed > tolerance:
        return Finding(
            "padding",
            Level.PROBLEM,
            f"What {name} says of a sample depends on the other samples of its batch: of a long "
            f"one, it changes by {mixed:.1%} beside a short one, although nothing is padded there.",
            _KEEP_APART if packed else _LEAVE_OUT,
            {"difference": mixed},
        )
    if not padded:
        says = f"Batches are not padded, and what {name} says of a sample depends on no other one."
        return Finding("padding", Level.OK, says)
    return _of_padding(name, _difference(small, small_beside, _between), tolerance)


def _of_padding(name: str, difference: float, tolerance: float) -> Finding:
    figures = {"difference": difference}
    if difference > tolerance:
        says = (
            f"What {name} says of a short sample changes by {difference:.1%} when it is padded "
            "beside a long one."
        )
        return Finding("padding", Level.PROBLEM, says, _MEND, figures)
    says = f"What {name} says of a short sample stays when it is padded beside a long one."
    return Finding("padding", Level.OK, says, figures=figures)


def _by_loss(
    outputs: list[list[tuple[Place, Tensor]]], extents: tuple[int, int], tolerance: float
) -> Finding:
    """Where the model returns its loss alone: a mean over samples, or over their elements.

    Args:
        outputs: of the small sample alone, of the large one alone, and of both.
        extents: elements of the small sample, and of the large one.
        tolerance: relative difference that is rounding.

    Raises:
        CannotTellError: the loss of both is no such mean, or a loss is not finite.
    """
    if len(outputs[0]) != 1:
        raise CannotTellError("the model returns several numbers, and no output for each sample")
    small, large, both = losses = [float(of[0][1]) for of in outputs]
    if not all(map(math.isfinite, losses)):
        raise CannotTellError("the model's loss is NaN or infinite")
    shares = [(0.5, 0.5), tuple(each / sum(extents) for each in extents)]
    scale = max(abs(small), abs(large), 1e-12)
    least = min(abs(a * small + b * large - both) / scale for a, b in shares)
    if least > tolerance:
        raise CannotTellError(
            "the model returns its loss alone, and that is no mean over samples or their elements "
            "(or depends on padding)"
        )
    return _of_padding("the loss", least, tolerance)


def _samples(known: SeenSession) -> tuple[Any, Any]:
    """A small and a large sample.

    Raises:
        CannotTellError: the data is a stream.
    """
    if isinstance(known.dataset, Stream):
        raise CannotTellError("the data is a stream, whose samples have no index")
    given = known.sizes
    if given is not None and given.min() < given.max():
        return load(known, int(given.argmin())), load(known, int(given.argmax()))
    numbers = np.unique(np.linspace(0, len(known.dataset) - 1, _LOOKED_AT).astype(int)).tolist()
    loaded = sorted((load(known, number) for number in numbers), key=extent)
    return loaded[0], loaded[-1]


def _is_padded(alone: Any, padded: Any) -> bool:
    """Whether a sample's tensors become larger beside another one, in more than the batch's size.

    Raises:
        CannotTellError: the batches are not alike.
    """
    if isinstance(alone, Packed):
        return False
    shapes = [dict(tensors(batch)) for batch in (alone, padded)]
    if shapes[0].keys() != shapes[1].keys() or not shapes[0]:
        raise CannotTellError("the batch is not made of tensors, lists, tuples and mappings")
    return any(tensor.numel() * 2 < shapes[1][place].numel() for place, tensor in shapes[0].items())


def _replayed(known: SeenSession) -> Call:
    """The call of the outermost part of the model that can be repeated with another batch.

    Raises:
        CannotTellError: there is none.
    """
    model = known.calls[0].model
    calls = [  # a smaller part, or a single layer, says nothing of the model
        call
        for call in known.calls[0].of_parts
        if call.module is model
        or (any(call.module.children()) and 2 * _parameters(call.module) >= _parameters(model))
    ]
    if not calls:
        raise CannotTellError("no part of the model is called with the batch's tensors as they are")
    return next((call for call in calls if not call.numbers), calls[0])


def _whole_numbers(value: Any) -> Iterator[int]:
    """Those above 1 in nested arguments, but for what a `Packed` has: that is made anew."""
    if isinstance(value, Packed):
        return
    if isinstance(value, int) and value > 1:
        yield value
    elif isinstance(value, Mapping):
        yield from _whole_numbers(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _whole_numbers(item)


def _parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _replaced(value: Any, by: Mapping[Place, Tensor], place: Place = ()) -> Any:
    """A copy of nested arguments with other tensors."""
    if place in by:
        return by[place]
    if isinstance(value, Mapping):
        return {key: _replaced(item, by, (*place, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_replaced(item, by, (*place, number)) for number, item in enumerate(value)]
        if isinstance(value, Packed):
            made = Packed(*items)
            return made._replace(max_seqlen=int(made.cu_seqlens.diff().max()))
        if isinstance(value, list):
            return items
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    return value


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """In evaluation mode and without gradients; afterwards the modes are as before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _difference(
    alone: list[tuple[Place, Tensor]],
    beside: list[tuple[Place, Tensor]],
    between: Callable[[Tensor, Tensor], float | None],
) -> float:
    """How much a sample's outputs differ, relative to the largest of them.

    Args:
        alone: outputs for a batch of the sample.
        beside: outputs for a batch of two samples.
        between: the same of one output; None: it has no row for each sample.

    Raises:
        CannotTellError: no output has a row for each sample, or numbers are not finite.
    """
    others = dict(beside)
    differences = [
        difference
        for place, tensor in alone
        if place in others and (difference := between(tensor, others[place])) is not None
    ]
    if not differences:
        raise CannotTellError("no output of the model has a row for each sample")
    if not all(map(math.isfinite, differences)):
        raise CannotTellError("the model's output has NaN or infinite numbers")
    return max(differences)


def _in_a_row(alone: Tensor, beside: Tensor, *, at_end: bool) -> float | None:
    """The difference where the samples of the output stand in a row, one behind the other.

    Args:
        alone: an output for one sample.
        beside: the same output for two samples.
        at_end: the sample is the second one.
    """
    if alone.ndim != beside.ndim:
        return None
    rows = [d for d in range(alone.ndim) if alone.size(d) != beside.size(d)]
    if len(rows) != 1 or (more := beside.size(rows[0]) - alone.size(rows[0])) < 0:
        return None
    return _relative(alone, beside.narrow(rows[0], more * at_end, alone.size(rows[0])))


def _between(alone: Tensor, beside: Tensor) -> float | None:
    """The difference where the samples' outputs are rows, of which the sample has the first.

    Padded positions are left out: at the end, or at the beginning where that is nearer.
    """
    if alone.ndim != beside.ndim:
        return None
    rows = [d for d in range(alone.ndim) if alone.size(d) == 1 and beside.size(d) == 2]
    if not rows:
        return None
    own, first = alone.select(rows[0], 0), beside.select(rows[0], 0)
    if any(a > b for a, b in zip(own.shape, first.shape, strict=True)):
        return None
    ends = (
        first[tuple(slice(0, n) for n in own.shape)],
        first[tuple(slice(m - n, m) for n, m in zip(own.shape, first.shape, strict=True))],
    )
    return min(_relative(own, end) for end in ends)


def _relative(alone: Tensor, beside: Tensor) -> float:
    """The largest difference of two tensors, relative to the largest number of the first.

    Infinite where one has NaN or an infinite number and the other another. NaN where no number is
    finite, so that nothing can be compared.
    """
    if not alone.numel():
        return 0.0
    finite = alone.isfinite() & beside.isfinite()
    same = (alone == beside) | (alone.isnan() & beside.isnan())
    if not (same | finite).all():
        return math.inf
    if not finite.any():
        return math.nan
    alone, beside = alone[finite], beside[finite]
    return float((alone - beside).abs().max()) / max(float(alone.abs().max()), 1e-12)
