"""Finds the group that shares this rank's batches, and the lane that reduces its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from paceline.train.meeting import TIMEOUT, Lanes, Meeting, gathered, one_of


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
