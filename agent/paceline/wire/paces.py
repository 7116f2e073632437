"""How fast ranks are, for a leader that picks the samples of a stream by itself."""

from __future__ import annotations

import math

import msgspec


class Paces(msgspec.Struct, frozen=True):
    """A step with n samples, whose sizes add up to Λ, takes rank j ``a[j]·Λ + c[j]·n + b[j]`` s."""

    a: list[float]  # [W] s per size unit, > 0
    c: list[float]  # [W] s per sample, ≥ 0
    b: list[float]  # [W] s per step, ≥ 0

    def problem(self, width: int) -> str | None:
        """What is wrong with them for so many ranks; None: nothing is."""
        for name, least in (("a", 1e-100), ("c", 0.0), ("b", 0.0)):
            values: list[float] = getattr(self, name)
            if len(values) != width:
                return f"paces.{name} are of {len(values)} of {width} ranks"
            if not all(math.isfinite(value) and value >= least for value in values):
                return f"paces.{name} holds what is not a finite number of at least {least:g}"
        return None
