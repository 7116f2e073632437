"""Each preset plans and takes as long in virtual time as when the data was made."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from golden import data, product


@functools.cache
def recorded() -> dict[str, Any]:
    """All cases, by name."""
    cases: dict[str, Any] = data.load("plans")
    return cases


def presets() -> list[str]:
    """The presets of which plans are recorded."""
    return sorted({name.split()[0] for name in recorded()})


def test_no_preset_has_gone() -> None:
    assert set(presets()) <= set(product.presets())
    assert len(presets()) == 20


@pytest.mark.parametrize("preset", presets())
def test_plans_are_as_recorded(preset: str) -> None:
    for name, case in recorded().items():
        if name.split()[0] == preset:
            problem = difference(name, case)
            assert problem is None, problem


def difference(name: str, case: dict[str, Any]) -> str | None:
    """How the first segment that is not as recorded differs; None: all are the same."""
    count = 0
    for segment, digests in zip(product.segments(case["scenario"]), case["segments"], strict=False):
        count += 1
        different = [key for key, value in data.digests(segment).items() if value != digests[key]]
        if not different:
            continue
        lines = [
            f"case {name!r}: segment {segment['seq']} of attempt {segment['attempt']}, steps from "
            f"{segment['first_step']}, {segment['policy']}: {', '.join(different)} differ",
            f"to compare: python -m golden.make show {name!r}, in two checkouts",
        ]
        clear = case["clear"]
        if (clear["attempt"], clear["seq"]) == (segment["attempt"], segment["seq"]):
            lines += data.differences(clear, segment)
        return "\n".join(lines)
    if count != len(case["segments"]):
        return f"case {name!r}: {count} segments, recorded {len(case['segments'])}"
    return None
