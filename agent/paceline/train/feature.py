"""Base of the loop's optional features: a feature overrides the hooks that it needs.

`loop.Loop` makes a feature only if its option is set, and lists the hooks once (`Hooks`), so that a
feature that is off costs nothing. Features share a `state.TrainingState` and do not know each other
or the loop. All hooks run in the training thread. The life of a loop, where the gate
(`sync.gate.SyncGate`) is where ranks synchronise:

- `begin`, `connect`: the loader's first iteration begins; before and after the ranks agree that
  they begin alike. The rank's parts (`wiring`) are made after `connect`.
- `before_epoch`, `begin_epoch`: the script begins a pass over the loader; the pass has steps.
- `loading`, `loaded`: before and after a batch is loaded.
- `begin_step`: a step's batch is loaded; before the gate.
- `begin_turn`, `end_turn`, `turn_over`: an iteration of the script's loop begins; its body has
  ended; the gate is passed. A step has several turns with micro-batches, or if this rank takes over
  batches.
- `measured`: all times of a turn are known.
- `step_over`: a planned step has ended, and the gate is passed.
- `end_epoch`, `epoch_over`, `left_epoch`: the loop over the loader has ended; all ranks have come
  out of the gate, and collectives are still allowed; the rank is outside.
- `stopped`: an operator or a signal ended the run, and the loop over the loader is left.
- `close`, `release`, `disconnect`, `closed`: the session is closed, before the gate is; after it;
  before this rank leaves the ranks' store, on rank 0 after the others have left; at the very end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.train.parts import Step
from paceline.train.timing import RunningStep


class Feature:
    """An optional feature of the loop, whose hooks do nothing here; see the module."""

    def reads(self, dataset: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the data set and the options of the loader's DataLoader."""
        return dataset, options

    def begin(self) -> None:
        """Begin with the loader's first iteration; other ranks may be late or fail to come."""

    def connect(self) -> None:
        """Prepare for the plan; may replace the limits in the state's context. Collective."""

    def before_epoch(self) -> None:
        """Run before a pass over the loader, of which it is not known if it has steps."""

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch that has steps."""

    def loading(self) -> None:
        """Run before the loading of a batch, and before the DataLoader starts its processes."""

    def loaded(self, batch: Any, data_s: float) -> Any:
        """Return the batch that was loaded, for which the script waited `data_s` seconds."""
        return batch

    def begin_step(self, step: Step) -> None:
        """Begin a step."""

    def begin_turn(self, turn: Step) -> None:
        """Begin an iteration of the script's loop."""

    def end_turn(self, running: RunningStep) -> None:
        """End the body of the script's loop; not called if the script left the loop in it."""

    def turn_over(self, running: RunningStep, closing: bool) -> None:
        """End an iteration; `closing` if a break, a return or an exception left the loop."""

    def measured(self, running: RunningStep) -> None:
        """Take the times of an iteration."""

    def step_over(self, step: Step) -> None:
        """End a planned step."""

    def end_epoch(self, ran_out: bool, raised: bool) -> None:
        """End an epoch; `ran_out` unless the script left early, `raised` if by an exception."""

    def epoch_over(self, ran_out: bool) -> None:
        """End an epoch after all ranks have ended it."""

    def left_epoch(self, epoch: int) -> None:
        """Run outside the loop over the loader, after an epoch."""

    def stopped(self) -> None:
        """End after a stop."""

    def close(self) -> None:
        """End with the session, while other ranks may still wait for this one."""

    def release(self) -> None:
        """End threads and process groups."""

    def disconnect(self) -> None:
        """Stop using the ranks' store."""

    def closed(self) -> None:
        """Run after everything else; may end the process."""


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
        self.end_turn, self.turn_over = of("end_turn"), of("turn_over")
        self.measured, self.step_over = of("measured"), of("step_over")
        self.end_epoch, self.epoch_over = of("end_epoch"), of("epoch_over")
        self.left_epoch, self.stopped = of("left_epoch"), of("stopped")
        self.close, self.release = of("close"), of("release")
        self.disconnect, self.closed = of("disconnect"), of("closed")
