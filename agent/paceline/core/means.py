"""The schedule of local SGD's means of replicas, without I/O."""

from __future__ import annotations

from collections.abc import Sequence


def part_due(step: int, every: int | None, parts: int = 1) -> int | None:
    """Return the part of the parameters that becomes its mean after a step; None if no part does.

    Parts take turns, ``every / parts`` steps apart, so that each has a mean every `every` steps (H
    of local SGD). `every` None: only where all ranks synchronise. `parts` is at most `every`.
    """
    if every is None:
        return None
    at = (step + 1) % every
    return next((part for part in range(parts) if part * every // parts == at), None)


def parted(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Return the parameters of each part: neighbours, so that parts are about equally large.

    `sizes` has the number of elements of each parameter. With fewer parameters than parts, some
    parts are empty.
    """
    made: list[list[int]] = [[] for _ in range(parts)]
    total, before = max(sum(sizes), 1), 0
    for number, size in enumerate(sizes):
        middle = before + size / 2
        made[min(int(parts * middle / total), parts - 1)].append(number)
        before += size
    return made
