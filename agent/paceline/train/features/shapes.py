"""Warns of the cost of changing batch shapes: recompilations, and cuDNN's benchmark."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn

from paceline.core.terms import Terms
from paceline.train.compiling import is_compiled
from paceline.train.device import Device
from paceline.train.feature import Feature
from paceline.train.timing import RunningStep

logger = logging.getLogger(__name__)

_GRID_PARTS = 4


def suggested_grid(global_batch: int, world: int) -> int:
    """Return the value of `Session(shapes=…)` that `ShapeWarning` suggests.

    It is the largest divisor of the global batch that is at most a quarter of an equal local batch;
    1 if there is none.
    """
    most = max(1, global_batch // (_GRID_PARTS * world))
    return max(grid for grid in range(1, most + 1) if global_batch % grid == 0)


class ShapeWarning(Feature):
    """Warning in this rank's log that changing numbers of samples make steps slower.

    The session appends to `models` after construction.
    """

    def __init__(
        self, terms: Terms, world: int, models: Sequence[nn.Module], device: Device
    ) -> None:
        self._batch, self._world = terms.global_batch, world
        self._budgeted = terms.token_budget is not None
        self._models, self._device = models, device
        self._warned = False

    def connect(self) -> None:
        if self._device.on_cuda and torch.backends.cudnn.benchmark:
            logger.warning(
                "torch.backends.cudnn.benchmark is on, and the plan changes how many samples this "
                "rank gets: cuDNN benchmarks its kernels again for each new number, within the "
                "step. Set it to False, unless few batch sizes occur. %s",
                self._advice(),
            )
        if any(map(is_compiled, self._models)):
            self._warn_of_compiling("a model is compiled by torch.compile")

    def recompiled(self, running: RunningStep) -> None:
        self._warn_of_compiling(f"functions were recompiled {running.recompiles} times in a step")

    def _warn_of_compiling(self, began: str) -> None:
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "%s, and the plan changes how many samples this rank gets: each new number may cause a "
            "recompilation. %s; torch.compile(…, dynamic=True) compiles once for all sizes",
            began,
            self._advice(),
        )

    def _advice(self) -> str:
        if self._budgeted:
            return "With token_budget the number of different batch sizes cannot be limited"
        grid = suggested_grid(self._batch, self._world)
        if grid == 1:
            return (
                "Session(shapes=N) gives ranks multiples of N samples, so that few batch sizes "
                f"occur; N must divide global_batch, {self._batch}"
            )
        return (
            f"Session(shapes={grid}) gives ranks multiples of {grid} samples, so few batch sizes "
            "occur"
        )
