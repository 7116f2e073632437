"""Data-parallel groups in a larger mesh, as with tensor parallelism and data parallelism together.

A *group* gets local batches as a single rank does without a mesh: its ranks get the same samples
and split the model, as under tensor parallelism. A *lane* has one rank of each group: the ranks
with the same index in their groups. Gradients are reduced within a lane. Within a session, `rank`
is the group's number, and `world` is the number of groups. The ranks of lane 0 report for their
groups, and the first of them is the leader::

    startup = laned(start_up(…), mesh)  # by `Session`; `mesh` is the data-parallel part
    startup.lanes.members           # ranks of this rank's group, as numbered in the process group
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from paceline.train.startup import TIMEOUT, Lanes, Startup, gathered, one_of
from paceline.train.timing import RunningStep
from paceline.wire import Evaluation, StepRecord

logger = logging.getLogger(__name__)
# Timeout of a wait for the times of another rank of the group, because that rank may have ended.
_PATIENCE = timedelta(seconds=5)


def described(mesh: Any) -> list[Any] | None:
    """Return a mesh's shape and dimension names, which must be equal on all ranks.

    Return None for None. Raise a TypeError if `mesh` is neither None nor a DeviceMesh.
    """
    if mesh is None:
        return None
    if not hasattr(mesh, "mesh_dim_names") or not hasattr(mesh, "get_coordinate"):
        raise TypeError(
            f"mesh={mesh!r}: give the data-parallel part of a torch.distributed.DeviceMesh, such "
            'as mesh["dp"]'
        )
    return [list(mesh.mesh.shape), list(mesh.mesh_dim_names or ())]


def laned(startup: Startup, mesh: Any) -> Startup:
    """Return the `Startup` of this rank's lane; `startup` is for all ranks. All ranks call this.

    `mesh` is the data-parallel part of the script's mesh. If it is None or has all ranks, each rank
    is a group of its own, and the start-up stays as it is.

    Raises:
        ValueError: the mesh does not split the ranks into groups of equal size, or the mesh's ranks
            do not ascend.
    """
    if mesh is None:
        return startup
    mine = [int(rank) for rank in mesh.mesh.flatten()]
    if len(mine) == startup.world:
        lanes_of([mine] * startup.world)
        return startup
    ranks = lanes_of(gathered(startup.world, mine))
    place, number = ranks.index(mine), mine.index(startup.rank)
    # Models reduce BatchNorm statistics in this process group, and the statistics may be on a GPU.
    # So the process group has the default backend, which supports the model's device.
    lanes = Lanes(ranks, place, number, one_of(ranks, mine, timeout=TIMEOUT))
    stores = [
        PrefixStore(f"lane/{other}", startup.store) if other else startup.store
        for other in range(len(ranks))
    ]
    return replace(
        startup, rank=number, world=len(mine), store=stores[place], lanes=lanes, stores=stores
    )


def lanes_of(words: Sequence[list[int]]) -> list[list[int]]:
    """Return the lanes, each a list of ranks; raise a ValueError in the same cases as `laned`.

    `words` has an entry for each rank: the ranks in the data-parallel part that it belongs to.
    """
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


@dataclass
class PendingTimes:
    """Times of a group's ranks in one step, whose all-gather may still be running."""

    # For each rank of the group: [data_s, compute_s].
    times: list[Tensor]
    work: Any
    # The tensor that was sent, which must not be freed before `work` is done.
    own: Tensor

    def read(self) -> list[tuple[float, float]]:
        """Return (data_s, compute_s) of each rank of the group; empty if a rank has ended."""
        with suppress(RuntimeError):
            self.work.wait(_PATIENCE)
            return [(float(each[0]), float(each[1])) for each in self.times]
        return []


class GroupTimes:
    """Exchange of step times among the ranks of a group. Not thread-safe.

    The ranks of a group wait for each other within their forward and backward passes, and each rank
    measures these waits as computing. The rank that has its gradients last is the slowest.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._group, self._lanes = lanes.of_members(), lanes
        self._slowest: Counter[int] = Counter()

    def send(self, data_s: float, compute_s: float) -> PendingTimes:
        """Send this rank's times of a step. All ranks of the group call this for each step."""
        own = torch.tensor([data_s, compute_s], dtype=torch.float64)
        times = [torch.zeros_like(own) for _ in self._lanes.members]
        return PendingTimes(times, dist.all_gather(times, own, self._group, async_op=True), own)

    def slowest(self, record: StepRecord, sent: PendingTimes) -> StepRecord:
        """Return a step's record with the times of its group (see `joint`).

        Count which rank of the group was the slowest.
        """
        times = sent.read()
        if not times:
            return record
        busy = [sum(each) for each in times]
        self._slowest[self._lanes.members[busy.index(max(busy))]] += 1
        return joint(record, times)

    def close(self) -> None:
        """Log which rank was the slowest most often, and end the process group."""
        total = self._slowest.total()
        for rank, steps in self._slowest.most_common(1):
            logger.info(
                "data-parallel group %d: rank %d was the slowest of ranks %s in %d of %d steps",
                *(self._lanes.number, rank, self._lanes.members, steps, total),
            )
        self._slowest.clear()
        # The script may have destroyed all process groups.
        with suppress(ValueError):
            dist.destroy_process_group(self._group)


def joint(record: StepRecord, times: list[tuple[float, float]]) -> StepRecord:
    """Return the reporting rank's `record` with times derived from those of its group's ranks.

    `times` has (data_s, compute_s) of each rank of the group.

    The loading time is the longest of all ranks of the group. Ranks that load faster wait within
    their passes, and the result counts this wait as loading. The computing time ends when the last
    rank has computed its gradients.
    """
    data_s = max(data for data, _ in times)
    compute_s = max(data + compute for data, compute in times) - data_s
    longer_s = data_s + compute_s - record.data_s - record.compute_s
    # The reporting rank has counted `longer_s` as waiting.
    sync_s = max(0.0, record.sync_s - longer_s)
    return msgspec.structs.replace(record, data_s=data_s, compute_s=compute_s, sync_s=sync_s)


class SilentReporter:
    """Reporter of a rank that does not report for its group: it only sends times to the group."""

    def __init__(self, times: GroupTimes) -> None:
        self._times = times
        self._finished: list[RunningStep] = []
        self._sent: list[PendingTimes] = []

    def accept(self, running: RunningStep) -> None:
        """Accept a finished step; send its times once the device has completed it.

        The times of earlier steps are sent now, even if that requires waiting for the device.
        """
        self._finished.append(running)
        while self._finished and (len(self._finished) > 1 or self._finished[0].readable):
            self._send(self._finished.pop(0))
        del self._sent[:-2]

    def _send(self, running: RunningStep) -> None:
        compute_s, _, _ = running.read()
        self._sent.append(self._times.send(running.data_s, compute_s))

    def flush(self) -> None:
        """Send the times of all finished steps now."""
        while self._finished:
            self._send(self._finished.pop(0))
        for sent in self._sent:
            sent.read()
        self._sent.clear()

    def reported(self) -> None:
        """Send the times of all finished steps; the reporting rank reports them."""
        self.flush()

    def evaluated(self, evaluation: Evaluation) -> None:
        """Do nothing: the reporting rank reports its own evaluation."""
