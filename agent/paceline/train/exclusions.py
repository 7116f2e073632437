"""Options of a session that exclude each other, in one table.

Options that a model excludes are in `refusals`.
"""

from __future__ import annotations

from collections.abc import Set

from paceline.core.errors import PacelineError

_STREAM, _SHARDED = "paceline.data.Stream", "paceline.data.Sharded"
_APART = (
    "ranks of a group need the same samples, but each rank would read its own; give data that each "
    "rank can read by index"
)
_PAIRS = {
    ("uneven_steps", "micro_batches"): "leave one out",
    ("loss_mean='ranks'", "micro_batches"): "the weight of a micro-batch in such a loss is "
    "unknown; leave micro_batches out",
    ("drop_last", "token_budget"): "the number of samples varies between steps, so no step counts "
    "as incomplete: leave drop_last out",
    (
        "limits",
        "token_budget",
    ): "limits counts samples: give token_limits, in the unit of the sizes",
    ("shapes", "token_budget"): "the number of samples in a step varies, so ranks cannot always "
    "get multiples of a number: give Shapes(length=…) without samples",
    ("uneven_steps", "token_budget"): "relaxed policies cannot keep a token budget: leave "
    "uneven_steps out",
    (_STREAM, "token_budget"): "the sizes of later samples are unknown; give global_batch",
    (_SHARDED, "token_budget"): "a step gets samples in the epoch's order, and a rank may not have "
    "them on its node; give global_batch, or data that each rank can read",
    ("mesh", "uneven_steps"): "ranks of a group run each step together: leave uneven_steps out",
    ("mesh", "micro_batches"): "ranks of different groups gather parameters from each other in "
    "each pass, but groups would have different numbers of passes: leave micro_batches out",
    ("mesh", _STREAM): _APART,
    ("mesh", _SHARDED): _APART,
}
_WITH_STREAM = {
    "sizes": "give paceline.data.Stream(size=…) instead",
    "shapes": "leave it out",
    "uneven_steps": "leave it out",
    "micro_batches": "leave it out",
}
_CALLS = {
    ("profile", "token_budget"): "it measures how many samples fit into memory, but with "
    "token_budget the number of samples in a step varies: do not call it, and give Session "
    "token_limits",
    ("profile", _STREAM): "not supported with a stream, whose samples have no index; give "
    "Session(limits=…)",
    ("profile", "mesh"): "ranks of a group compute each batch together, so no rank can run trial "
    "batches alone: do not call it; give Session(limits=…) if memory is short",
    ("checkpoint", _STREAM): "not supported with a stream, which cannot be resumed in the middle "
    "of an epoch; save session.state_dict() with your own state after each epoch",
}


def refuse(given: Set[str]) -> None:
    """Raise a ValueError if a session is given options that exclude each other."""
    for (first, second), why in _PAIRS.items():
        if first in given and second in given:
            raise ValueError(f"{first} and {second} cannot be combined: {why}")
    for name, why in _WITH_STREAM.items():
        if _STREAM in given and name in given:
            raise ValueError(f"{name}: not supported with a stream; {why}")


def refuse_call(call: str, given: Set[str]) -> None:
    """Raise a PacelineError if an option in `given` excludes a call of the method `call`."""
    for (name, option), why in _CALLS.items():
        if name == call and option in given:
            raise PacelineError(f"{call}: {why}")
