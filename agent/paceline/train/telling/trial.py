"""What a rank's device can do: a trial of a second, where data sheets do not tell.

Taming Resource Heterogeneity In Distributed ML Training With Dynamic Batching, §III-B, takes
half-precision FLOP/s for servers of different kinds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

TRIAL_S = 1.0
# On an accelerator in half precision. CPUs train in single precision, and few of them compute in
# half precision at all.
_SIDES = {"cpu": (512, torch.float32)}
_OTHERS = (4096, torch.float16)


def flops(device: torch.device, hold: Callable[[float], None]) -> float | None:
    """Multiplies square matrices for `TRIAL_S` seconds, at least once; floating-point operations/s.

    Args:
        device: the model's.
        hold: called after each multiplication with the moment when it began: waits until the
            emulated device would be done, if one is emulated.

    Returns:
        None if the device cannot, as where its memory is full.
    """
    side, dtype = _SIDES.get(device.type, _OTHERS)
    try:
        with torch.no_grad():
            # Not random: the script's generator is left as it is.
            factor = torch.full((side, side), 0.5, dtype=dtype, device=device)
            product = torch.empty_like(factor)
            _multiply(factor, product)  # allocates, and wakes the device
            began = ended = time.perf_counter()
            done = 0
            while not done or ended < began + TRIAL_S:
                start = time.perf_counter()
                _multiply(factor, product)
                hold(start)
                done, ended = done + 1, time.perf_counter()
    except RuntimeError as error:  # out of memory, or no kernel for half precision
        logger.warning("the trial of %s failed: %s", device, error)
        return None
    return 2 * side**3 * done / (ended - began)


def _multiply(factor: torch.Tensor, product: torch.Tensor) -> None:
    torch.mm(factor, factor, out=product)
    float(product[0, 0])  # waits for the device
