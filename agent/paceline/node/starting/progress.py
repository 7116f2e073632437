"""A run's progress according to the server, to be shown in a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.errors import PacelineError
from paceline.node.client import Client
from paceline.wire import State

_POLL_S = 1.0
# Seconds between two requests for the verdict. It takes the server longer than the other values.
_VERDICT_POLL_S = 5.0
_TIMEOUT_S = 5.0
# Number of newest steps over which `Progress.step_s` and `Progress.waste` are averaged.
_AVERAGED_STEPS = 50

# Levels of the verdict at which the verdict is shown, with their labels.
LEVELS = {"held-up": "Slowed down", "watch": "Warning"}


@dataclass(frozen=True)
class Progress:
    """The progress of a run. A field is None while its value is unknown.

    Args:
        state: state of the run.
        policy: current policy, or the one requested last.
        epoch: epoch of the last complete step, from 0.
        epochs: number of epochs of the run.
        step: the last complete step, from 0.
        steps: number of steps of the whole run.
        step_s: mean time of the newest steps, in seconds.
        loss: loss of the last step that has one.
        waste: fraction of the ranks' time spent waiting for slower ranks, in the newest steps.
        level: level of the verdict: `held-up`, `watch`, `healthy` or `unknown`.
        verdict: which rank slows the run down, why and since when; empty: no rank.
        away: why the server does not answer now; empty: the server answers.
    """

    state: str = State.PENDING
    policy: str = ""
    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    steps: int | None = None
    step_s: float | None = None
    loss: float | None = None
    waste: float | None = None
    level: str = "unknown"
    verdict: str = ""
    away: str = ""

    @property
    def share(self) -> float:
        """Fraction of the run's steps that are done; 0 if the number of steps is unknown."""
        if not self.steps or self.step is None:
            return 0.0
        return min(1.0, (self.step + 1) / self.steps)

    @property
    def eta_s(self) -> float | None:
        """Seconds until the end of the run, if further steps take `step_s`; None: unknown."""
        if not self.steps or self.step is None or self.step_s is None:
            return None
        return max(0, self.steps - self.step - 1) * self.step_s

    @property
    def figures(self) -> list[str]:
        """The known values in words, from epoch to remaining time; only the state at first."""
        if self.step is None:
            return [f"{self.state} …"]
        epoch = f"epoch {(self.epoch or 0) + 1}"
        made = [epoch if self.epochs is None else f"{epoch}/{self.epochs}"]
        step = f"step {self.step + 1:,}"
        made.append(step if self.steps is None else f"{step} of {self.steps:,}")
        if self.step_s is not None:
            made.append(f"{duration(self.step_s)} per step")
        if self.loss is not None:
            made.append(f"loss {self.loss:.4g}")
        if self.waste is not None:
            made.append(f"waste {100 * self.waste:.0f} %")
        if self.eta_s is not None and not State(self.state).final:
            made.append(f"ETA {duration(self.eta_s)}")
        return made

    @property
    def judged(self) -> str:
        """The label of the verdict's level, and the verdict; empty if the level has no label."""
        said = LEVELS.get(self.level)
        return f"{said}: {self.verdict}" if said and self.verdict else ""

    @property
    def line(self) -> str:
        """The texts of `figures`, the policy and the verdict on one line."""
        parts = [*self.figures, *([f"policy {self.policy}"] if self.policy else [])]
        return ", ".join(parts) + (f". {self.judged}" if self.judged else "")


def duration(seconds: float) -> str:
    """Format a time with one or two units, such as ``2 h 05 min`` or ``12.5 s``."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    return f"{hours // 24} d {hours % 24} h"


def of_run(run: Mapping[str, Any], columns: Mapping[str, Any] | None = None) -> Progress:
    """Return the progress according to two answers of the server.

    `run` is the answer of `GET /runs/{id}`. `columns` is the answer of `GET /runs/{id}/steps` for
    the newest steps; None: there are no steps yet.
    """
    steps = None
    if run["epochs"] and run.get("steps_per_epoch"):
        steps = run["epochs"] * run["steps_per_epoch"]
    known = columns or {"step_s": [], "loss": [], "waste": []}
    losses = [loss for loss in known["loss"] if loss is not None]
    return Progress(
        state=run["state"],
        policy=run["policy"],
        epoch=run["epoch"],
        epochs=run["epochs"],
        step=run["step"],
        steps=steps,
        step_s=_mean(known["step_s"]),
        loss=losses[-1] if losses else None,
        waste=_mean(known["waste"]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def ask(client: Client, run: str) -> Progress:
    """Return a run's progress without its verdict."""
    now = client.call("GET", f"/runs/{run}")
    if now["step"] is None:
        return of_run(now)
    params = {"from": max(0, now["step"] - _AVERAGED_STEPS + 1), "points": _AVERAGED_STEPS}
    return of_run(now, client.call("GET", f"/runs/{run}/steps", params=params))


class ProgressPoller:
    """A poller of a run's progress in its own thread, so that training never waits for the server.

    A context manager. The thread has its own connection to the server.
    """

    def __init__(self, client: Client, run: str) -> None:
        self.now = Progress()
        self._client = client.twin(_TIMEOUT_S)
        self._run = run
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="progress", daemon=True)

    def __enter__(self) -> ProgressPoller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()

    def _poll(self) -> None:
        with self._client:
            judged_at = 0.0
            while True:
                judge = (
                    time.monotonic() - judged_at >= _VERDICT_POLL_S and self.now.step is not None
                )
                self.now = self._asked(judge)
                if judge:
                    judged_at = time.monotonic()
                if self._ending.wait(_POLL_S):
                    return

    def _asked(self, judge: bool) -> Progress:
        before = self.now
        try:
            now = ask(self._client, self._run)
            if not judge:
                return replace(now, level=before.level, verdict=before.verdict)
            verdict = self._client.call("GET", f"/runs/{self._run}/verdict")
        except PacelineError as error:
            return replace(before, away=str(error))
        return replace(now, level=verdict.get("level", "unknown"), verdict=verdict.get("what", ""))
