"""Alert rules, and debouncing by given times."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline_backend.insight.alerts import DEFAULTS, Timing, debounce

RULE = replace(DEFAULTS["run-waste"], raise_after_s=60.0, resolve_after_s=30.0)
PROMETHEUS = Path(__file__).parents[3] / "docker/prometheus/alerts.yaml"


def play(looks: list[tuple[float, bool]], timing: Timing | None = None) -> Timing | None:
    for at, holds in looks:
        timing = debounce(timing, holds, RULE, at)
    return timing


def test_a_condition_is_raised_once_it_held_for_long_enough() -> None:
    assert play([(0, True), (59.9, True)]) == Timing(0)
    assert play([(0, True), (60, True)]) == Timing(0, raised_at=60)
    assert play([(0, True), (60, True), (90, True)]) == Timing(0, raised_at=60)


def test_a_condition_that_passes_is_forgotten_and_begins_anew() -> None:
    assert play([(0, True), (59, False)]) is None
    assert play([(0, True), (30, False), (31, True), (80, True)]) == Timing(31)


def test_an_alert_is_resolved_once_its_condition_was_gone_for_long_enough() -> None:
    raised = Timing(0, raised_at=60)
    assert play([(70, False), (99, False)], raised) == Timing(0, 60, gone_at=70)
    assert play([(70, False), (100, False)], raised) == Timing(0, 60, 70, resolved_at=100)
    assert play([(70, False), (80, True), (100, False)], raised) == Timing(0, 60, gone_at=100)


def test_a_rule_without_delays_raises_and_resolves_at_once() -> None:
    rule = replace(RULE, raise_after_s=0.0, resolve_after_s=0.0)
    raised = debounce(None, True, rule, 5.0)
    assert raised == Timing(5.0, raised_at=5.0)
    assert debounce(raised, False, rule, 6.0) == Timing(5.0, 5.0, 6.0, 6.0)
    assert debounce(None, False, rule, 6.0) is None


@given(st.lists(st.booleans(), max_size=60))
def test_no_alert_lives_shorter_than_its_delays(looks: list[bool]) -> None:
    timing: Timing | None = None
    for at, holds in enumerate(looks):
        timing = debounce(timing, holds, RULE, at * 10.0)
        if timing is None or timing.raised_at is None:
            continue
        assert timing.raised_at - timing.since >= RULE.raise_after_s
        if timing.resolved_at is not None:
            assert timing.gone_at is not None
            assert timing.resolved_at - timing.gone_at >= RULE.resolve_after_s
            timing = None


def test_rules_look_above_or_below_their_threshold() -> None:
    assert RULE.holds(0.21)
    assert not RULE.holds(0.2)
    disk = DEFAULTS["disk-low"]
    assert disk.holds(0.09)
    assert not disk.holds(0.1)


def test_each_rule_has_its_counterpart_in_prometheus() -> None:
    [group] = yaml.safe_load(PROMETHEUS.read_text())["groups"]
    known = {rule["alert"]: rule for rule in group["rules"]}
    for name, rule in DEFAULTS.items():
        camel = "".join(part.capitalize() for part in name.split("-"))
        assert f"Paceline{camel}" in known, f"alerts.yaml has no Paceline{camel}"
        there = known[f"Paceline{camel}"]
        assert there["labels"]["severity"] == rule.severity, name
        if rule.unit in ("share", "ratio", "factor"):
            compared = re.findall(r"[<>] ([0-9.]+)", there["expr"])
            assert f"{rule.threshold:g}" in compared, name
