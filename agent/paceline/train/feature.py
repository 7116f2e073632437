"""Base class of the loop's optional features: hooks, in the order in which the loop calls them.

`features.choice` makes only those features that the run needs. `Hooks` lists the methods that
features override, so the loop calls no hook that does nothing. Features share a
`state.TrainingState`; they import neither each other nor the loop. All hooks run in the training
thread. Ranks synchronise at the gate (`sync.gate.SyncGate`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.train.plan_shard import LocalStep
from paceline.train.timing import RunningStep


class Feature:
    """An optional feature of the loop, whose hooks do nothing here; subclasses override some.

    A *turn* is one iteration of the script's loop. A step has several turns if its batch is cut
    into micro-batches, or if this rank takes over batches of other ranks.
    """

    def reads(self, dataset: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the data set and the options from which the loader makes its DataLoader."""
        return dataset, options

    def begin(self) -> None:
        """Run at the start of this rank's first iteration. Other ranks may start later or never."""

    def connect(self) -> None:
        """Run on all ranks before the plan is read the first time; may change the memory limits."""

    def before_epoch(self) -> None:
        """Run before a pass over the loader, even if the pass will have no steps."""

    def begin_epoch(self, epoch: int) -> None:
        """Run at the start of an epoch that has steps."""

    def loading(self) -> None:
        """Run before a batch is loaded, and before the DataLoader starts its processes."""

    def loaded(self, batch: Any, data_s: float) -> Any:
        """Run after a batch was loaded; return the batch that the script gets.

        `data_s` is the time in seconds that the script waited for the batch.
        """
        return batch

    def begin_step(self, step: LocalStep) -> None:
        """Run before the gate at a step's start, once the step's batch is loaded."""

    def begin_turn(self, turn: LocalStep) -> None:
        """Run at the start of a turn, before the body of the script's loop."""

    def end_turn(self, running: RunningStep) -> None:
        """Run before the gate at a turn's end, unless the script left the loop in this turn."""

    def turn_ended(self, running: RunningStep, closing: bool) -> None:
        """Run after the gate at a turn's end; `closing` is True if the script left the loop."""

    def recompiled(self, running: RunningStep) -> None:
        """Run after a turn in which torch.compile has recompiled functions."""

    def step_ended(self, step: LocalStep) -> None:
        """Run after the gate at a planned step's end."""

    def end_epoch(self, ran_out: bool, raised: bool) -> None:
        """Run before the gate at an epoch's end.

        `ran_out` is False if the script left its loop early, and `raised` is True if an exception
        ended the loop.
        """

    def epoch_ended(self, ran_out: bool) -> None:
        """Run after the gate at an epoch's end, where collectives are still allowed."""

    def left_epoch(self, epoch: int) -> None:
        """Run outside the loop over the loader, after an epoch."""

    def stopped(self) -> None:
        """Run after the last epoch of a run that an operator or a signal ended."""

    def close(self) -> None:
        """Run when the session is closed, before the gate is closed."""

    def release(self) -> None:
        """Run after the gate is closed, to end threads and process groups."""

    def disconnect(self) -> None:
        """Run before this rank leaves the store; on rank 0, after all other ranks have left it."""

    def closed(self) -> None:
        """Run last when the session is closed; may end the process."""


class Hooks:
    """Lists of the hooks that features override, in the order of the features."""

    def __init__(self, features: Sequence[Feature]) -> None:
        def of(name: str) -> list[Callable[..., Any]]:
            unchanged = getattr(Feature, name)
            mine = (each for each in features if getattr(type(each), name) is not unchanged)
            return [getattr(each, name) for each in mine]

        self.begin, self.connect = of("begin"), of("connect")
        self.before_epoch, self.begin_epoch = of("before_epoch"), of("begin_epoch")
        self.loading, self.loaded = of("loading"), of("loaded")
        self.begin_step, self.begin_turn = of("begin_step"), of("begin_turn")
        self.end_turn, self.turn_ended = of("end_turn"), of("turn_ended")
        self.recompiled, self.step_ended = of("recompiled"), of("step_ended")
        self.end_epoch, self.epoch_ended = of("end_epoch"), of("epoch_ended")
        self.left_epoch, self.stopped = of("left_epoch"), of("stopped")
        self.close, self.release = of("close"), of("release")
        self.disconnect, self.closed = of("disconnect"), of("closed")
