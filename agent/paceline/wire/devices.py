"""What a rank computes on."""

from __future__ import annotations

import math

import msgspec

MOST_NAME = 200  # characters of a kind or a name


class RankDevice(msgspec.Struct, frozen=True):
    """A rank's device, as the rank itself found it, or as it emulates it."""

    kind: str  # torch's type of device: "cpu", "cuda", …
    name: str  # the model of the processor or accelerator
    cores: int  # CPU cores that the rank's process may use, by its affinity and its quota
    memory_bytes: int  # the accelerator's memory, or the machine's
    threads: int = 0  # CPU threads that the script computes with; 0: as many as cores
    flops: float | None = None  # operations a second in a trial; None: there was no trial
    emulated: bool = False  # the rank only behaves as if it had this device

    @property
    def used_cores(self) -> int:
        """Cores that the rank computes with: a single thread uses one of many."""
        return min(self.cores, self.threads or self.cores)

    def problem(self) -> str | None:
        """The first problem, which begins with the field; None: there is none."""
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
