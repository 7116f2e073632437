"""Reports the steps of an observed rank as a session does."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from paceline import observation
from paceline.core.batch_limits.devices import summary
from paceline.core.version import __version__
from paceline.train import stacks
from paceline.train.device import Device
from paceline.train.environment import Environment
from paceline.train.long_phases import PhaseMonitor
from paceline.train.metrics import Value, on_host
from paceline.train.observing.timeline import ObservedStep, Timeline
from paceline.train.wiring import emitter_of
from paceline.wire import Hello, StepRecord

logger = logging.getLogger(__name__)

# Maximum number of samples to report: the Hello has 8 bytes for each sample.
_MOST_REPORTED_SAMPLES = 2_000_000


class Recorder:
    """A rank's timeline, and the thread that sends its records."""

    def __init__(
        self, variables: Mapping[str, str], rank: int, world: int, device: torch.device
    ) -> None:
        environment = Environment.of_observed(variables)
        assert environment.run is not None, "the launcher names the run"
        self._environment, self._rank, self._world = environment, rank, world
        self._node = variables.get(observation.NODE) or ""
        self._device = Device(None, rank, world)
        self._device.use(device)
        self._seq = 0
        # Number of samples of each data set, by the data set's `id`. The newest data set is last.
        self._lengths: dict[int, int] = {}
        # True once the Hello is sent. Only rank 0 sends it, so it is True on all other ranks.
        self._hello_sent = rank > 0
        self.timeline = timeline = Timeline(self._device.clock)
        # `_node` is set if a launcher other than Paceline's started this rank. Then no agent reads
        # stack files.
        if not self._node:
            stacks.register(variables)
        phases = PhaseMonitor(environment.attempt, rank, lambda: timeline.activity)
        self._emitter = emitter_of(environment, rank, self._device.memory, phases)

    def reads(self, data: int, samples: int) -> None:
        """Record the number of samples of a data set that a loader reads; `data` is its `id`."""
        self._lengths.pop(data, None)
        self._lengths[data] = samples

    def _samples(self) -> int:
        """Return the number of samples of all data sets used for training; 0 if unknown."""
        trained = [n for data, n in self._lengths.items() if data in self.timeline.trained]
        return min(sum(trained or list(self._lengths.values())[-1:]), _MOST_REPORTED_SAMPLES)

    def stepped(self) -> None:
        """Close a step after the optimiser has stepped."""
        self._report(self.timeline.stepped())

    def logged(self, loss: Value) -> None:
        """Record a loss that the script logged."""
        self.timeline.logged(on_host(loss))

    def close(self) -> None:
        """Deliver the remaining records and end the thread, within a few seconds."""
        try:
            self._report(self.timeline.closed())
        finally:
            self._emitter.close()

    def _report(self, steps: Iterable[ObservedStep]) -> None:
        for step in steps:
            if not self._hello_sent:
                self._hello_sent = True
                self._emitter.send(self._hello(step))
            self._emitter.record(self._record(step))
            self._seq += 1

    def _record(self, step: ObservedStep) -> StepRecord:
        compute_s, sync_s = step.read(self._device.clock)
        return StepRecord(
            attempt=self._environment.attempt,
            rank=self._rank,
            seq=self._seq,
            step=step.number,
            epoch=step.epoch,
            segment=0,
            samples=step.size.samples,
            load=step.size.load,
            data_s=step.data_s,
            compute_s=compute_s,
            sync_s=sync_s,
            step_s=step.step_s,
            ended_at=step.ended_at,
            loss=None if step.loss is None else float(step.loss),
            memory_bytes=self._emitter.memory_bytes,
            squares=step.size.squares,
            longest=step.size.longest,
            recompiles=step.recompiles,
        )

    def _hello(self, step: ObservedStep) -> Hello:
        """Describe the run. Values that only the script knows are estimates or defaults."""
        placement = self._environment.placed(self._world)
        if not placement and self._node:
            placement = [self._node] * self._world
        global_batch = step.size.samples * self._world
        return Hello(
            attempt=self._environment.attempt,
            world=self._world,
            global_batch=global_batch,
            seed=0,
            sizes=np.ones(max(self._samples(), global_batch), "<f8").tobytes(),
            loss_mean="samples",
            drop_last=False,
            epochs=None,
            lookahead=0,
            started_at=time.time(),
            paceline=__version__,
            torch=str(torch.__version__),
            device=summary([self._device.described()]),
            placement=placement,
        )
