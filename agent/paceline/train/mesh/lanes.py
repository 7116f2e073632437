"""Finds the group that shares this rank's batches, and the lane that reduces its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from paceline.core.errors import PacelineError
from paceline.data import Sharded, Stream
from paceline.train.meeting import TIMEOUT, Lanes, Meeting, gathered, one_of, rank_and_world

_BESIDE = {
    "uneven_steps": "ranks of a group run each step together: leave uneven_steps out",
    "micro_batches": "each pass needs the other groups' ranks: leave micro_batches out",
}


def described(mesh: Any) -> list[Any] | None:
    """Return a mesh's shape and dimension names, which must be equal on all ranks.

    Raise a TypeError for other values.
    """
    if mesh is None:
        return None
    if not hasattr(mesh, "mesh_dim_names") or not hasattr(mesh, "get_coordinate"):
        raise TypeError(
            f"mesh={mesh!r}: give the data-parallel part of a torch.distributed.DeviceMesh, such "
            'as mesh["dp"]'
        )
    return [list(mesh.mesh.shape), list(mesh.mesh_dim_names or ())]


def refuse_beside(mesh: Any, dataset: Any, switches: Mapping[str, bool]) -> None:
    """Refuse arguments of `Session` that groups of several ranks do not support.

    The ValueError names the argument.
    """
    if mesh is None or mesh.mesh.numel() == rank_and_world()[1]:
        return
    for name, why in _BESIDE.items():
        if switches[name]:
            raise ValueError(f"mesh and {name} cannot be combined: {why}")
    for kind in (Stream, Sharded):
        if isinstance(dataset, kind):
            raise ValueError(
                f"mesh and paceline.data.{kind.__name__} cannot be combined: each rank of a group "
                "would read separately; give data that each rank can read by index"
            )


def refuse_profile(lanes: Lanes | None) -> None:
    """Raise a PacelineError for `Session.profile` with groups of several ranks."""
    if lanes is not None:
        raise PacelineError(
            "profile: ranks of a group compute each batch together, so no rank can run trial "
            "batches alone: do not call it; give Session(limits=…) if memory is short"
        )


def laned(meeting: Meeting, mesh: Any) -> Meeting:
    """Narrow a rendezvous of all ranks to this rank's lane. Collective.

    If the mesh, the data-parallel part, is None or has all ranks, each rank is a group.

    Raises:
        ValueError: the mesh does not split the ranks into groups of equal size, or its ranks do
            not ascend.
    """
    if mesh is None:
        return meeting
    mine = [int(rank) for rank in mesh.mesh.flatten()]
    if len(mine) == meeting.world:
        lanes_of([mine] * meeting.world)
        return meeting
    ranks = lanes_of(gathered(meeting.world, mine))
    place, number = ranks.index(mine), mine.index(meeting.rank)
    # Models reduce their statistics in this group, on their device, so it has the default backend.
    lanes = Lanes(ranks, place, number, one_of(ranks, mine, timeout=TIMEOUT))
    stores = [
        PrefixStore(f"lane/{other}", meeting.store) if other else meeting.store
        for other in range(len(ranks))
    ]
    return replace(
        meeting, rank=number, world=len(mine), store=stores[place], lanes=lanes, stores=stores
    )


def lanes_of(words: Sequence[list[int]]) -> list[list[int]]:
    """Return the lanes in order, from each rank's part of the mesh; raise as `laned` does."""
    lanes = sorted([list(lane) for lane in {tuple(word) for word in words}])
    every = sorted(rank for lane in lanes for rank in lane)
    own = all(rank in word for rank, word in enumerate(words))
    if every != list(range(len(words))) or not own or len({len(lane) for lane in lanes}) > 1:
        raise ValueError(
            f"mesh: its data-parallel parts {lanes} do not split the {len(words)} ranks into "
            'groups of equal size: make one mesh of all ranks, and give Session mesh["dp"] of it'
        )
    for lane in lanes:
        if lane != sorted(lane):
            raise ValueError(
                f"mesh: ranks {lane} of its data-parallel part are not in ascending order: create "
                "the mesh with ranks in order, as init_device_mesh does"
            )
    return lanes
