"""What a step takes a group of ranks that share its batch: what its slowest rank takes."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.train.meeting import Lanes
from paceline.train.timing import RunningStep
from paceline.wire import Evaluation, StepRecord

logger = logging.getLogger(__name__)

_PATIENCE = timedelta(seconds=5)  # for a rank of the group that may have ended


@dataclass
class PendingTimes:
    """The times of a group's ranks in one step, which may be on their way."""

    times: list[Tensor]  # of each member: data_s and compute_s
    work: Any
    own: Tensor  # what was sent, which must live until then

    def read(self) -> list[tuple[float, float]]:
        """Of each member; empty: a member has ended."""
        with suppress(RuntimeError):
            self.work.wait(_PATIENCE)
            return [(float(each[0]), float(each[1])) for each in self.times]
        return []


class GroupTimes:
    """Tells the ranks of a group what the others' steps took. For one thread.

    The ranks of a group wait for each other within their passes, and that counts as computing. So
    their times are nearly alike, and the last rank to have its gradients is the slowest.

    Args:
        lanes: of the mesh.
    """

    def __init__(self, lanes: Lanes) -> None:
        self._group, self._lanes = lanes.of_members(), lanes
        self._slowest: Counter[int] = Counter()  # steps in which each member was the slowest

    def tell(self, data_s: float, compute_s: float) -> PendingTimes:
        """Tells this rank's times of a step; all ranks of the group call it for the same steps."""
        own = torch.tensor([data_s, compute_s], dtype=torch.float64)
        times = [torch.zeros_like(own) for _ in self._lanes.members]
        return PendingTimes(times, dist.all_gather(times, own, self._group, async_op=True), own)

    def slowest(self, record: StepRecord, sent: PendingTimes) -> StepRecord:
        """A step's record with the times of the slowest rank of the group."""
        times = sent.read()
        if not times:
            return record
        busy = [sum(each) for each in times]
        self._slowest[self._lanes.members[busy.index(max(busy))]] += 1
        return joint(record, times)

    def close(self) -> None:
        """Says which rank was the slowest, and ends the process group."""
        total = self._slowest.total()
        for rank, steps in self._slowest.most_common(1):
            logger.info(
                "data-parallel group %d: rank %d was the slowest of ranks %s in %d of %d steps",
                *(self._lanes.number, rank, self._lanes.members, steps, total),
            )
        self._slowest.clear()
        with suppress(ValueError):  # the script has ended all groups
            dist.destroy_process_group(self._group)


def joint(record: StepRecord, times: list[tuple[float, float]]) -> StepRecord:
    """A step's record with the times of a group.

    Loading takes as long as on the rank that loads longest; the ranks that load faster wait for it
    in their passes, which is no computing. Computing ends where the last rank ends it.

    Args:
        record: of the rank that speaks for the group.
        times: data_s and compute_s of each rank of the group.
    """
    data_s = max(data for data, _ in times)
    compute_s = max(data + compute for data, compute in times) - data_s
    longer_s = data_s + compute_s - record.data_s - record.compute_s
    sync_s = max(0.0, record.sync_s - longer_s)  # the speaker was waiting meanwhile
    return msgspec.structs.replace(record, data_s=data_s, compute_s=compute_s, sync_s=sync_s)


class SilentReporter:
    """In place of a reporter, on a rank that does not speak for its group: tells its times only.

    Args:
        times: of the group.
    """

    def __init__(self, times: GroupTimes) -> None:
        self._times = times
        self._over: list[RunningStep] = []
        self._sent: list[PendingTimes] = []

    def over(self, running: RunningStep) -> None:
        """Takes a finished step; reads it once the device is through with it, or a step later."""
        self._over.append(running)
        while self._over and (len(self._over) > 1 or self._over[0].readable):
            self._tell(self._over.pop(0))
        del self._sent[:-2]

    def _tell(self, running: RunningStep) -> None:
        compute_s, _, _ = running.read()
        self._sent.append(self._times.tell(running.data_s, compute_s))

    def flush(self) -> None:
        """Tells the times of all finished steps now."""
        while self._over:
            self._tell(self._over.pop(0))
        for sent in self._sent:
            sent.read()
        self._sent.clear()

    def reported(self) -> None:
        """Tells the times of all finished steps. The rank that speaks reports them."""
        self.flush()

    def evaluated(self, evaluation: Evaluation) -> None:
        """Does nothing: the rank that speaks reports its own."""
