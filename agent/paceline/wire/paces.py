"""How fast ranks are, for a leader that picks the samples of a stream by itself."""

from __future__ import annotations

import msgspec

# Above 1e6 s per size unit, sample or step, sums and products with sizes would not be finite.
_MOST = 1e6


class Paces(msgspec.Struct, frozen=True):
    """A step with n samples, whose sizes add up to Λ, takes rank j ``a[j]·Λ + c[j]·n + b[j]`` s."""

    a: list[float]  # [W] s per size unit, > 0, at most 1e6
    c: list[float]  # [W] s per sample, 0 to 1e6
    b: list[float]  # [W] s per step, 0 to 1e6

    def problem(self, width: int) -> str | None:
        """What is wrong with them for so many ranks; None: nothing is."""
        for name, least in (("a", 1e-100), ("c", 0.0), ("b", 0.0)):
            values: list[float] = getattr(self, name)
            if len(values) != width:
                return f"paces.{name} are of {len(values)} of {width} ranks"
            if not all(least <= value <= _MOST for value in values):  # NaN is not
                return f"paces.{name} holds what is not a number from {least:g} to {_MOST:g}"
        return None
