"""The speeds of ranks, for a leader that picks the samples of a stream without the controller."""

from __future__ import annotations

import msgspec

# Above 1e6 s per size unit, sample or step, sums and products with sizes would not be finite.
_MOST = 1e6


class Paces(msgspec.Struct, frozen=True):
    """Linear model of step times.

    A step with n samples of total size Λ takes rank j ``a[j]·Λ + c[j]·n + b[j]`` seconds.
    """

    # [W] seconds per size unit, above 0 and at most 1e6
    a: list[float]
    # [W] seconds per sample, 0 to 1e6
    c: list[float]
    # [W] seconds per step, 0 to 1e6
    b: list[float]

    def problem(self, width: int) -> str | None:
        """Return the first problem with the values for `width` ranks; None if there is none."""
        for name, least in (("a", 1e-100), ("c", 0.0), ("b", 0.0)):
            values: list[float] = getattr(self, name)
            if len(values) != width:
                return f"paces.{name} has {len(values)} values for {width} ranks"
            # The comparison is false for NaN, too.
            if not all(least <= value <= _MOST for value in values):
                return f"paces.{name} holds a value that is not from {least:g} to {_MOST:g}"
        return None
