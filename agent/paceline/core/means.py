"""Local SGD's means of replicas, as a rule without I/O."""

from __future__ import annotations


def is_due(step: int, every: int | None) -> bool:
    """Whether replicas become their mean after a step.

    Args:
        step: of the run, from 0.
        every: steps between two means (H of local SGD); None: only where all ranks meet.
    """
    return every is not None and (step + 1) % every == 0
