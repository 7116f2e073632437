"""The device that a rank computes on."""

from __future__ import annotations

import math

import msgspec

# Characters of a kind or a name.
MOST_NAME = 200


class RankDevice(msgspec.Struct, frozen=True):
    """A rank's device, as the rank itself found or emulates it."""

    # PyTorch's device type: "cpu", "cuda", …
    kind: str
    # The model of the processor or accelerator.
    name: str
    # CPU cores that the rank's process may use, by its affinity and its quota.
    cores: int
    # The memory of the accelerator, or of the machine for a CPU.
    memory_bytes: int
    # CPU threads with which the script computes; 0: as many as cores.
    threads: int = 0
    # Operations per second, measured in a trial; None: there was no trial.
    flops: float | None = None
    # True if the rank only behaves as if it had this device.
    emulated: bool = False

    @property
    def used_cores(self) -> int:
        """Number of cores that the rank computes with, which `threads` may limit."""
        return min(self.cores, self.threads or self.cores)

    def problem(self) -> str | None:
        """Return the first problem, which begins with the field's name; None if there is none."""
        for field, text in (("kind", self.kind), ("name", self.name)):
            if not 0 < len(text) <= MOST_NAME or not text.isprintable():
                return f"{field} = {text[:MOST_NAME]!r}: give 1 to {MOST_NAME} printable characters"
        if not 1 <= self.cores < 2**31:
            return f"cores = {self.cores}: give a whole number ≥ 1"
        for field, number in (("memory_bytes", self.memory_bytes), ("threads", self.threads)):
            if not 0 <= number < 2**62:
                return f"{field} = {number}: give a whole number ≥ 0"
        if self.flops is not None and not 0 < self.flops < math.inf:
            return f"flops = {self.flops}: give a number above 0"
        return None
