"""The state of this node's NVIDIA GPUs, read through the driver's library NVML.

NVML is used if the package ``nvidia-ml-py`` (``paceline[nvml]``) and the NVIDIA driver are
installed. Without them, a node reports only the names of its GPUs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

from paceline.wire import GpuState

# Bits in which NVML reports why a GPU's clock is below its maximum, with words for the reasons. Two
# bits are left out: 1 means that the GPU is idle, and 4 that it runs at its power limit, as a busy
# GPU always does.
_REASONS = {
    0x02: "a user-set clock limit",
    0x08: "the hardware",
    0x10: "the slowest GPU of its sync-boost group",
    0x20: "heat",
    0x40: "heat",
    0x80: "the power supply",
    0x100: "the display clock setting",
}
# The driver is considered to hang if it has not answered for this many seconds.
DRIVER_HANGS_S = 10.0
_log = logging.getLogger(__name__)


class Gpus:
    """A reader of the states of all GPUs. If the driver hangs, only the reader's thread blocks."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        # Time of the newest request; None: the request was answered.
        self._asked_at: float | None = None
        self._states: list[GpuState] = []
        # True once it was logged that the driver does not answer.
        self._is_logged = False
        # False once NVML is known to be missing.
        self._is_there = True
        threading.Thread(target=self._work, name="paceline-gpus", daemon=True).start()

    def read(self) -> list[GpuState]:
        """Return the newest known states of the GPUs, and request new ones for the next call.

        The call does not wait and raises no errors. The result is empty if NVML is missing, fails,
        or has not answered for `DRIVER_HANGS_S`.
        """
        now = time.monotonic()
        if not self._is_there:
            return []
        if self._asked_at is None:
            self._asked_at = now
            self._asked.set()
        elif now >= self._asked_at + DRIVER_HANGS_S:
            if not self._is_logged:
                _log.warning(
                    "the driver of this node's NVIDIA GPUs has not answered for %g s: their "
                    "states are not reported until it does",
                    DRIVER_HANGS_S,
                )
            self._is_logged = True
            return []
        return self._states

    def _work(self) -> None:
        nvml = _opened()
        self._is_there = nvml is not None
        while self._is_there:
            self._asked.wait()
            self._asked.clear()
            self._states, self._is_logged = _states(nvml), False
            self._asked_at = None


def _states(nvml: Any) -> list[GpuState]:
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        _log.debug("the GPUs' states cannot be read: %s", error)
        return []
    return [_state(nvml, index) for index in range(count)]


def _opened() -> Any:
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        _log.info("only the names of this node's GPUs are reported, because NVML fails: %s", error)
        return None
    return nvml


def _state(nvml: Any, index: int) -> GpuState:
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        _log.debug("the state of GPU %d cannot be read: %s", index, error)
        return GpuState()

    def ask(name: str, *of: Any) -> int | None:
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
    """Return the reasons why a GPU's clock is below its maximum, in words, each only once."""
    return list(dict.fromkeys(words for bit, words in _REASONS.items() if bits & bit))
