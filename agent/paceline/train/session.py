"""`Session`, the API that a training script uses.

The session checks the arguments, performs the ranks' start-up and makes a `loop.Loop`, to which its
methods delegate.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from torch import nn

from paceline.core.batch_limits.shapes import Shapes
from paceline.core.errors import PacelineError
from paceline.core.forking import delay_forks
from paceline.core.terms import PLAIN, Terms, length, whole
from paceline.data import Sharded, Stream
from paceline.planning.policy_in_force import PolicyInForce
from paceline.train import mesh as lanes
from paceline.train import stacks
from paceline.train.batch_limits.budgeting import (
    budgeted,
    checked_sizes,
    counted,
    of_ranks,
    planned,
)
from paceline.train.batch_limits.sizes import Sizes, resolve
from paceline.train.batchnorm import adapt, shares_statistics
from paceline.train.checkpoint.contents import Contents
from paceline.train.checkpoint.position import Position
from paceline.train.checkpoint.saver import Saver, Schedule
from paceline.train.context import RunContext
from paceline.train.device import Device
from paceline.train.environment import Environment
from paceline.train.exclusions import refuse, refuse_call
from paceline.train.fsdp.model import WeightedFSDP, device_of, wrap
from paceline.train.loader import Loader
from paceline.train.loop import Loop
from paceline.train.metrics import MetricNames, Value, check_loss
from paceline.train.nodedata import settle
from paceline.train.plan_shard import Batch
from paceline.train.profile import (
    Profile,
    limits_of,
    listed_limits,
    profile_ranks,
    shared_typical,
)
from paceline.train.refusals import refuse_accumulation, refuse_model
from paceline.train.seeding import Use, sequence_of, torch_generator
from paceline.train.startup import rank_and_world, start_up
from paceline.train.streams.reader import StreamReader, refuse_small
from paceline.wire import Evaluation

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_open: WeakSet[Session] = WeakSet()

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)


class Session:
    """Balanced data-parallel training: plans batches, weights gradients and reports times.

    Make a session on every rank after ``dist.init_process_group``, with the same arguments; this is
    a collective operation. Without a process group it serves a single process. Use it from one
    thread::

        session = paceline.Session(train, global_batch=64)
        loader = session.loader(collate_fn=collate)
        model = session.wrap(model)
        optimizer = session.optimizer(torch.optim.AdamW(model.parameters()))
        for epoch in session.epochs(10):
            for inputs, labels in loader:
                loss = cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    Args:
        dataset: a map-style data set, with ``len(dataset)`` and ``dataset[index]``; a
            `paceline.data.Sharded`, for data that is stored on nodes; or a `paceline.data.Stream`,
            for data without a length and an index.
        global_batch: number of samples in a step, over all ranks, from 1 to ``len(dataset)``. Give
            either `global_batch` or `token_budget`.
        token_budget: maximum total size of a step over all ranks, in the unit of the sizes (tokens,
            frames, seconds), instead of `global_batch`. A step gets samples, in the epoch's order,
            until one more would exceed the budget.
        sizes: the size λ of each sample, its cost relative to other samples: a number > 0 for each
            sample; or a callable that maps a sample to its size, for which rank 0 reads the data
            once; "auto": ``dataset.sizes`` if it exists, else all sizes are 1.
        seed: seed of the order of samples in each epoch, as in DistributedSampler.
        drop_last: leave out an epoch's incomplete last step.
        loss_mean: the quantity over which your loss is a mean: "samples", or "size" units (frames,
            tokens). "ranks": the loss is already scaled for DDP's mean over ranks, such as a sum
            that is divided by a count over all ranks and multiplied by the number of ranks. None:
            "size" with a token budget, else "samples".
        coast_steps: number of steps, from 1 to 4, that rank 0 plans at once while no control plane
            plans.
        limits: maximum number of samples that fit into a rank's memory, one number for each rank,
            or one for all; no rank gets more samples at once. None: the limits that `profile`
            finds, or no limits without a profile.
        token_limits: with a token budget, the maximum total size that fits into a rank's memory,
            one number for each rank, or one for all; no rank gets more at once. If a rank runs out
            of memory, its limit is lower when the run resumes.
        micro_batches: a rank whose local batch exceeds its limit computes the batch in several
            iterations of the loop, and its optimiser steps only in the last one (`Batch.last`).
            So `limits` restricts neither a fast rank's local batch nor the global batch. Use
            `micro_batches` for loops that call no collective of their own in the body, accumulate
            no gradients themselves, and count steps by `Session.step`.
        uneven_steps: under a relaxed policy, a fast rank's loop may have more iterations than a
            slow rank's. Use `uneven_steps` for loops that call no collective of their own in the
            body, step the optimiser in each iteration, and never end early. It cannot be combined
            with `micro_batches`.
        shapes: a number n, for compiled models, which need few distinct batch shapes: each rank's
            number of samples in a step is a multiple of n. A `Shapes` also sets the lengths to
            which batches are padded.
        mesh: the data-parallel dimensions of a `torch.distributed.DeviceMesh` over all ranks, such
            as ``mesh["dp"]``. Ranks that differ only in the mesh's other dimensions, as under
            tensor parallelism, are one group and get the same batches. Then `rank` is the number of
            the group, `world` is the number of groups, and `limits` has one number for each group.
            Use `mesh` for models that `fully_shard` has sharded over this mesh.
        policy: the policy by which rank 0 balances the ranks, unless a control plane does: its
            name, or ``{name: parameters}``. The environment variable ``PACELINE_POLICY``, a name or
            JSON, replaces it. "bsp": equal local batches, as under DDP. Without a control plane,
            rank 0 prints a line at the end of each epoch that it has planned: its duration, the
            waiting, and an estimate of the gain. If a control plane started the run, rank 0 plans
            further sessions of the script with the run's policy, or with `policy` after a restart.
        prove: before its first step, a run that may be balanced computes the gradient of a few
            samples in one batch and in uneven local batches. If the gradients differ, the ranks
            train with equal local batches, and a warning gives the reason. False: skip this check,
            and the profile with which a run begins under the policy ``lbb``.

    Raises:
        TypeError, ValueError: an argument of the session or of one of its methods is wrong; the
            message names the argument.
        PacelineError: there are several ranks but no process group.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int | None = None,
        token_budget: float | None = None,
        sizes: Sizes = "auto",
        seed: int = 0,
        drop_last: bool = False,
        loss_mean: str | None = None,
        coast_steps: int = 2,
        limits: int | Sequence[int] | None = None,
        token_limits: float | Sequence[float] | None = None,
        uneven_steps: bool = False,
        micro_batches: bool = False,
        shapes: int | Shapes | None = None,
        mesh: DeviceMesh | None = None,
        prove: bool = True,
        policy: str | Mapping[str, Mapping[str, Any]] = "paceline",
    ) -> None:
        yes_or_no = {"uneven_steps": uneven_steps, "micro_batches": micro_batches}
        for name, value in (yes_or_no | {"prove": prove}).items():
            if not isinstance(value, bool):
                raise TypeError(f"{name}={value!r}: give True or False")
        stream = dataset if isinstance(dataset, Stream) else None
        samples, grid = 0 if stream else length(dataset), Shapes.of(shapes)
        batch, token_budget = counted(global_batch, token_budget)
        layout = lanes.described(mesh)
        given = yes_or_no | {
            "loss_mean='ranks'": loss_mean == "ranks",
            "drop_last": drop_last,
            "limits": limits is not None,
            # A grid of lengths needs the sizes of later samples, which a stream does not have.
            "shapes": grid.samples > 1 or (stream is not None and grid.length > 0),
            "sizes": not isinstance(sizes, str) or sizes != "auto",
            "token_budget": token_budget is not None,
            "mesh": mesh is not None and mesh.mesh.numel() != rank_and_world()[1],
            "paceline.data.Stream": stream is not None,
            "paceline.data.Sharded": isinstance(dataset, Sharded),
        }
        self._given = {name for name, is_given in given.items() if is_given}
        refuse(self._given)
        if loss_mean is None:
            loss_mean = "samples" if token_budget is None else "size"
        room = budgeted(token_budget, token_limits)
        terms = Terms(samples, batch, seed, drop_last, loss_mean, coast_steps, grid, token_budget)
        if stream is not None:
            refuse_small(stream, batch)
        workers = rank_and_world()[1] if mesh is None else mesh.mesh.numel()
        environment = Environment.read(os.environ)
        # In a run of a control plane, rank 0 plans further sessions; they follow the run's policy.
        here = environment.policy or environment.first_policy or PolicyInForce.of(policy, "policy")
        # Register the signal before the start-up, because ranks may hang in the start-up.
        stacks.register(os.environ)
        self._given_limits = listed = listed_limits(limits)
        startup = start_up(
            asdict(terms)
            | {"limits": listed, "dataset": _kind_of(dataset), "token_limits": room}
            | {"mesh": layout, "prove": prove, "policy": asdict(here)}
            | yes_or_no,
            lambda: (
                np.empty(0)
                if stream is not None
                else checked_sizes(
                    resolve(sizes, dataset), token_budget, room, workers, micro_batches
                )
            ),
        )
        terms, epoch_steps = planned(terms, startup)
        startup = lanes.laned(startup, mesh)
        # A control plane plans with a policy of its own, and a single rank needs no plans.
        if environment.run is None and startup.world > 1:
            here.refuse(startup.world, token_budget, stream=stream is not None)
        # The script's DataLoader may fork while the session's threads run.
        delay_forks()
        self.rank, self.world, self.filler = startup.rank, startup.world, startup.filler
        if startup.leads:
            environment.warn_unknown()
        self._dataset = dataset
        device = Device(environment.emulate, self.rank, self.world)
        limits_known = limits_of(listed, [], terms.global_batch, self.world, micro_batches)
        limits_known = replace(limits_known, tokens=of_ranks(room, self.world))
        context = RunContext(
            terms,
            environment,
            device,
            limits_known,
            epoch_steps,
            uneven_steps,
            settle(dataset, startup, environment),
            None if stream is None else StreamReader(stream, startup, terms.seed),
            prove,
            None if startup.world == 1 or here.name == PLAIN else here,
        )
        self._loop = Loop(context, startup)
        batch_size = f"global_batch={batch}" if token_budget is None else f"{token_budget=:g}"
        self._loop.gate.name(f"the session of {type(dataset).__name__} ({batch_size})")
        # Keep no reference to the loader, because the reference would form a cycle. If a forked
        # child collected the cycle, it would try to end the loader's worker processes, and hang.
        self._has_loader = False
        self._logged, self._evaluated = MetricNames("log"), MetricNames("evaluated")
        self._pid = os.getpid()
        _open.add(self)
        atexit.register(self.close)

    @property
    def epoch(self) -> int:
        """Return the epoch that the loader is in, or was in last."""
        return self._loop.progress.epoch

    @property
    def step(self) -> int:
        """Return the run's current or last step, counted across epochs; -1 before any step."""
        return self._loop.progress.step

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of steps in a whole epoch, which is also ``len(loader)``.

        The number is the same under every policy. With a token budget, epochs differ by a few
        steps. Then the number is for the current epoch; between epochs, it is for the next one.
        `total_steps` counts several epochs.

        Use the number for schedules of the learning rate::

            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, max_lr=3e-3, total_steps=epochs * session.steps_per_epoch
            )
            for epoch in session.epochs(epochs):
                for inputs, labels in loader:
                    ...
                    optimizer.step()
                    schedule.step()
        """
        return self._loop.progress.steps_per_epoch

    def total_steps(self, epochs: int) -> int:
        """Return the number of steps in the first `epochs` epochs, for learning-rate schedules.

        With a token budget this computes each epoch's order of samples, which takes about a second
        for ten million samples in total.
        """
        return self._loop.context.epoch_steps.total(whole("epochs", epochs, 0))

    @property
    def stopped(self) -> bool:
        """Return True if an operator or a signal ended the run; loaders then yield no batches."""
        return self._loop.stopped

    @property
    def batch(self) -> Batch:
        """Return this rank's local batch of the current step, or the current micro-batch of it.

        Raises:
            PacelineError: the call is outside the loop over the loader.
        """
        step = self._loop.running().step
        last = not step.more
        return Batch(step.epoch, step.step, step.samples, step.load, step.weight, last)

    def generator(
        self, index: SupportsIndex, device: torch.device | str = "cpu", *, stream: int = 0
    ) -> torch.Generator:
        """Return a sample's random generator in the current epoch, for the loop's body.

        The arguments are as for `paceline.generator`, which is for data sets, but the random
        numbers differ.
        """
        seed, epoch = self._loop.context.terms.seed, self._loop.progress.epoch
        return torch_generator(sequence_of(seed, epoch, index, Use.LOOP, stream), device)

    def loader(self, **options: Any) -> Loader:
        """Make the loader of this rank's batches. A session can have only one loader.

        Args:
            **options: options of ``torch.utils.data.DataLoader`` (collate_fn, num_workers,
                pin_memory, …), the same on every rank.

        Raises:
            TypeError: an option contradicts the plan, which chooses the samples.
            PacelineError: the session has a loader already.
        """
        if self._has_loader:
            raise PacelineError(
                "this session has a loader already: make another Session for other data, "
                "or a plain DataLoader for evaluation"
            )
        loader = Loader(self._loop, self._dataset, options)
        self._has_loader = True
        return loader

    def wrap(self, model: nn.Module, *, batchnorm: str | None = None, **options: Any) -> nn.Module:
        """Wrap a model for weighted gradients, instead of DistributedDataParallel.

        A model that `torch.distributed.fsdp.fully_shard` has sharded stays the same object.

        Args:
            model: a plain model, on its device, in no wrapper of another framework; or a model that
                `fully_shard` has sharded over all ranks. Wrap each model that is trained.
            batchnorm: the batch over which BatchNorm layers normalise. "sync": the whole global
                batch, as in a single process. "local": each rank's own batch. BatchNorm layers need
                one of the two, except SyncBatchNorm, which always uses the global batch. The layers
                are changed in place.
            **options: options of DistributedDataParallel; none for a sharded model.

        Raises:
            ValueError: a layer, a wrapper or an option would make the training wrong; the
                message names the fix.
        """
        refuse_model(model, batchnorm, options, self._loop.startup.lanes)
        if self._loop.context.limits.micro_batches:
            refuse_accumulation(model, batchnorm, options)
        if self._loop.context.terms.loss_mean == "ranks" and shares_statistics(model, batchnorm):
            raise ValueError(
                "loss_mean='ranks' and synchronised BatchNorm cannot be combined: BatchNorm "
                "weights ranks by samples, but this loss_mean weights them equally; use "
                "session.wrap(model, batchnorm='local')"
            )
        adapt(model, batchnorm or "local", self._loop.current)
        wrapped = wrap(model, self._loop.current, options)
        if (device := device_of(wrapped)) is not None:
            self._loop.context.device.use(device)
        if not self._loop.gate.models:
            self._loop.introduce()
        self._loop.gate.models.append(wrapped)
        return model if isinstance(wrapped, WeightedFSDP) else wrapped

    def optimizer(
        self, optimizer: _Optimizer, scaler: torch.amp.GradScaler | None = None
    ) -> _Optimizer:
        """Declare the optimiser that trains the wrapped models; return it.

        Policies that relax synchronisation need the optimiser and the scaler. Call this once, after
        `wrap` and before the first iteration, on every rank. If the optimiser or the scaler was not
        declared, Paceline searches the process's objects for it when relaxed synchronisation
        begins.

        Args:
            optimizer: an optimiser with parameters of wrapped models. Give torch's optimiser
                itself, not a framework's wrapper around it.
            scaler: the gradient scaler that steps the optimiser, if there is one.

        Raises:
            ValueError: the optimiser has no parameter of a wrapped model.
            PacelineError: the session has an optimiser already, or training has begun.
        """
        self._loop.refuse_begun("call session.optimizer(optimizer)")
        self._loop.gate.declare(optimizer, scaler)
        return optimizer

    def profile(self, run_batch: Callable[[int], object], *, most: int | None = None) -> Profile:
        """Measure the time of batches of 2, 4, 8, … samples on this rank, until memory runs out.

        This is the profiling phase of the paper LBB (Alg. 1), for policies that choose batch sizes.
        Call it once on every rank, before the first epoch; if it raised an error, call it again on
        every rank. During the call wrapped models do not reduce gradients, and they have no
        gradients afterwards. Memory that an optimiser allocates in its first step is not measured.
        `Loader.typical` makes batches of the data set's own samples::

            session.profile(lambda n: loss_of(*loader.typical(n)).backward())

        Errors of `run_batch` are raised unchanged, unless they mean that memory ran out.

        Args:
            run_batch: function that runs a forward and a backward pass on n samples, and steps no
                optimiser.
            most: maximum number of samples; None: the global batch, which no local batch exceeds.

        Raises:
            PacelineError: training has begun; `run_batch` steps an optimiser; nothing fits into
                memory, or the ranks' memory together does not hold a global batch; or profiling
                failed on another rank, which the message names.
        """
        loop = self._loop
        refuse_call("profile", self._given)
        if loop.begun or loop.findings.profiles:
            raise PacelineError("profile: call it once, and before the loader's first iteration")
        if not callable(run_batch):
            raise TypeError(
                f"profile: run_batch is {run_batch!r}: give a function of n that runs forward and "
                "backward on n samples"
            )
        batch = loop.context.terms.global_batch
        most = batch if most is None else whole("most", most, 1)
        models, hold = loop.gate.models, partial(loop.context.device.trial, self.step + 1)
        loop.findings.typical = shared_typical(loop.startup.store, loop.startup.sizes, most)
        with loop.statistics.kept():
            profiles = profile_ranks(
                loop.startup, models, loop.context.device.finish, hold, run_batch, most
            )
        micro_batches = loop.context.limits.micro_batches
        limits = limits_of(self._given_limits, profiles, batch, self.world, micro_batches)
        loop.context = replace(loop.context, limits=limits)
        loop.findings.profiles = profiles
        return profiles[self.rank]

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs that remain after a checkpoint; none after a stop."""
        progress = self._loop.progress
        whole("epochs", total, 0)
        self._loop.refuse_closed()
        self._loop.findings.epochs = total
        while progress.next_epoch < total and not self.stopped:
            epoch = progress.next_epoch
            yield epoch
            # If the body did not iterate over the loader, `next_epoch` has not advanced yet.
            progress.next_epoch = max(progress.next_epoch, epoch + 1)

    def checkpoint(
        self,
        directory: str | Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
        *,
        every_steps: int | None = None,
        every_s: float | None = None,
        keep: int = 2,
    ) -> None:
        """Resume from the newest checkpoint, if any, and save new ones. Call once, after `wrap`.

        A checkpoint is saved when all ranks are synchronised after the same step: under a relaxed
        policy at the end of a segment or of an epoch. Give `every_steps` or `every_s`, or both.

        Args:
            directory: a folder that all nodes share, and that only this training uses.
            model: the model that the script trains.
            optimizer: the model's optimiser.
            scheduler: the scheduler of the learning rate, if any.
            scaler: the scaler of the loss, if any.
            every_steps: steps between two checkpoints.
            every_s: seconds between two checkpoints.
            keep: number of checkpoints to keep.

        Raises:
            TypeError, ValueError, RuntimeError: an argument is wrong, or the checkpoint is of other
                data or of another model.
            PacelineError: training has begun, or the directory cannot be used.
        """
        refuse_call("checkpoint", self._given)
        self._loop.refuse_begun("call session.checkpoint(…)")
        contents = Contents.of(model, optimizer, scheduler, scaler)
        schedule = Schedule(Path(directory), every_steps, every_s, keep)
        samples, outer = self._loop.context.terms.samples, self._loop.gate.outer
        process = self._loop.startup.process
        self._loop.save_with(Saver(schedule, contents, process, samples, outer))

    def log(self, *, loss: Value, **metrics: Value) -> None:
        """Report the loss of the current step, and further metrics; never waits for the device.

        Args:
            loss: this rank's mean loss. The dashboard shows the mean over the global batch.
            **metrics: training metrics by name: numbers, or tensors without dimensions. Each is a
                mean over this rank's batch; ranks are weighted as for the loss. A run has at most
                32 names.

        Raises:
            PacelineError: the call is outside the loop over the loader.
        """
        running = self._loop.running()
        check_loss(loss)
        if metrics:
            self._logged.check(metrics)
        running.log(loss, metrics)

    @property
    def figures(self) -> dict[str, float]:
        """Return values of this rank's newest finished step, for trackers such as TensorBoard::

            for name, value in session.figures.items():
                writer.add_scalar(name, value, session.step)

        The call never waits for the device. Before the first step has ended, the result is empty.
        ``paceline/samples`` and ``paceline/load`` are the number of samples and the load of the
        batch. Times are in s: ``paceline/data_s`` waiting for the batch, ``paceline/compute_s``
        forward and backward, ``paceline/sync_s`` reduction and waiting for other ranks,
        ``paceline/step_s`` the total. If a step has several iterations of the loop, as with
        ``micro_batches``, the values are of the newest iteration, not sums over the step.
        """
        return self._loop.figures()

    def evaluated(self, *, samples: int | None = None, **metrics: Value) -> None:
        """Report metrics of held-out data after an evaluation; charts show them by step.

        Call it on rank 0, or on every rank. Without `samples`, only rank 0's values count. If each
        rank evaluates a part of the data, give `samples` on each rank: then a metric is the mean
        over ranks, weighted by `samples`. If a metric is a tensor on a device, the call waits for
        the device. Further calls after the same step add metrics; if a metric is reported again,
        the last value is kept.

        Args:
            samples: number of samples over which this rank's values are means; 0: this rank had no
                samples.
            **metrics: metrics by name, such as ``accuracy=…, loss=…``. A run has at most 32 names.

        Raises:
            PacelineError: the session is closed.
        """
        if samples is not None:
            whole("samples", samples, 0)
        if not metrics:
            raise ValueError("session.evaluated: give a metric, such as accuracy=0.91")
        self._evaluated.check(metrics)
        if samples == 0 or (samples is None and self.rank > 0):
            self._loop.refuse_closed()
            # Report nothing: values of 0 samples do not count, and without `samples` only rank 0's.
            return
        values = {
            name: float(value.detach() if isinstance(value, torch.Tensor) else value)
            for name, value in metrics.items()
        }
        loop = self._loop
        now, trained = time.time(), loop.progress.trained.upto(self.step)
        loop.evaluated(
            Evaluation(0, self.rank, self.step, self.epoch, trained, now, samples, values)
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the training position, for a checkpoint. Call it after the optimiser's step.

        The current batch counts as used. Save the state of rank 0, because only rank 0 records
        which samples all ranks have used.
        """
        loop = self._loop
        return loop.position().as_state(loop.context.terms.samples, loop.startup.process)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state of `state_dict`; call it on every rank. The world size may differ.

        Raises:
            PacelineError: training has begun already.
            ValueError: the state belongs to another data set, or was not saved by rank 0.
        """
        self._loop.refuse_begun("load the session's state")
        position = Position.of_state(state, self._loop.context.terms.samples)
        self._loop.progress.resume(position)

    def close(self) -> None:
        """End the background threads within a few seconds; they deliver pending messages first.

        Python also calls this at exit. Further calls do nothing. A rank that fails need not
        inform the other ranks. TorchElastic ends them. Without TorchElastic they fail in their next
        reduction after the failed rank's process has ended.
        """
        # Do nothing in a forked child, because closing would close the parent's connections.
        if self._loop.closed or os.getpid() != self._pid:
            return
        atexit.unregister(self.close)
        self._loop.close()


def _kind_of(dataset: Any) -> str:
    if isinstance(dataset, Stream):
        return f"{dataset.kind}, buffer={dataset.buffer}, shuffle={dataset.shuffle}"
    return "Sharded" if isinstance(dataset, Sharded) else "plain"


def close_all() -> None:
    """Close the sessions of this process, for processes in which `atexit` does not run."""
    for session in list(_open):
        session.close()
