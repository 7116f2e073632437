"""Measures the cost of changing batch shapes: recompilations, and cuDNN's benchmark.

Recompilations are read from TorchDynamo's private counter; without the counter, none are counted.
A test fails for each version of torch that lacks it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from paceline.core.terms import Terms

logger = logging.getLogger(__name__)

# Compilations of each frame.
_COUNTER = ("torch._dynamo.convert_frame", "FRAME_COMPILE_COUNTER")
# The class of models that torch.compile returns.
_OPTIMIZED = ("torch._dynamo.eval_frame", "OptimizedModule")
# In the suggested grid, an equal local batch has this many grid steps.
_PARTS = 4


def recompilations() -> int:
    """Return how often torch.compile has recompiled functions in this process so far.

    TorchDynamo recompiles a function for shapes, types or modes that its earlier code does not
    cover. ``torch._dynamo.reset()`` resets the number.
    """
    counter = _of_dynamo(*_COUNTER)
    if not isinstance(counter, dict):
        return 0
    return sum(count - 1 for count in list(counter.values()) if count > 1)


def is_compiled(model: nn.Module) -> bool:
    """Return whether `torch.compile` or ``compile()`` was called for the model or a part of it."""
    optimized = _of_dynamo(*_OPTIMIZED)
    return any(
        getattr(module, "_compiled_call_impl", None) is not None
        or (isinstance(optimized, type) and isinstance(module, optimized))
        for module in model.modules()
    )


def _of_dynamo(module: str, name: str) -> object:
    """Return an attribute of TorchDynamo; None if it is not imported, which takes seconds."""
    return getattr(sys.modules.get(module), name, None)


def suggested_grid(global_batch: int, world: int) -> int:
    """Return a divisor of the global batch of which an equal local batch has a few."""
    most = max(1, global_batch // (_PARTS * world))
    return max(grid for grid in range(1, most + 1) if global_batch % grid == 0)


class ShapeWarning:
    """A single warning in this rank's log about the cost of changing numbers of samples.

    There is no warning with `Session(shapes=…)`, nor with one rank, whose local batches are whole
    global batches. The session appends to `models` after construction.
    """

    def __init__(self, terms: Terms, world: int, models: Sequence[nn.Module]) -> None:
        self._batch, self._world = terms.global_batch, world
        self._budgeted = terms.token_budget is not None
        self._models = models
        self._quiet = world == 1 or terms.shapes.samples > 1

    def begin(self, *, on_cuda: bool) -> None:
        """Check the models, and cuDNN's benchmark, which matters on a CUDA device."""
        if not self._quiet and on_cuda and torch.backends.cudnn.benchmark:
            logger.warning(
                "torch.backends.cudnn.benchmark is on, and the plan changes how many samples this "
                "rank gets: cuDNN benchmarks its kernels again for each new number, within the "
                "step. Set it to False, or: %s",
                self._advice(),
            )
        if any(map(is_compiled, self._models)):
            self._warn_of_compiling("a model is compiled by torch.compile")

    def look(self, recompiled: int) -> None:
        """Take the number of recompilations in the newest step."""
        if recompiled:
            self._warn_of_compiling(f"functions were recompiled {recompiled} times in a step")

    def _warn_of_compiling(self, began: str) -> None:
        if self._quiet:
            return
        self._quiet = True
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
