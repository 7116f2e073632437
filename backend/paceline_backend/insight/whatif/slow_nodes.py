"""Forecast for a run whose slow node is as fast as the other nodes.

The forecast of presets simulates the policy in force on the measured devices. This module divides
the models of a slow node's ranks by their factor and runs the same simulation again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline_backend.insight.verdict import ObservedSteps, SlowNode, judge, slow_node
from paceline_backend.insight.whatif.answer import NodeForecast, PresetForecast
from paceline_backend.insight.whatif.simulate import Basis

# The sentence mentions the all-reduce if it takes a larger fraction of a step.
_MUCH = 0.1


def named(basis: Basis) -> SlowNode | None:
    """Return the node that is lastingly slow in the steps of a forecast; None if there is none."""
    assert basis.state.history is not None
    measured = basis.measured
    apart = np.zeros(len(measured.step), bool)
    for span in measured.relaxed_spans:
        apart[span.first : span.end] = True
    seen = ObservedSteps(
        step=measured.step,
        samples=measured.features.samples.astype(float),
        load=measured.features.load,
        squares=measured.features.squares,
        longest=measured.features.longest,
        data_s=measured.data_s,
        compute_s=measured.compute_s,
        sync_s=measured.sync_s,
        between_s=np.zeros(len(measured.step)),
        first=np.zeros(len(measured.step), bool),
        apart=apart,
        nodes=basis.state.history.hello.placement,
    )
    slow = slow_node(judge(seen))
    if slow is None or slow.cause != "node" or slow.factor is None or slow.factor <= 1:
        return None
    return slow


def as_fast_as_the_others(basis: Basis, slow: SlowNode) -> Basis:
    """Return the inputs of a simulation without a node's slowness.

    The policy starts without feedback, because it has no measurements of the replacement node.
    """
    assert slow.factor is not None
    faster = np.ones(basis.models.world)
    faster[slow.ranks] = slow.factor
    shape = replace(basis.shape, faster=faster)
    return replace(basis, shape=shape, state=replace(basis.state, window=None))


def answer(slow: SlowNode, preset: PresetForecast, not_computing: float) -> NodeForecast:
    """Return the policy's forecast without the slowness as a forecast for the node.

    Telemetry does not show how much a busy core on the node slows the all-reduce down, so the
    all-reduce may become faster without the node. The sentence says so if `not_computing` is large:
    the share of a step with an all-reduce in which no rank loads or computes.
    """
    assert slow.factor is not None
    half = max(1, round(50 * (preset.saving_high - preset.saving_low)))
    words = (
        f"if {slow.node} were as fast as the others, steps would take "
        f"{100 * preset.saving:.0f} % ± {half} less time"
    )
    if not_computing > _MUCH:
        words += (
            f", and still less if it is also slow in the all-reduce: {100 * not_computing:.0f} % "
            "of a step is all-reduce and the like"
        )
    return NodeForecast(
        preset.step_time_s,
        preset.low_s,
        preset.high_s,
        preset.saving,
        preset.saving_low,
        preset.saving_high,
        words,
        slow.node,
        slow.ranks,
        slow.factor,
    )
