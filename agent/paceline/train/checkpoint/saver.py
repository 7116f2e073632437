"""Saves and loads checkpoints, on all ranks at once.

A failed save never ends training: the reason is logged.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.core.errors import PacelineError
from paceline.core.terms import whole
from paceline.train.checkpoint.contents import (
    Contents,
    State,
    copied,
    random_state,
    set_random_state,
)
from paceline.train.checkpoint.position import Position
from paceline.train.plan_shard import LocalStep
from paceline.train.startup import TIMEOUT
from paceline.train.sync.outer import Outer

logger = logging.getLogger(__name__)

# Limit on the wait for `reported`, in case the bus or its disk hangs.
_REPORTED_S = 10.0
_COMPLETE = re.compile(r"step-(\d{9,})")
_UNFINISHED = re.compile(r"\.step-\d{9,}\.(new|old)")


@dataclass(frozen=True)
class Schedule:
    """Directory, frequency and number of checkpoints, the same on all ranks; validated.

    `every_steps` is the maximum number of steps that must be trained again if all ranks are killed.
    Only rank 0's clock decides whether `every_s` seconds have passed.
    """

    directory: Path
    every_steps: int | None
    every_s: float | None
    keep: int

    def __post_init__(self) -> None:
        whole("keep", self.keep, 1)
        if self.every_steps is not None:
            whole("every_steps", self.every_steps, 1)
        if self.every_s is not None and not self.every_s > 0:
            raise ValueError(f"every_s is {self.every_s}: it must be above 0")
        if self.every_steps is None and self.every_s is None:
            raise ValueError("give every_steps or every_s: how often to save a checkpoint")

    @property
    def interval(self) -> int | None:
        """Return the number of steps between two saves.

        It is `every_steps` minus 10 %, to leave time for writing the checkpoint.
        """
        return self.every_steps and self.every_steps - self.every_steps // 10


class Saver:
    """Loader and writer of checkpoints. All ranks make the same calls.

    A checkpoint has rank 0's model and optimiser, because replicas are equal when it is saved. It
    also has each rank's random numbers, and each rank's parts of sharded tensors. Training waits
    until all state is copied to the CPU; a thread writes the copy. Training also waits for the
    thread if the newest written checkpoint is `every_steps` steps old.
    """

    def __init__(
        self, schedule: Schedule, contents: Contents, rank: int, samples: int, outer: Outer
    ) -> None:
        # This import takes a second. It is done here, so that it does not delay a step, and does
        # not run in a thread while data loaders fork.
        importlib.import_module("paceline.train.checkpoint.storage")
        self._schedule, self._contents = schedule, contents
        self._rank, self._samples, self._outer = rank, samples, outer
        self._folder = Folder(schedule.directory, schedule.keep)
        # The training thread uses `_group`, the writing thread `_files`: two threads must not use
        # the same group. Both groups are new, because the default group may use NCCL.
        several = dist.is_available() and dist.is_initialized()
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT) if several else None
        self._files = dist.new_group(backend="gloo", timeout=TIMEOUT) if several else None
        self._thread: threading.Thread | None = None
        # Number of steps before the newest checkpoint (`_steps`), and before the newest checkpoint
        # whose writing has ended (`_saved`).
        self._steps = 0
        self._saved = 0
        self._time = time.monotonic()
        self._random: State = {}

    def load(self) -> Position | None:
        """Load the newest checkpoint into the script's objects, if there is one.

        Raises:
            ValueError: ranks have different arguments, or the checkpoint is from another data set.
            RuntimeError: the checkpoint is from a model or an optimiser with other parameters.
            PacelineError: the directory or the checkpoint cannot be read.
        """
        newest = self._agree()
        if newest is None:
            return None
        state = self._read(newest)
        position = Position.of_state(state["session"], self._samples)
        self._contents.load(state)
        self._outer.load(state)
        self._random = {k: v for k, v in state.items() if k.startswith("random/")}
        self._steps = self._saved = newest
        if self._rank == 0:
            logger.warning("resuming from checkpoint %s", self._folder.whole(newest))
        return position

    def restore_random(self) -> None:
        """Restore the checkpoint's random numbers, once, when training continues."""
        state, self._random = self._random, {}
        set_random_state(state, self._rank)

    def due(self, step: LocalStep, stepped: bool) -> bool:
        """Return whether to save a checkpoint after a step that all ranks have ended. Collective.

        `stepped`: the optimiser stepped in this step. Otherwise gradients accumulate on this rank,
        which a checkpoint does not contain, so the checkpoint is postponed.
        """
        self._hold(step.step + 1)
        steps, s = self._schedule.interval, self._schedule.every_s
        by_steps = steps is not None and step.step + 1 - self._steps >= steps
        if not by_steps and (s is None or not step.last):
            return False
        by_time = s is not None and time.monotonic() - self._time >= s
        return self._all(stepped and (by_steps or by_time or self._rank > 0))

    def save_last(self, position: Position | None, reported: threading.Event | None) -> None:
        """Save a checkpoint before this process ends; wait until all ranks have saved. Collective.

        `position` is the position after the last optimiser step. It is None if that step was in an
        earlier epoch: then the position is unknown, and no checkpoint is saved.
        """
        if position is None and self._rank == 0:
            logger.error(
                "no checkpoint was saved: gradients have accumulated since the previous epoch; a "
                "restart begins at step %d",
                self._folder.newest() or 0,
            )
        if self._all(position is not None and position.step > self._steps) and position is not None:
            self.save(position, reported)
        self.wait()
        # Wait for all ranks: once the ranks of one node have exited, the launcher soon ends the
        # ranks of the other nodes.
        self._all(True)

    def _all(self, vote: bool) -> bool:
        """Return whether the vote is True on all ranks. Collective."""
        votes = torch.tensor([vote], dtype=torch.int)
        if self._group is not None:
            dist.all_reduce(votes, dist.ReduceOp.MIN, self._group)
        return bool(votes.item())

    def save(self, position: Position, reported: threading.Event | None = None) -> None:
        """Save a checkpoint, after the previous one is written. A failure is logged.

        `reported` is set once all earlier steps are stored for the control plane. The checkpoint is
        written only then, or after 10 s (`_REPORTED_S`). A run that resumes from the checkpoint
        does not train, and so does not report, these earlier steps again.
        """
        self.wait()
        self._steps, self._time = position.step, time.monotonic()
        state = self._copied(position)
        if state is None:
            self._saved = position.step
            return
        work = position.step, state, reported
        self._thread = threading.Thread(
            target=self._write, args=work, name="paceline-checkpoint", daemon=True
        )
        self._thread.start()
        self._hold(position.step)

    def _copied(self, position: Position) -> State | None:
        """Copy this rank's state; None if a ``state_dict()`` failed on any rank."""
        state, failure = None, ""
        try:
            state = copied(self._state(position))
        # The script's own classes may raise anything.
        except Exception as error:
            failure = f"state_dict() failed with {type(error).__name__}: {error}"
        if self._all(not failure):
            return state
        if failure or self._rank == 0:
            self._failed(position.step, failure or "state_dict() failed on another rank")
        return None

    def wait(self) -> None:
        """Wait for the checkpoint that is being written."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _hold(self, steps: int) -> None:
        """Wait for the writing thread if the newest written checkpoint is `every_steps` steps old.

        Only rank 0 waits here; the other ranks wait for rank 0 in their next collective.
        """
        bound = self._schedule.every_steps
        if self._rank == 0 and bound is not None and steps - self._saved >= bound:
            self.wait()

    def _write(self, steps: int, state: State, reported: threading.Event | None) -> None:
        from paceline.train.checkpoint import storage

        try:
            if reported is not None:
                reported.wait(_REPORTED_S)
            storage.write(self._folder.unfinished(steps), state, self._files)
            if self._rank == 0:
                self._folder.finish(steps)
        # The disk may fail, a rank may be gone, or a value may not be picklable.
        except Exception as error:
            if self._rank == 0:
                self._failed(steps, error)
        self._saved = steps

    def _failed(self, steps: int, error: Exception | str) -> None:
        if self._rank == 0:
            # Deleting the unfinished checkpoint frees space on a full disk.
            with suppress(OSError):
                self._folder.clear()
        text = "no checkpoint was saved at step %d: %s; a restart begins at step %d"
        logger.error(text, steps, error, self._folder.newest() or 0)

    def close(self) -> None:
        """Wait for the checkpoint that is being written, and end the process groups."""
        self.wait()
        groups, self._group, self._files = (self._group, self._files), None, None
        for group in groups:
            if group is not None:
                # The script may have ended all groups.
                with suppress(ValueError):
                    dist.destroy_process_group(group)

    def _state(self, position: Position) -> State:
        mine = random_state(self._rank)
        if self._rank > 0:
            return {**mine, **self._contents.shards()}
        return {
            **mine,
            **self._contents.state(),
            **self._outer.state(),
            "session": position.as_state(self._samples, self._rank),
        }

    def _read(self, steps: int) -> State:
        from paceline.train.checkpoint import storage

        path = self._folder.whole(steps)
        try:
            return storage.read(path, self._rank, self._group, self._contents.layout())
        except PacelineError as error:
            raise PacelineError(
                f"checkpoint {path} cannot be read: {error}: all nodes must share its directory; "
                "delete the checkpoint if it is damaged"
            ) from error

    def _agree(self) -> int | None:
        """Check that all ranks have the same arguments, and find the newest checkpoint.

        Return its step count, which rank 0 reads from the directory; None if there is none.
        """
        arguments = {**asdict(self._schedule), "directory": str(self._schedule.directory)}
        given = arguments | self._contents.given
        mine = given, *(self._find_newest() if self._rank == 0 else (None, ""))
        gathered: list[Any] = [mine]
        if self._group is not None:
            gathered = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(gathered, mine, self._group)
        first, newest, error = gathered[0]
        if error:
            raise PacelineError(f"checkpoint directory {self._folder.path}: {error}")
        for rank, (other, *_) in enumerate(gathered):
            if other != first:
                raise ValueError(
                    f"session.checkpoint was called with {other} on rank {rank} but with {first} "
                    "on rank 0: give every rank the same values"
                )
        return None if newest is None else int(newest)

    def _find_newest(self) -> tuple[int | None, str]:
        try:
            self._folder.make()
            return self._folder.newest(), ""
        except OSError as error:
            return None, str(error)


class Folder:
    """The newest `keep` checkpoints of one training. Only rank 0 changes the directory.

    A checkpoint is written under a hidden name and then renamed. Before deletion it gets a hidden
    name again. So a process that is killed at any time leaves only complete checkpoints, and hidden
    directories that `clear` deletes.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self.keep = path, keep

    def make(self) -> None:
        """Create the directory if needed, and delete leftovers of killed processes."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.clear()

    def steps(self) -> list[int]:
        """Return the step counts of the complete checkpoints, ascending."""
        matches = [_COMPLETE.fullmatch(entry.name) for entry in self.path.iterdir()]
        return sorted(int(match[1]) for match in matches if match)

    def newest(self) -> int | None:
        """Return the step count of the newest complete checkpoint; None if there is none."""
        return max(self.steps(), default=None)

    def whole(self, steps: int) -> Path:
        """Return the path of the complete checkpoint that was saved after `steps` steps."""
        return self.path / f"step-{steps:09d}"

    def unfinished(self, steps: int) -> Path:
        """Return the path at which the checkpoint after `steps` steps is written."""
        return self.path / f".step-{steps:09d}.new"

    def finish(self, steps: int) -> None:
        """Rename a written checkpoint to its final name, and delete all but the newest `keep`."""
        written = self.unfinished(steps)
        _flush_directory(written)
        # An earlier training may have left a checkpoint of the same step.
        self._remove(steps)
        written.rename(self.whole(steps))
        _flush_directory(self.path)
        for old in self.steps()[: -self.keep]:
            self._remove(old)

    def clear(self) -> None:
        """Delete unfinished and half-deleted checkpoints."""
        for entry in list(self.path.iterdir()):
            if _UNFINISHED.fullmatch(entry.name):
                shutil.rmtree(entry)

    def _remove(self, steps: int) -> None:
        whole = self.whole(steps)
        if whole.exists():
            old = self.path / f".step-{steps:09d}.old"
            whole.rename(old)
            shutil.rmtree(old)


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
