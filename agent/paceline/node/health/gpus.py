"""The state of this node's NVIDIA GPUs, as the driver's library NVML says it.

NVML is used where the package ``nvidia-ml-py`` is installed (``paceline[nvml]``) and the driver is
there. Without either, a node says nothing about its GPUs but their names.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from paceline.wire import GpuState

# Bits of NVML's reasons for a clock below its maximum. An idle GPU (1) is none, nor is the power
# limit (4): a GPU that has much to do is always at it.
_REASONS = {
    0x02: "the clock that somebody has set",
    0x08: "the hardware",
    0x10: "the slowest GPU of its group",
    0x20: "heat",
    0x40: "heat",
    0x80: "the power supply",
    0x100: "the clock of the display",
}
PATIENCE_S = 10.0  # with a driver that does not answer
_log = logging.getLogger(__name__)


class Gpus:
    """Reads the states of all GPUs in a thread of its own, which a driver that hangs may block."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        self._asked_at: float | None = None  # None: the newest question is answered
        self._states: list[GpuState] = []
        self._is_told = False  # that the driver does not answer
        self._is_there = True  # NVML, as far as is known
        threading.Thread(target=self._work, name="paceline-gpus", daemon=True).start()

    def read(self) -> list[GpuState]:
        """The state of each GPU as of the call before this one; returns at once, never raises.

        Empty where there is no NVML, and where NVML fails or has not answered for `PATIENCE_S`.
        """
        now = time.monotonic()
        if not self._is_there:
            return []
        if self._asked_at is None:
            self._asked_at = now
            self._asked.set()
        elif now >= self._asked_at + PATIENCE_S:
            if not self._is_told:
                _log.warning(
                    "the driver of this node's NVIDIA GPUs has not answered for %g s: nothing is "
                    "told of their states until it does",
                    PATIENCE_S,
                )
            self._is_told = True
            return []
        return self._states

    def _work(self) -> None:
        nvml = _opened()
        self._is_there = nvml is not None
        while self._is_there:
            self._asked.wait()
            self._asked.clear()
            self._states, self._is_told = _states(nvml), False
            self._asked_at = None


def _states(nvml: Any) -> list[GpuState]:
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        _log.debug("the GPUs' states cannot be read: %s", error)
        return []
    return [_state(nvml, index) for index in range(count)]


def _opened() -> Any:
    """NVML's module; None: it is not installed, or there is no driver."""
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        _log.info("nothing is known of this node's GPUs but their names: %s", error)
        return None
    return nvml


def _state(nvml: Any, index: int) -> GpuState:
    """The state of a GPU; all of it is unknown if the GPU is lost."""
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        _log.debug("the state of GPU %d cannot be read: %s", index, error)
        return GpuState()

    def ask(name: str, *of: Any) -> int | None:
        """A figure; None: this GPU does not have it."""
        function: Callable[..., int] | None = getattr(nvml, name, None)
        try:
            return None if function is None else int(function(device, *of))
        except nvml.NVMLError:
            return None

    milliwatts = ask("nvmlDeviceGetPowerUsage")
    memory = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return GpuState(
        sm_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        most_sm_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        throttled_by=reasons(ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0),
        temperature_c=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        power_w=None if milliwatts is None else milliwatts / 1e3,
        ecc_errors=ask("nvmlDeviceGetTotalEccErrors", *memory),
    )


def reasons(bits: int) -> list[str]:
    """Why a GPU's clock is below its maximum, in words, each once."""
    return list(dict.fromkeys(words for bit, words in _REASONS.items() if bits & bit))
