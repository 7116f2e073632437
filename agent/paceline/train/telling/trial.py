"""Measures a device's speed in a trial of a second, if data sheets do not give it.

Taming Resource Heterogeneity In Distributed ML Training With Dynamic Batching, §III-B, uses
half-precision FLOP/s for servers of different kinds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

TRIAL_S = 1.0
# Half precision on an accelerator. CPUs train in single precision, and few of them compute in half
# precision at all.
_SIDES = {"cpu": (512, torch.float32)}
_OTHERS = (4096, torch.float16)


def flops(device: torch.device, hold: Callable[[float], None]) -> float | None:
    """Return floating-point operations/s of square matrix products over `TRIAL_S` seconds.

    `hold` is called after each product with its start time; it waits until the emulated device
    would be done, if a device is emulated. None: the device failed, for example because its memory
    is full.
    """
    side, dtype = _SIDES.get(device.type, _OTHERS)
    try:
        with torch.no_grad():
            # Constant instead of random, so that the script's generator stays untouched.
            factor = torch.full((side, side), 0.5, dtype=dtype, device=device)
            product = torch.empty_like(factor)
            # The first product allocates memory and wakes the device.
            _multiply(factor, product)
            began = ended = time.perf_counter()
            done = 0
            while not done or ended < began + TRIAL_S:
                start = time.perf_counter()
                _multiply(factor, product)
                hold(start)
                done, ended = done + 1, time.perf_counter()
    # Out of memory, or no kernel for half precision.
    except RuntimeError as error:
        logger.warning("the trial of %s failed: %s", device, error)
        return None
    return 2 * side**3 * done / (ended - began)


def _multiply(factor: torch.Tensor, product: torch.Tensor) -> None:
    torch.mm(factor, factor, out=product)
    # Reading a value waits for the device.
    float(product[0, 0])
