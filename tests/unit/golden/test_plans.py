"""Each preset plans and takes as long in virtual time as when the data was made."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest

from paceline.policies import jit
from unit.golden import data, product


@functools.cache
def recorded() -> dict[str, Any]:
    cases: dict[str, Any] = data.load("plans")
    return cases


def presets() -> list[str]:
    return sorted({name.split()[0] for name in recorded()})


def test_no_preset_has_gone() -> None:
    assert set(presets()) <= set(product.presets())
    assert len(presets()) == 19


@pytest.mark.parametrize("preset", presets())
def test_plans_are_as_recorded(preset: str) -> None:
    for name, case in recorded().items():
        if name.split()[0] == preset:
            problem = difference(name, case)
            assert problem is None, problem


@pytest.mark.parametrize("preset", ["chronica", "paceline"])
def test_interpreted_kernels_plan_the_same(monkeypatch: pytest.MonkeyPatch, preset: str) -> None:
    """A planning process interprets them until they are compiled."""
    interpreting = threading.Event()
    interpreting.set()
    monkeypatch.setattr(jit, "_interpreting", interpreting)
    name = next(name for name in recorded() if name.split()[0] == preset)
    assert difference(name, recorded()[name]) is None


def difference(name: str, case: dict[str, Any]) -> str | None:
    """How a case differs from the recorded one; None: it is the same.

    Told are the first segment that differs, and all values of the one that is recorded in clear.
    """
    segments = list(product.segments(case["scenario"]))
    recorded_digests = case["segments"]
    lines = []
    for segment, digests in zip(segments, recorded_digests, strict=False):
        now = data.digests(segment)
        if different := [key for key in sorted(digests) if now.get(key) != digests[key]]:
            lines.append(f"{_title(segment)}: {', '.join(different)} differ")
            break
    if len(segments) != len(recorded_digests):
        lines.append(f"{len(segments)} segments, recorded {len(recorded_digests)}")
    if not lines:
        return None
    clear = case["clear"]
    for segment in segments:
        if _title(segment) == _title(clear):
            lines += data.differences(clear, segment, "recorded in clear")
    show = f"to compare all: python -m unit.golden.make show {name!r}, in two checkouts"
    return "\n".join([f"case {name!r}", *lines, show])


def _title(segment: dict[str, Any]) -> str:
    return f"attempt {segment['attempt']}, segment {segment['seq']}"
