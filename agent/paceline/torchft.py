"""torchft with Paceline: a global batch that stays the same while replica groups come and go.

torchft trains in replica groups, and each step has those groups that are in its quorum. torchft's
own sampler gives each group a fixed shard, so samples of a lost group are skipped, and the global
batch shrinks with the number of groups. `Batches` divides the step's global batch among the groups
in the quorum instead::

    batches = Batches(manager, samples=len(data), global_batch=64, sizes=lengths)
    while batches.epoch < epochs:
        optimizer.zero_grad()  # torchft's Optimizer starts the quorum
        batch = batches.next()
        loss = loss_of(model, [data[i] for i in batch.indices])
        batch.weigh(loss).backward()
        optimizer.step()  # if torchft commits the step

**Each committed sample once.** The position is ``manager.current_step()``: step k of training is
the k-th global batch of the epochs' orders. torchft counts a step only if it commits it. So a step
that is not committed is done again, by those groups that are then in the quorum. A group that joins
gets the step number with the weights. `Batches` has no state that a checkpoint needs.

**The update of one process.** torchft averages gradients over the workers. `Batch.weigh` multiplies
a loss by the worker's weight, so that the average is the gradient of the global batch's mean loss.

**Plans.** Each worker computes the same plan, a pure function of the seed, the step, the number of
participants and their speeds. For the speeds, the workers exchange five numbers each in one small
all-reduce at the start of a step. The same exchange detects workers whose plans differed. The ranks
of a replica group count as equally fast, because under FSDP they wait for each other in the forward
pass.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from paceline.balancing import partition
from paceline.core.errors import PacelineError
from paceline.train.epochs import epoch_order
from paceline.train.timing import CpuClock, CudaClock

if TYPE_CHECKING:
    from torchft import Manager

Ints = npt.NDArray[np.int64]

Floats = npt.NDArray[np.float64]

_WINDOW = 16  # number of newest steps from which a group's speed is computed
_NO_PLAN = (-1, -1, 0)
# Private attributes of torchft's Manager that are used here, and the version in which they exist.
_USED = ("_use_async_quorum", "_group_world_size", "_quorum_future", "_quorum_id")
_TESTED = "torchft-nightly 2026.10.26"


@dataclass
class Batch:
    """A worker's part of a step's global batch.

    Attributes:
        step: number of the step, `manager.current_step()`.
        indices: the samples to train, [n]. A worker without a part gets one filler sample, because
            it takes part in the all-reduce of the gradients.
        weight: factor of the mean loss over these samples; 0 for a filler.
    """

    step: int
    indices: Ints
    weight: float
    _clock: Any = field(repr=False)
    _started: Any = field(repr=False)
    _weighed: Any = field(default=None, repr=False)

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call ``backward`` on; call it once, after the forward pass.

        The time from `Batches.next` until this call is the worker's time for the batch: reading
        the samples and the forward pass, which contain no wait for other groups. A group's speed is
        the load of its ranks divided by the longest of their times.

        Args:
            loss: the mean over `indices`, a scalar.
        """
        self._weighed = self._clock.stamp()
        return loss * self.weight


class Batches:
    """Global batches of a training, divided among the replica groups in torchft's quorum.

    Args:
        manager: torchft's manager, made with ``use_async_quorum=False``, because the batch depends
            on the quorum.
        samples: number of samples in the data set, N.
        global_batch: number of samples in each step, B, however many groups there are.
        sizes: cost of each sample, [N], such as its length; None: all are alike.
        loss_mean: "samples": your loss is a mean over samples. "size": it is a mean over units of
            `sizes`, such as tokens.
        seed: the order of epoch e is that of ``DistributedSampler(seed=seed)``.
        drop_last: leave out an epoch's last batch if it is smaller than B.
        limits: maximum number of samples of a worker in a step; None: no limit.
        group: process group of the ranks of this replica group, if there are several.
        device: device of the exchanged numbers and of the times: "cuda" with a process group that
            needs tensors on the GPU, such as ProcessGroupNCCL.

    Raises:
        PacelineError: the manager's quorum is asynchronous; or the replica group has several ranks
            and `group` is missing; or the version of torchft does not fit.
        ValueError: an argument is wrong; the message names it.
    """

    def __init__(
        self,
        manager: Manager,
        *,
        samples: int,
        global_batch: int,
        sizes: Sequence[float] | npt.NDArray[Any] | None = None,
        loss_mean: str = "samples",
        seed: int = 0,
        drop_last: bool = False,
        limits: int | None = None,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if missing := [name for name in _USED if not hasattr(manager, name)]:
            raise PacelineError(
                f"torchft's Manager has no {', '.join(missing)}: install {_TESTED}, with which "
                "paceline is tested"
            )
        if manager._use_async_quorum:
            raise PacelineError(
                "Manager(use_async_quorum=True): a step's batch depends on its quorum; give "
                "torchft's Manager use_async_quorum=False"
            )
        if manager._group_world_size > 1 and group is None:
            raise PacelineError(
                f"group: this replica group has {manager._group_world_size} ranks; give their "
                "process group"
            )
        if not 1 <= global_batch <= samples:
            raise ValueError(f"global_batch={global_batch}: give 1 to {samples}, the samples")
        self._sizes = np.ones(samples) if sizes is None else np.asarray(sizes, np.float64)
        if self._sizes.shape != (samples,) or not (self._sizes > 0).all():
            raise ValueError(f"sizes: give {samples} numbers above 0, one for each sample")
        if loss_mean not in ("samples", "size"):
            raise ValueError(f'loss_mean={loss_mean!r}: give "samples" or "size"')
        self._manager = manager
        self._batch = global_batch
        self._by_size = loss_mean == "size"
        self._seed = seed
        self._limits = limits
        self._ranks = 1 if group is None else dist.get_world_size(group)
        self._rank = 0 if group is None else dist.get_rank(group)
        self._group = group
        self._device = torch.device(device)
        on_gpu = self._device.type == "cuda"
        self._clock: Any = CudaClock(self._device) if on_gpu else CpuClock()
        self._order: tuple[int, Ints] = -1, np.empty(0, np.int64)
        self._quorum: Any = None
        self._given: Batch | None = None
        # For each of the newest steps: mean seconds per unit of cost of a rank in this group.
        self._seconds: deque[float] = deque(maxlen=_WINDOW)
        # Id of the quorum, step and checksum of the plan that this worker computed last.
        self._plan = _NO_PLAN
        #: Number of steps in each epoch.
        self.steps_per_epoch = samples // global_batch if drop_last else -(-samples // global_batch)
        # Compile the kernels now, so that the other groups need not wait for this one in a step.
        for items in (global_batch, samples % global_batch):
            partition(self._sizes[:items], 2, speeds=[1.0, 2**0.5])

    @property
    def epoch(self) -> int:
        """Return the epoch of the next step, from 0."""
        return int(self._manager.current_step()) // self.steps_per_epoch

    def global_batch(self, step: int) -> Ints:
        """Return the samples of a step's global batch, [B]; fewer in an epoch's last step."""
        epoch, step = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            self._order = epoch, epoch_order(len(self._sizes), self._seed, epoch)
        return self._order[1][step * self._batch :][: self._batch]

    def next(self) -> Batch:
        """Return this worker's part of the next step's global batch.

        Call it once in each step, after torchft's ``optimizer.zero_grad()`` or
        ``manager.start_quorum()``, on all workers.

        Raises:
            PacelineError: no quorum has been started for this step; or the last step's loss was
                not weighed; or workers were at different steps, or had computed different plans.
            ValueError: the workers' `limits` together are less than the global batch.
        """
        manager = self._manager
        if manager._quorum_future is self._quorum:
            raise PacelineError(
                "Batches.next: no quorum has been started for this step: call "
                "optimizer.zero_grad() of torchft's Optimizer, or manager.start_quorum(), before it"
            )
        self._quorum = manager._quorum_future
        self._check_weighed()
        self._measure()
        groups, group = manager.num_participants(), manager.participating_rank()
        step, workers = int(manager.current_step()), groups * self._ranks
        worker = None if group is None else group * self._ranks + self._rank
        samples = self.global_batch(step)
        speeds = self._exchange(step, workers, worker)
        if speeds is None:
            # torchft does not commit this step. All of its samples are trained again.
            return self._part(step, samples[:1], 0.0)
        costs = self._sizes[samples]
        parts = partition(costs, workers, speeds=speeds, limits=self._limits)
        owners = np.zeros(len(samples), np.int32)
        for number, part in enumerate(parts):
            owners[part] = number
        self._plan = manager._quorum_id, step, zlib.crc32(owners.tobytes())
        if worker is None or not len(parts[worker]):
            return self._part(step, samples[:1], 0.0)
        amounts = costs if self._by_size else np.ones(len(samples))
        weight = float(amounts[parts[worker]].sum() / amounts.sum()) * workers
        return self._part(step, samples[parts[worker]], weight)

    def _part(self, step: int, indices: Ints, weight: float) -> Batch:
        self._given = Batch(step, indices, weight, self._clock, self._clock.stamp())
        return self._given

    def _check_weighed(self) -> None:
        last = self._given
        if last is None or last._weighed is not None or not last.weight:
            return
        if self._manager.current_step() == last.step + 1:
            raise PacelineError(
                f"Batch.weigh: step {last.step} was committed with a loss that was not weighed, so "
                "its update is wrong: call batch.weigh(loss).backward() in each step"
            )

    def _measure(self) -> None:
        """Add the time of the group's last batches. All ranks of the group call it together."""
        last, self._given = self._given, None
        times = torch.zeros(self._ranks, 2, dtype=torch.float64, device=self._device)
        # A filler has no load.
        if last is not None and last._weighed is not None and last.weight:
            self._clock.wait(last._weighed)
            seconds = self._clock.between(last._started, last._weighed)
            load = float(self._sizes[last.indices].sum())
            times[self._rank] = torch.tensor([seconds, load], dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(times, group=self._group)
        longest, load = float(times[:, 0].max()), float(times[:, 1].sum())
        if load:
            self._seconds.append(longest * self._ranks / load)

    def _exchange(self, step: int, workers: int, worker: int | None) -> Floats | None:
        """Return the workers' speeds, [W]; None: torchft has reported an error."""
        rows = torch.zeros(workers, 5, dtype=torch.float64, device=self._device)
        plan, self._plan = self._plan, _NO_PLAN
        if worker is not None:
            seconds = float(np.median(self._seconds)) if self._seconds else 0.0
            rows[worker] = torch.tensor([seconds, step, *plan], dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(rows, group=self._group)
        # Each number is added to zeros, so all workers get the same bits.
        self._manager.allreduce(rows, reduce_op=dist.ReduceOp.SUM).wait()
        table: Floats = rows.cpu().numpy()
        if self._manager.errored():
            return None
        if (table[:, 1] != step).any():
            raise PacelineError(
                f"Batches: workers are at the steps {table[:, 1].astype(int).tolist()}: load the "
                "same checkpoint's manager.state_dict() in all replica groups"
            )
        # Plans of the same quorum and step must have the same checksum.
        plans = {tuple(each) for each in table[table[:, 2] >= 0, 2:].tolist()}
        if len(plans) > len({each[:2] for each in plans}):
            raise PacelineError(
                "Batches: workers divided the last step in different ways, so samples were trained "
                "twice or not at all: give all workers the same arguments, the same versions of "
                "paceline and numpy, and CPUs of one kind, because others may round differently"
            )
        known = table[:, 0] > 0
        seconds_of = np.where(known, table[:, 0], table[known, 0].mean() if known.any() else 1.0)
        return 1 / seconds_of
