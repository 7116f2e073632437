"""The synchronisations of a segment: one type for each way in which ranks synchronise gradients.

    Partial(PartialRules(probes=2, staleness=4, mean=True))

travels as ``{"name": "partial", "parameters": {"staleness": 4, "mean": true, "probes": 2}}``. A
parameter that has its default is left out. Decoding rejects values with which training is
impossible for any number of ranks. `Synchronisation.defect` also checks the values against the
number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from paceline.wire.defects import worded

_LARGEST_INTEGER = 2**31 - 1
Natural = Annotated[int, Meta(ge=0, le=_LARGEST_INTEGER)]
Positive = Annotated[int, Meta(ge=1, le=_LARGEST_INTEGER)]


class _Rules(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Parameters of a synchronisation. A field without a default is always encoded."""


class NoRules(_Rules, frozen=True):
    """The type of `parameters` for a synchronisation that has no parameters."""


class OuterRules(_Rules, frozen=True, kw_only=True):
    """Parameters of the outer optimiser: SGD with Nesterov momentum on the mean of replicas.

    The outer gradient is the change of the mean of all replicas since the previous mean.
    """

    rate: Annotated[float, Meta(gt=0, le=10)]
    momentum: Annotated[float, Meta(ge=0, lt=1)]


class AveragingRules(_Rules, frozen=True, kw_only=True):
    """Parameters of averaging: when replicas are averaged, and how the mean is applied."""

    # Number of steps between two means; None: replicas are averaged only at an epoch's end.
    every: Positive | None
    # Rules of the outer optimiser; None: ranks continue with the mean itself.
    outer: OuterRules | None = None
    # Number of parts of the parameters, each of which is averaged at steps of its own.
    parts: Positive = 1
    # Number of steps that ranks make while a mean is computed.
    overlap: Natural = 0
    # Weight of a rank's own replica in the result if ranks made steps while the mean was computed.
    keep: Annotated[float, Meta(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        if self.parts > (self.every or 1):
            raise ValueError(
                f"parts: {self.parts}; give {self.every or 1} or less: at most `every`"
            )
        most = 0 if self.every is None else self.every // self.parts
        # A longer overlap would compute two means at once.
        if self.overlap > most:
            raise ValueError(
                f"overlap: {self.overlap}; give {most} or less: at most `every` / `parts`"
            )


class RoundRules(_Rules, frozen=True, kw_only=True):
    """Parameters of partial all-reduces: which rank calls a round, and how far ranks may drift.

    Exactly one of `probes`, `quorum`, `parts` and `spare` is set: the rule for which rank calls a
    round.
    """

    # Number of rounds after which a gradient is dropped; None: never. See `core.rounds.Drift`.
    staleness: Natural | None
    # True: several gradients of a rank for the same round are replaced by their mean. False: by
    # their sum.
    mean: bool
    # Maximum number of steps that a rank may be ahead of the slowest rank; None: any number.
    lead: Natural | None = None
    # True: after its k-th step a rank waits until k rounds have ended.
    waits: bool = False
    # True: only ranks that have completed k steps call the k-th round.
    paced: bool = False
    # This many ranks are drawn for each round, and the first of them to be ready calls it. None:
    # all ranks are drawn.
    probes: Positive | UnsetType | None = UNSET
    # A round is called as soon as this many ranks are ready.
    quorum: Positive | UnsetType = UNSET
    # A round is called as soon as the number of ready ranks is the number of all ranks divided by
    # this value, rounded up.
    parts: Positive | UnsetType = UNSET
    # A round is called as soon as all ranks except this many are ready.
    spare: Natural | UnsetType = UNSET

    def __post_init__(self) -> None:
        callers = (self.probes, self.quorum, self.parts, self.spare)
        if sum(caller is not UNSET for caller in callers) != 1:
            raise ValueError("give exactly one of probes, quorum, parts and spare")

    def ready(self, world: int) -> int:
        """Return how many ranks must be ready for a round under `quorum`, `parts` or `spare`."""
        if self.parts is not UNSET:
            return -(-world // self.parts)
        if self.spare is not UNSET:
            return max(1, world - self.spare)
        assert self.quorum is not UNSET
        return self.quorum


class PartialRules(RoundRules, frozen=True, kw_only=True):
    """Parameters of rounds among all ranks."""


class HierarchicalRules(RoundRules, frozen=True, kw_only=True):
    """Parameters of rounds within groups of ranks, with a parameter server between the groups."""

    # Each rank is in exactly one group.
    groups: list[Annotated[list[Natural], Meta(min_length=1)]]
    # Number of rounds of a group between two exchanges with the parameter server; None: a group
    # exchanges its changes only when all ranks synchronise.
    every: Positive | None


class _SyncBase(msgspec.Struct, frozen=True, tag_field="name", forbid_unknown_fields=True):
    @property
    def name(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def digest(self) -> str:
        """16 hex digits that are equal for equal name and parameters, in any process."""
        # Encode a mapping instead of the Struct: "deterministic" sorts the keys of mappings, but
        # leaves the fields of a Struct in the order of their declaration, which may change.
        text = msgspec.json.encode(msgspec.to_builtins(self), order="deterministic")
        return hashlib.blake2b(text, digest_size=8).hexdigest()

    @property
    def alone(self) -> int | None:
        """Maximum number of steps or rounds before the other ranks receive a rank's updates.

        None: no limit.
        """
        return 0

    @property
    def stale(self) -> bool:
        return False

    def defect(self, world: int | None = None) -> str | None:
        """Return why `world` ranks cannot train with the synchronisation; None if they can.

        With `world` None, return None if at least one number of ranks can train. A value made in
        Python may hold anything, since only decoding checks types and ranges.
        """
        try:
            decode(msgspec.msgpack.encode(self))
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            return f"synchroniser {self.name!r}: {error}"
        return None if world is None else self._defect(world)

    def _defect(self, world: int) -> str | None:
        return None


class AllReduce(_SyncBase, frozen=True, tag="allreduce"):
    """DDP's all-reduce after each step."""

    parameters: NoRules = NoRules()


class Averaging(_SyncBase, frozen=True, tag="averaging"):
    """Independent steps of the ranks; after some steps, all replicas are replaced by their mean."""

    parameters: AveragingRules

    @property
    def alone(self) -> int | None:
        """Maximum number of steps until other ranks receive a rank's updates; None: no limit."""
        rules = self.parameters
        return None if rules.every is None else rules.every + rules.overlap


class Pairwise(_SyncBase, frozen=True, tag="pairwise"):
    """Synchronisation in pairs.

    After each step of a rank, the mean of its replica and another rank's replica replaces both.
    """

    parameters: NoRules = NoRules()

    @property
    def alone(self) -> int | None:
        """Maximum number of steps before another rank receives a rank's updates: 1."""
        return 1


class Partial(_SyncBase, frozen=True, tag="partial"):
    """Synchronisation in rounds, each of which reduces the gradients that are ready."""

    parameters: PartialRules

    @property
    def alone(self) -> int | None:
        """Maximum number of steps or rounds before the other ranks receive a rank's updates.

        None: no limit.
        """
        rules = self.parameters
        return rules.lead if rules.staleness is None else rules.staleness

    @property
    def stale(self) -> bool:
        """True if a round may apply gradients that were computed in earlier rounds."""
        return self.parameters.staleness != 0


class Hierarchical(_SyncBase, frozen=True, tag="hierarchical"):
    """`Partial` synchronisation within groups, and a parameter server between the groups."""

    parameters: HierarchicalRules

    @property
    def alone(self) -> int | None:
        """Maximum number of rounds until other groups receive a group's updates; None: no limit."""
        return self.parameters.every

    @property
    def stale(self) -> bool:
        """True if a round may apply gradients that were computed in earlier rounds."""
        return self.parameters.staleness != 0

    def _defect(self, world: int) -> str | None:
        groups = self.parameters.groups
        if sorted(rank for group in groups for rank in group) == list(range(world)):
            return None
        return (
            f"synchroniser 'hierarchical': parameters.groups: {groups} do not match {world} "
            f"ranks; each rank from 0 to {world - 1} must be in exactly one group"
        )


Synchronisation = AllReduce | Averaging | Pairwise | Partial | Hierarchical

ALLREDUCE: Synchronisation = AllReduce()
SYNC_NAMES = ("allreduce", "averaging", "hierarchical", "pairwise", "partial")

_decoder: msgspec.msgpack.Decoder[Synchronisation] = msgspec.msgpack.Decoder(Synchronisation)


def decode(data: bytes) -> Synchronisation:
    """Decode a synchronisation from MessagePack; raise a ValueError that names a wrong field."""
    try:
        return _decoder.decode(data)
    except msgspec.ValidationError as error:
        raise ValueError(worded(error)) from error
    except RecursionError as error:
        raise ValueError(f"nested too deep: {error}") from error


def convert(name: str, parameters: Mapping[str, Any] | None = None) -> Synchronisation:
    """Return the synchronisation with this name, and with parameters as JSON holds them.

    Raise a ValueError if the name is unknown, or if the synchronisation does not accept a
    parameter.
    """
    if name not in SYNC_NAMES:
        raise ValueError(f"synchroniser {name!r} is unknown: choose from {', '.join(SYNC_NAMES)}")
    try:
        made: Synchronisation = msgspec.convert(
            {"name": name, "parameters": dict(parameters or {})}, Synchronisation
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"synchroniser {name!r}: {worded(error)}") from error
    return made
