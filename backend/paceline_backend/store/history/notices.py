"""What to know of a run that no verdict tells: why it shows no steps, or takes no policy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from paceline.wire import OBSERVED, State

PATIENCE_S = 60.0  # a script may load for so long before its first step

_HELPS = (
    "`paceline run --observe` and `paceline observe -- torchrun …` show such a script as it is, "
    "and a Session lets Paceline plan its batches"
)


def of_run(run: Mapping[str, Any], equal_because: str = "") -> str | None:
    """A sentence for people; None: there is nothing to say.

    Args:
        run: its row.
        equal_because: why its ranks get equal parts, whatever the policy plans; empty: they do not.
    """
    if equal_because:
        return f"Ranks train with equal parts, whatever the policy: {equal_because}"
    observed = run["policy"] == OBSERVED
    if run["attempt"] is None:
        if not _trained_unseen(run):
            return None
        if observed:
            return (
                "No rank has stepped an optimiser of a model that DistributedDataParallel or FSDP2 "
                "wraps, so nothing is known of its steps."
            )
        return (
            "No rank has begun a loop over the loader of a paceline.Session, so nothing is planned "
            f"and nothing is known of its steps: {_HELPS}."
        )
    if observed:
        return (
            "Observed: the script divides its batches itself, so no policy can be in force. With a "
            "Session, Paceline would plan them."
        )
    return None


def _trained_unseen(run: Mapping[str, Any]) -> bool:
    """Whether a run has trained, or should have begun to, without a word of its ranks."""
    if run["backend"] == "simulated" or run["started_at"] is None:
        return False
    if run["state"] == State.FINISHED:
        return True
    return bool(run["state"] == State.RUNNING and time.time() > run["started_at"] + PATIENCE_S)
