"""Which parameters each synchroniser takes, and why a plan's are refused."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from paceline.wire import SYNCHRONISERS, Synchronisation

_Positive = Annotated[int, Meta(ge=1)]
_Natural = Annotated[int, Meta(ge=0)]


class _None(msgspec.Struct, forbid_unknown_fields=True):
    """No parameters."""


class _Averaging(msgspec.Struct, forbid_unknown_fields=True):
    every: _Positive | None


class _Partial(msgspec.Struct, forbid_unknown_fields=True):
    """Who calls a round is said by one of the four from `probes` on."""

    staleness: _Natural | None
    mean: bool
    lead: _Natural | None = None
    waits: bool = False
    paced: bool = False
    steals: bool = False
    probes: _Natural | msgspec.UnsetType | None = msgspec.UNSET
    parts: _Positive | msgspec.UnsetType = msgspec.UNSET
    spare: _Natural | msgspec.UnsetType = msgspec.UNSET
    quorum: _Positive | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if all(c is msgspec.UNSET for c in (self.probes, self.parts, self.spare, self.quorum)):
            raise ValueError("one of probes, parts, spare and quorum is needed")


class _Hierarchical(_Partial, forbid_unknown_fields=True, kw_only=True):
    groups: list[Annotated[list[int], Meta(min_length=1)]]
    every: _Positive | None


_PARAMETERS: dict[str, type[msgspec.Struct]] = {
    "allreduce": _None,
    "averaging": _Averaging,
    "hierarchical": _Hierarchical,
    "pairwise": _None,
    "partial": _Partial,
}
assert set(_PARAMETERS) == set(SYNCHRONISERS)


def refusal(what: Synchronisation, world: int) -> str | None:
    """Why ranks cannot use this synchroniser with these parameters; None if they can.

    Args:
        what: from a plan; its parameters may be anything that MessagePack can hold.
        world: number of ranks.
    """
    if what.name not in _PARAMETERS:
        return f"synchroniser {what.name!r} is not known to paceline here"
    try:
        parameters = msgspec.convert(what.parameters, _PARAMETERS[what.name])
    except (msgspec.ValidationError, RecursionError) as error:
        return f"the parameters of synchroniser {what.name!r} are malformed: {error}"
    if not isinstance(parameters, _Hierarchical):
        return None
    if sorted(rank for group in parameters.groups for rank in group) != list(range(world)):
        return f"groups {parameters.groups} of {what.name!r} are not those of {world} ranks"
    return None
