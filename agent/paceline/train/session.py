"""`Session`: what a training script talks to."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import Store  # type: ignore[attr-defined]

from paceline.core.errors import PacelineError
from paceline.core.terms import Terms, length, whole
from paceline.core.version import __version__
from paceline.node.spool import Spool
from paceline.train import ddp
from paceline.train.checkpoint import Position
from paceline.train.device import Device, memory_gauge, name_of
from paceline.train.environment import Environment
from paceline.train.leader import Control, Leader
from paceline.train.loader import Loader
from paceline.train.meeting import meet
from paceline.train.parts import Batch, Plan, Step, left_key
from paceline.train.profile import (
    Profile,
    gather,
    limits_of,
    listed_limits,
    measure,
    shared_moments,
)
from paceline.train.report import Emitter, Reporter, RoundReporter
from paceline.train.sizes import Sizes, resolve
from paceline.train.sync.gate import Exchange
from paceline.train.sync.stealing import Stealing
from paceline.train.timing import Clock, CpuClock, CudaClock, RunningStep
from paceline.wire import Hello

logger = logging.getLogger(__name__)


class Session:
    """Plans the batches of data-parallel training, weighs gradients accordingly and reports times.

    Make it on every rank after ``dist.init_process_group``, with the same arguments: the ranks meet
    in it. Without a process group it serves a single process. Use it from one thread.

    Args:
        dataset: map-style: ``len(dataset)`` and ``dataset[index]``.
        global_batch: samples per step, over all ranks, 1 … N.
        sizes: λ, what each sample costs relative to others: N numbers > 0; or a callable sample →
            number, for which rank 0 reads the data once; "auto": ``dataset.sizes``, else all 1.
        seed: of the epochs' order, as DistributedSampler's.
        drop_last: leave out an epoch's incomplete last step.
        loss_mean: what your loss is a mean over: "samples", or "size" units (frames, tokens).
        coast_steps: steps that rank 0 plans at once where no control plane does, 1 … 4.
        limits: the most samples that fit into a rank's memory, of each rank, or one number for all;
            no rank gets more. None: as `profile` finds.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
        PacelineError: there are several ranks but no process group.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        sizes: Sizes = "auto",
        seed: int = 0,
        drop_last: bool = False,
        loss_mean: str = "samples",
        coast_steps: int = 2,
        limits: int | Sequence[int] | None = None,
    ) -> None:
        samples = length(dataset)
        self._terms = Terms(samples, global_batch, seed, drop_last, loss_mean, coast_steps)
        self._environment = Environment.read(os.environ)
        given = {"limits": listed_limits(limits)}
        meeting = meet(asdict(self._terms) | given, lambda: resolve(sizes, dataset))
        self.rank, self.world, self.filler = meeting.rank, meeting.world, meeting.filler
        self._sizes = meeting.sizes  # on rank 0
        self._store: Store | None = meeting.store
        self._dataset = dataset
        self._computing = Device(self._environment.emulate, self.rank, self.world)
        self._profiles: list[Profile] = []
        self._given_limits = given["limits"]
        self._limits = limits_of(self._given_limits, [], global_batch, self.world)

        self._now = ddp.Now(self.world)
        self._models: list[ddp.WeightedDDP] = []
        self._exchange = Exchange(self._now, self._models, self._store, self.rank, seed)
        self._clock: Clock = CpuClock()
        self._device = torch.device("cpu")
        # Not the loader itself: in a cycle its processes would be ended late, by garbage
        # collection, which may run in a fork and hang there.
        self._has_loader = False

        self._start = Position()
        self._plan: Plan | None = None  # from the first iteration on, and so are:
        self._leader: Leader | None = None  # on rank 0
        self._control: Control | None = None  # on rank 0, with a bus
        self._emitter: Emitter | None = None  # in a run of the control plane
        self._reporter: Reporter | None = None

        self.epoch = 0  # that the loader is in, or was in last
        self.step = -1  # of the run, that the loop is in, or was in last
        self._epochs: int | None = None
        self._next_epoch = 0
        self._skip_epoch = False  # a checkpoint was taken in its last step
        self._in_epoch = False
        self._ran_out = False  # the newest loop over the loader ran to its end
        self._failure: PacelineError | None = None  # of the meeting after one that did not
        self._stopped = self._closed = False
        self._pid = os.getpid()
        atexit.register(self.close)

    def loader(self, **options: Any) -> Loader:
        """The loader of this rank's batches; one per session.

        Args:
            **options: of ``torch.utils.data.DataLoader`` (collate_fn, num_workers, pin_memory, …),
                the same on every rank.

        Raises:
            TypeError: an option that the plan decides.
            PacelineError: there is one already.
        """
        if self._has_loader:
            raise PacelineError(
                "this session has a loader already: make another Session for other data, "
                "or a plain DataLoader for evaluation"
            )
        loader = Loader(self, self._dataset, options)
        self._has_loader = True
        return loader

    def wrap(self, model: nn.Module, *, batchnorm: str | None = None, **options: Any) -> nn.Module:
        """The model with weighted gradients; replaces DistributedDataParallel.

        Args:
            model: on its device.
            batchnorm: "local" accepts BatchNorm layers whose statistics are each rank's own.
            **options: of DistributedDataParallel.

        Raises:
            ValueError: a layer or an option that would train wrongly.
        """
        ddp.check(model, batchnorm, options)
        parameter = next(model.parameters(), None)
        if parameter is not None and parameter.is_cuda:
            self._device, self._clock = parameter.device, CudaClock(parameter.device)
        if self.world == 1 and not torch.distributed.is_initialized():
            return ddp.Alone(model, self._now)
        wrapped = ddp.WeightedDDP(model, self._now, **options)
        self._models.append(wrapped)
        return wrapped

    def profile(self, run_batch: Callable[[int], object], *, most: int | None = None) -> Profile:
        """Measures what batches of 2, 4, 8, … samples take on this rank, until memory runs out.

        LBB's profiling phase (Alg. 1), for policies that choose batch sizes. Call it once on every
        rank, before the first epoch; again on each if it raised. Wrapped models do not reduce
        gradients, and end without any. What an optimiser allocates in its first step is missed.

        Args:
            run_batch: runs forward and backward on made-up data, of so many samples; steps no
                optimiser.
            most: samples at most; None: the global batch, more than a rank ever gets.

        Raises:
            PacelineError: training has begun; nothing fits into memory, or not a global batch into
                all ranks'; or it failed on another rank, which the message names.
            whatever `run_batch` raises, unless it tells that memory ran out.
        """
        if self._plan is not None or self._profiles:
            raise PacelineError("profile: once, and before the loader's first iteration")
        self._refuse_closed()
        assert self._store is not None
        batch = self._terms.global_batch
        most = batch if most is None else whole("most", most, 1)
        with contextlib.ExitStack() as local:
            for model in self._models:
                local.enter_context(model.no_sync())
            hold = self._computing.trial(self.step + 1, shared_moments(self._store, self._sizes))
            trial = partial(measure, run_batch, most, hold)
            profiles = gather(self._store, self.rank, self.world, trial)
        for model in self._models:
            model.zero_grad()
        self._limits = limits_of(self._given_limits, profiles, batch, self.world)
        self._profiles = profiles
        return self._profiles[self.rank]

    def epochs(self, total: int) -> Iterator[int]:
        """Numbers of the epochs left of `total`: fewer after a checkpoint, none after a stop.

        Raises:
            ValueError: `total` is not a whole number ≥ 0.
        """
        whole("epochs", total, 0)
        self._refuse_closed()
        self._epochs = total
        while self._next_epoch < total and not self.stopped:
            epoch = self._next_epoch
            yield epoch
            self._next_epoch = max(self._next_epoch, epoch + 1)  # the body may not have looped

    @property
    def stopped(self) -> bool:
        """Whether an operator ended the run: loaders have run dry."""
        return self._stopped if self._plan is None else self._plan.stopped

    @property
    def steps_per_epoch(self) -> int:
        """Steps in a whole epoch."""
        return self._terms.steps_per_epoch

    @property
    def batch(self) -> Batch:
        """This rank's part of the step in hand.

        Raises:
            PacelineError: outside the loop over the loader.
        """
        plan = self._running().plan
        return Batch(plan.epoch, plan.step, plan.samples, plan.load, plan.weight)

    def log(self, *, loss: torch.Tensor | float) -> None:
        """Reports the loss of the step in hand, this rank's mean; never waits for the device.

        Raises:
            PacelineError: outside the loop over the loader.
        """
        self._running().log(loss)

    def _running(self) -> RunningStep:
        if self._now.step is None:
            raise PacelineError("no step is in hand: use it in the loop over session.loader()")
        return self._now.step

    def _refuse_closed(self) -> None:
        if self._closed:
            raise PacelineError("this session is closed")
        if self._failure is not None:
            raise PacelineError(str(self._failure)) from self._failure

    def state_dict(self) -> dict[str, Any]:
        """Where training is, for a checkpoint. Call it after the optimiser's step.

        The batch in hand counts as used. Only rank 0 knows what the others used: save rank 0's.
        """
        self._refuse_closed()
        # A stop leaves an epoch in its middle: what is left of it is for whoever goes on from here.
        if self._in_epoch or self.stopped:
            used = self._leader.used(self.step) if self._leader is not None else None
            at = Position(self.epoch, self.step + 1, used)
        elif self._plan is None:
            at = self._start
        else:
            at = Position(self._next_epoch, self.step + 1)
        return at.as_state(self._terms.samples, self.rank)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken, on every rank, also if their number is another.

        Raises:
            PacelineError: training has begun already.
            ValueError: the state is of other data, or not rank 0's.
        """
        if self._plan is not None:
            raise PacelineError("load the session's state before the loader's first iteration")
        at = Position.of_state(state, self._terms.samples)
        assert at.used is not None
        self._next_epoch = self.epoch = at.epoch
        self.step = at.step - 1
        self._skip_epoch = self._terms.epoch_over(self._terms.samples - len(at.used))
        self._start = Position(at.epoch + 1, at.step) if self._skip_epoch else at

    def close(self) -> None:
        """Ends the background threads, delivering what they hold, in a few seconds at most.

        It is called at exit, too; calling it again does nothing. A rank that raises needs no other
        care: TorchElastic ends its peers; without, they fail in their next reduction once it exits.
        """
        if self._closed or os.getpid() != self._pid:  # a forked child shares our connections
            return
        self._closed, self._stopped = True, self.stopped
        atexit.unregister(self.close)
        self._exchange.close()
        if self._leader is not None:
            self._leader.wait_for_readers(at_the_end=self._ran_out)
        elif self.rank > 0 and self._store is not None:
            with contextlib.suppress(RuntimeError):  # the leader has gone first
                self._store.set(left_key(self.rank), "")
        if self._reporter is not None:
            self._reporter.flush()
        if self._control is not None:
            self._control.close()
        if self._emitter is not None:
            self._emitter.close()
        # Loader and script may live on; the store's server and port need not.
        self._leader = self._plan = self._store = None

    # What the loader calls.

    def begin_epoch(self, lookahead: int) -> bool:
        """The next epoch begins; False: it has no steps here."""
        self._refuse_closed()
        if self.stopped:
            return False
        self.epoch = self._next_epoch
        self._next_epoch += 1
        if self._skip_epoch:
            self._skip_epoch = False
            return False
        if self._plan is None:
            self._plan = self._begin(lookahead)
        self._in_epoch, self._ran_out = True, False
        return True

    def steps(self) -> Iterator[Step]:
        """The plan of the epoch that has begun."""
        assert self._plan is not None
        return map(self._exchange.dealt, self._plan.steps(self.epoch))

    def begin_step(self, plan: Step, data_s: float) -> None:
        """A batch is loaded and goes to the loop's body."""
        self._exchange.begin(plan)
        self._finish_step()
        hold_s = self._computing.begin(plan)
        self.step = plan.step
        if self._leader is not None:
            self._leader.reached(plan.step)
        self._now.step = RunningStep(plan, self._clock, data_s, hold_s)

    @property
    def emulated_loading_s(self) -> float:
        """How much longer loading a batch shall take."""
        return self._computing.loading_s

    def end_body(self, closing: bool) -> None:
        """The loop's body is through with the batch, or was left."""
        with self._told_later(closing):
            self._exchange.body_done(closing)
        self._running().body_done()

    def end_epoch(self, ran_out: bool) -> None:
        """The loop over the loader has ended: the loader ran out, or the loop was left."""
        with self._told_later(not ran_out):
            self._exchange.end(ran_out)
        self._finish_step()
        self._in_epoch, self._ran_out = False, ran_out
        if self._reporter is not None:
            self._reporter.flush()

    @contextlib.contextmanager
    def _told_later(self, closing: bool) -> Iterator[None]:
        """While a loop is closed Python swallows what is raised: so it is when training goes on."""
        try:
            yield
        except PacelineError as error:
            if not closing:
                raise
            self._failure = error
            logger.warning("%s", error)

    def _finish_step(self) -> None:
        if self._now.step is not None:
            self._now.step.over()
            if self._reporter is not None:
                self._reporter.over(self._now.step)
            self._now.step = None

    def _begin(self, lookahead: int) -> Plan:
        """The first iteration begins: all is known that the control plane needs."""
        environment, store = self._environment.claim(), self._store
        self._environment = environment
        assert store is not None
        if self.rank == 0:
            store.set("lookahead", str(lookahead))
        elif (leads := int(store.get("lookahead"))) != lookahead:
            # A rank that needs the plan earlier than the leader makes it would wait for ever.
            raise ValueError(
                f"the loader fetches {lookahead} steps ahead on rank {self.rank} but {leads} on "
                "rank 0: give num_workers and prefetch_factor the same values on every rank"
            )
        if environment.run is not None:
            self._emitter = self._make_emitter(environment.run)
            self._reporter = Reporter(self._emitter, environment.attempt, self.rank)
            rounds = RoundReporter(self._emitter, environment.attempt, self.rank)
            self._exchange.reported = rounds.over
        if self.rank == 0:
            if self._emitter is not None:
                self._emitter.send(self._hello(lookahead))
            if environment.run is not None and environment.bus is not None:
                self._control = Control(environment.bus, environment.run, environment.attempt)
            self._leader = self._make_leader(store)
        limit = self._limits[self.rank] if self._limits else None
        by_size = self._terms.loss_mean == "size"
        self._exchange.stealing = Stealing(store, self.rank, lookahead, limit, by_size=by_size)
        return Plan(store, self.rank, self._leader)

    def _make_emitter(self, run: str) -> Emitter:
        environment, spool = self._environment, None
        name = f"attempt{environment.attempt}-rank{self.rank}"
        if environment.spool is not None:
            spool = Spool(environment.spool, name, environment.spool_bytes)
        return Emitter(run, environment.bus, spool, memory_gauge(self._device))

    def _make_leader(self, store: Store) -> Leader:
        assert self._sizes is not None
        emitter = self._emitter
        return Leader(
            self._terms,
            self.world,
            self._sizes,
            store,
            self._control,
            attempt=self._environment.attempt,
            announce=emitter.send if emitter is not None else None,
            epoch=self._start.epoch,
            step=self._start.step,
            used=self._start.used,
            limits=self._limits,
        )

    def _hello(self, lookahead: int) -> Hello:
        terms, start = self._terms, self._start
        assert self._sizes is not None
        return Hello(
            attempt=self._environment.attempt,
            world=self.world,
            global_batch=terms.global_batch,
            seed=terms.seed,
            sizes=self._sizes.astype("<f8").tobytes(),
            loss_mean=terms.loss_mean,
            drop_last=terms.drop_last,
            epochs=self._epochs,
            lookahead=lookahead,
            started_at=time.time(),
            paceline=__version__,
            torch=str(torch.__version__),
            device=name_of(self._device),
            epoch=start.epoch,
            step=start.step,
            used=b"" if start.used is None else start.used.astype("<u4").tobytes(),
            emulated=self._computing.emulated,
            profiles=[profile.times for profile in self._profiles],
            limits=self._limits,
        )
