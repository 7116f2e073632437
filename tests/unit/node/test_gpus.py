"""What is told of GPUs: nothing without NVML, and words for what NVML says.

No GPU is here: NVML's functions are stood in for. Its names and numbers are those of nvidia-ml-py.
"""

# ruff: noqa: N802 - functions are called as NVML calls them

from __future__ import annotations

import logging
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.node.health import gpus
from paceline.node.health.gpus import Gpus, reasons
from paceline.wire import GpuState
from paceline_backend.insight.verdict import throttled
from support.waiting import until


class NVMLError(Exception):
    """NVML's own."""


class Nvml(SimpleNamespace):
    """A driver with one GPU that is hot and counts no errors."""

    NVMLError = NVMLError
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0

    def nvmlInit(self) -> None:
        if getattr(self, "missing", False):
            raise NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if getattr(self, "lost", False):
            raise NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetClockInfo(self, _: int, clock: int) -> int:
        assert clock == self.NVML_CLOCK_SM
        return 780

    def nvmlDeviceGetMaxClockInfo(self, _: int, clock: int) -> int:
        assert clock == self.NVML_CLOCK_SM
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _: int) -> int:
        return 0x61  # idle, and both kinds of heat

    def nvmlDeviceGetTemperature(self, _: int, __: int) -> int:
        return 87

    def nvmlDeviceGetPowerUsage(self, _: int) -> int:
        return 212_500

    def nvmlDeviceGetTotalEccErrors(self, _: int, __: int, ___: int) -> int:
        raise NVMLError("Not Supported")


HOT = GpuState(780, 1980, ["heat"], 87, 212.5, None)


def use(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_without_the_package_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, None)  # importing it raises ImportError
    assert Gpus().read() == []


def test_without_a_driver_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, Nvml(missing=True))
    monkeypatch.setattr(gpus, "DRIVER_HANGS_S", 0.0)
    states = Gpus()
    until(lambda: not states._is_there, "the answer of the library")
    assert [states.read(), states.read()] == [[], []]
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not warned, "no driver is missed"


def test_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Nvml())
    states = Gpus()
    until(states.read, "the first answer")
    [state] = states.read()
    assert state == HOT


def test_a_gpu_that_is_lost_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    use(monkeypatch, nvml)
    states = Gpus()
    nvml.lost = True
    until(lambda: states.read() == [GpuState()], "the answer")
    nvml.lost = False
    until(lambda: states.read() == [HOT], "the GPU")


def test_a_driver_that_hangs_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvml, answers = Nvml(), threading.Event()
    count = nvml.nvmlDeviceGetCount
    nvml.nvmlDeviceGetCount = lambda: answers.wait() and count()
    use(monkeypatch, nvml)
    states = Gpus()
    assert states.read() == []
    assert not caplog.records
    monkeypatch.setattr(gpus, "DRIVER_HANGS_S", 0.0)
    assert [states.read(), states.read()] == [[], []]
    [warning] = caplog.messages
    assert "has not answered for 0 s" in warning
    answers.set()
    monkeypatch.setattr(gpus, "DRIVER_HANGS_S", 3600.0)
    until(lambda: states.read() == [HOT], "the driver to answer again")


def test_reasons_have_words() -> None:
    assert reasons(0x00) == reasons(0x01) == []
    assert reasons(0x04) == []  # it has much to do
    assert reasons(0x08 | 0x80) == ["the hardware", "the power supply"]
    assert all(reasons(bit) for bit in gpus._REASONS)


def test_a_throttled_gpu_is_a_sentence() -> None:
    cool = {"throttled_by": [], "sm_mhz": 1980, "most_sm_mhz": 1980}
    hot = {"throttled_by": ["heat"], "sm_mhz": 780, "most_sm_mhz": 1980}
    assert throttled([cool, hot]) == ["Its GPU 1 is throttled by heat: 780 of 1,980 MHz."]
    unknown = {"throttled_by": ["heat", "the power supply"], "sm_mhz": None, "most_sm_mhz": None}
    assert throttled([unknown]) == ["Its GPU 0 is throttled by heat and the power supply."]
