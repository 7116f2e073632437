"""How gradients meet in a segment: one type for each synchroniser, with what it takes.

    Partial(PartialRules(probes=2, staleness=4, mean=True))

travels as ``{"name": "partial", "parameters": {"staleness": 4, "mean": true, "probes": 2}}``. A
parameter that has its default is left out. Decoding refuses what ranks could not train with, except
for what depends on how many ranks there are: `Synchronisation.problem` checks all of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from paceline.wire.wording import worded

_MOST = 2**31 - 1
Natural = Annotated[int, Meta(ge=0, le=_MOST)]
Positive = Annotated[int, Meta(ge=1, le=_MOST)]


class _Rules(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a synchroniser takes. A field without a default always travels."""


class NoRules(_Rules, frozen=True):
    """The synchroniser takes no parameters."""


class OuterRules(_Rules, frozen=True, kw_only=True):
    """An optimiser of the means: SGD with Nesterov momentum on what replicas changed since."""

    rate: Annotated[float, Meta(gt=0, le=10)]
    momentum: Annotated[float, Meta(ge=0, lt=1)]


class AveragingRules(_Rules, frozen=True, kw_only=True):
    """When replicas become their mean, and what becomes of the mean."""

    every: Positive | None  # steps between two means; None: only at an epoch's end
    outer: OuterRules | None = None  # None: the mean itself is what ranks go on with
    parts: Positive = 1  # of the parameters, each of which has its means at steps of its own
    overlap: Natural = 0  # steps that ranks make while a mean is on its way
    keep: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # share of a rank's own replica, with overlap

    def __post_init__(self) -> None:
        if self.parts > (self.every or 1):
            raise ValueError(f"parts: {self.parts}; give {self.every or 1} or less, as `every`")
        most = 0 if self.every is None else self.every // self.parts
        if self.overlap > most:  # else two means would be on their way at once
            raise ValueError(f"overlap: {self.overlap}; give {most} or less, as `every` / `parts`")


class RoundRules(_Rules, frozen=True, kw_only=True):
    """Who calls a round of a partial all-reduce, and how far ranks may drift apart.

    Exactly one of `probes`, `quorum`, `parts` and `spare` says who calls a round.
    """

    staleness: Natural | None  # rounds after which a gradient is dropped; None: never
    mean: bool  # a rank's gradients that waited for the same round count as one; else their sum
    lead: Natural | None = None  # steps that a rank may be ahead of the slowest; None: any number
    waits: bool = False  # after its k-th step a rank waits until k rounds are over
    paced: bool = False  # only ranks that are through with k steps call the k-th round
    # The first to be ready, of so many ranks drawn for each round, calls it; None: of all ranks.
    probes: Positive | UnsetType | None = UNSET
    quorum: Positive | UnsetType = UNSET  # a round is called as soon as so many ranks are ready,
    parts: Positive | UnsetType = UNSET  # or one rank in so many, rounded up,
    spare: Natural | UnsetType = UNSET  # or all ranks but so many

    def __post_init__(self) -> None:
        callers = (self.probes, self.quorum, self.parts, self.spare)
        if sum(caller is not UNSET for caller in callers) != 1:
            raise ValueError("exactly one of probes, quorum, parts and spare is needed")

    def ready(self, world: int) -> int:
        """How many of `world` ranks must be ready for a round, where none are drawn for it."""
        if self.parts is not UNSET:
            return -(-world // self.parts)
        if self.spare is not UNSET:
            return max(1, world - self.spare)
        assert self.quorum is not UNSET
        return self.quorum


class PartialRules(RoundRules, frozen=True, kw_only=True):
    """Rounds among all ranks."""


class HierarchicalRules(RoundRules, frozen=True, kw_only=True):
    """Rounds within groups of ranks, and a parameter server between the groups."""

    groups: list[Annotated[list[Natural], Meta(min_length=1)]]  # each rank is in one of them
    every: Positive | None  # rounds of a group between two exchanges; None: only where all meet


class _Synchroniser(msgspec.Struct, frozen=True, tag_field="name", forbid_unknown_fields=True):
    @property
    def name(self) -> str:
        """The synchroniser's name."""
        return str(self.__struct_config__.tag)

    @property
    def digest(self) -> str:
        """16 hex digits: the same for the same name and parameters, in any process."""
        # As a mapping: the order of a Struct's fields is that of its declaration.
        text = msgspec.json.encode(msgspec.to_builtins(self), order="deterministic")
        return hashlib.blake2b(text, digest_size=8).hexdigest()

    @property
    def alone(self) -> int | None:
        """Most steps or rounds after which a rank's work reaches others; None: any number."""
        return 0

    @property
    def stale(self) -> bool:
        """Whether rounds may apply gradients that were computed rounds before."""
        return False

    def problem(self, world: int | None = None) -> str | None:
        """Why `world` ranks cannot train with it; None if they can, or if they can for some world.

        A value made in Python may hold anything: only decoding checks types and ranges.
        """
        try:
            decode(msgspec.msgpack.encode(self))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            return f"synchroniser {self.name!r}: {error}"
        return None if world is None else self._problem(world)

    def _problem(self, world: int) -> str | None:
        return None


class AllReduce(_Synchroniser, frozen=True, tag="allreduce"):
    """DDP's all-reduce after each step."""

    parameters: NoRules = NoRules()


class Averaging(_Synchroniser, frozen=True, tag="averaging"):
    """Each rank steps by itself; at times all replicas become their mean."""

    parameters: AveragingRules

    @property
    def alone(self) -> int | None:
        """Most steps or rounds after which a rank's work reaches others; None: any number."""
        rules = self.parameters
        return None if rules.every is None else rules.every + rules.overlap


class Pairwise(_Synchroniser, frozen=True, tag="pairwise"):
    """Each rank steps by itself; after each step two replicas become their mean."""

    parameters: NoRules = NoRules()

    @property
    def alone(self) -> int | None:
        """Most steps or rounds after which a rank's work reaches others; None: any number."""
        return 1


class Partial(_Synchroniser, frozen=True, tag="partial"):
    """Each round reduces the gradients that are ready."""

    parameters: PartialRules

    @property
    def alone(self) -> int | None:
        """Most steps or rounds after which a rank's work reaches others; None: any number."""
        rules = self.parameters
        return rules.lead if rules.staleness is None else rules.staleness

    @property
    def stale(self) -> bool:
        """Whether rounds may apply gradients that were computed rounds before."""
        return self.parameters.staleness != 0


class Hierarchical(_Synchroniser, frozen=True, tag="hierarchical"):
    """As `Partial` within groups of ranks; groups exchange what they changed by a server."""

    parameters: HierarchicalRules

    @property
    def alone(self) -> int | None:
        """Most steps or rounds after which a rank's work reaches others; None: any number."""
        return self.parameters.every

    @property
    def stale(self) -> bool:
        """Whether rounds may apply gradients that were computed rounds before."""
        return self.parameters.staleness != 0

    def _problem(self, world: int) -> str | None:
        groups = self.parameters.groups
        if sorted(rank for group in groups for rank in group) == list(range(world)):
            return None
        return (
            f"synchroniser 'hierarchical': parameters.groups: {groups} are not those of {world} "
            f"ranks; each rank from 0 to {world - 1} must be in exactly one group"
        )


Synchronisation = AllReduce | Averaging | Pairwise | Partial | Hierarchical

ALLREDUCE: Synchronisation = AllReduce()
SYNCHRONISERS = ("allreduce", "averaging", "hierarchical", "pairwise", "partial")  # their names

_decoder: msgspec.msgpack.Decoder[Synchronisation] = msgspec.msgpack.Decoder(Synchronisation)


def decode(data: bytes) -> Synchronisation:
    """The synchronisation in a MessagePack text.

    Raises:
        ValueError: it is none; the message names the field.
    """
    try:
        return _decoder.decode(data)
    except msgspec.ValidationError as error:
        raise ValueError(worded(error)) from error
    except RecursionError as error:
        raise ValueError(f"nested too deep: {error}") from error


def convert(name: str, parameters: Mapping[str, Any] | None = None) -> Synchronisation:
    """The synchroniser of this name with these parameters, as they stand in JSON.

    Raises:
        ValueError: ranks know no such synchroniser, or it does not take these parameters.
    """
    if name not in SYNCHRONISERS:
        raise ValueError(f"synchroniser {name!r}: ranks know {', '.join(SYNCHRONISERS)}")
    try:
        made: Synchronisation = msgspec.convert(
            {"name": name, "parameters": dict(parameters or {})}, Synchronisation
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"synchroniser {name!r}: {worded(error)}") from error
    return made
