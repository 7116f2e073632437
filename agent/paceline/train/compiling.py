"""Counts recompilations by torch.compile, and detects compiled models.

Recompilations are read from TorchDynamo's private counter; without the counter, no recompilations
are counted.
"""

from __future__ import annotations

import sys

from torch import nn

# Module and name of TorchDynamo's counter of compilations per frame.
_COUNTER = ("torch._dynamo.convert_frame", "FRAME_COMPILE_COUNTER")
_counter: dict[object, int] | None = None
_OPTIMIZED = ("torch._dynamo.eval_frame", "OptimizedModule")


def recompilations() -> int:
    """Return the number of recompilations by torch.compile in this process so far.

    TorchDynamo recompiles a function for shapes, types or modes that its earlier code does not
    cover. ``torch._dynamo.reset()`` resets the number.
    """
    global _counter
    if _counter is None:
        counter = _of_dynamo(*_COUNTER)
        if not isinstance(counter, dict):
            return 0
        _counter = counter
    # Return early, because each step calls this function. The counter is empty unless
    # torch.compile is used.
    if not _counter:
        return 0
    return sum(count - 1 for count in list(_counter.values()) if count > 1)


def is_compiled(model: nn.Module) -> bool:
    """Return whether `torch.compile` or ``compile()`` was called for the model or a part of it."""
    optimized = _of_dynamo(*_OPTIMIZED)
    return any(
        getattr(module, "_compiled_call_impl", None) is not None
        or (isinstance(optimized, type) and isinstance(module, optimized))
        for module in model.modules()
    )


def _of_dynamo(module: str, name: str) -> object:
    """Return an attribute of a TorchDynamo module; None if the module is not imported.

    The module is not imported here, because that would take seconds.
    """
    return getattr(sys.modules.get(module), name, None)
