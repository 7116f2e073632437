"""Explain why a run shows no steps, or why no policy can be in force, where no verdict exists."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from paceline.wire import OBSERVED, State

# A script may spend this long before its first step.
PATIENCE_S = 60.0

_HELPS = (
    "use a Session to let Paceline plan batches, or `paceline run --observe` or "
    "`paceline observe -- torchrun …` to only measure the script"
)


def of_run(run: Mapping[str, Any], equal_because: str = "") -> str | None:
    """Return a sentence for the user, or None.

    `run` is the row of the run. `equal_because` is why its ranks get equal local batches whatever
    the policy plans, empty if they do not.
    """
    if equal_because:
        return f"Ranks train with equal local batches, whatever the policy: {equal_because}"
    observed = run["policy"] == OBSERVED
    if run["attempt"] is None:
        if not _trained_unseen(run):
            return None
        if observed:
            return (
                "No rank has stepped an optimiser of a model that DistributedDataParallel or FSDP2 "
                "wraps, so Paceline cannot measure steps."
            )
        return (
            "No rank has iterated over the loader of a paceline.Session, so Paceline neither plans "
            f"batches nor measures steps: {_HELPS}."
        )
    if observed:
        return (
            "Observed: the script divides its batches itself, so no policy can be in force. With a "
            "Session, Paceline would plan them."
        )
    return None


def _trained_unseen(run: Mapping[str, Any]) -> bool:
    """Return whether a run has trained, or should train by now, without messages from ranks."""
    if run["backend"] == "simulated" or run["started_at"] is None:
        return False
    if run["state"] == State.FINISHED:
        return True
    return bool(run["state"] == State.RUNNING and time.time() > run["started_at"] + PATIENCE_S)
