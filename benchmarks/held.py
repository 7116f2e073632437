"""Emulated devices under plain DistributedDataParallel, which has no Session to emulate them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch.distributed as dist

from paceline.core.cost import Features
from paceline.core.emulation import Emulation


class Held:
    """An emulated device under plain DDP: it holds gradients back until their time is over."""

    def __init__(self) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._emulation = Emulation.parse(os.environ["PACELINE_EMULATE"], self._world)
        self._until = 0.0

    def begin(self, step: int, sizes: list[int]) -> None:
        """Begins a step with samples of the given sizes."""
        spent_s = self._emulation.rank_s(self._rank, step, _features(sizes))
        self._until = time.perf_counter() + spent_s

    def before(self, hook: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """A communication hook that waits until the emulated device has computed."""

        def held(state, bucket):  # type: ignore[no-untyped-def]  # DDP checks annotations
            time.sleep(max(0.0, self._until - time.perf_counter()))
            return hook(state, bucket)

        return held

    def speeds(self, sizes: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """How many steps with samples of the given sizes each rank does in a second, [W]."""
        all_ranks = Features(*(np.full(self._world, value) for value in _features(sizes)))
        steps = [self._emulation.compute_s(step, all_ranks) for step in range(256)]
        return np.asarray(1 / np.mean(steps, axis=0))


def _features(sizes: list[int]) -> Features:
    own = np.array(sizes, float)
    batch: Any = (len(own), own.sum(), (own**2).sum(), own.max())
    return Features(*batch)
