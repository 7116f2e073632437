"""Measurements on real ranks with emulated devices, planned by a real control plane."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path

from contenders import Contender, Scenario
from synchronisers import Ranks, Run, Stack, planned

from figures.row import Chart, Line, Measured
from paceline.core.emulation import Emulation

STEPS, WARM = 192, 96


def _scenario(
    name: str, fixed_s: list[float], sample_s: list[float], contenders: Mapping[str, Contender]
) -> Scenario:
    devices = Emulation([0.0] * len(fixed_s), fixed_s, sample_s)
    return Scenario(
        name, "digits", STEPS, lambda _: devices, contenders, WARM, planned=True, foretold=False
    )


def _trained(scenario: Scenario) -> dict[str, Run]:
    """Each contender's training with one seed."""
    with contextlib.ExitStack() as held:
        pool = Ranks(scenario.world)
        held.callback(pool.stop)
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        stack = held.enter_context(Stack(folder, 0))
        return {
            name: planned(pool, stack, scenario, contender, 0)
            for name, contender in scenario.contenders.items()
        }


def _figures(of: Mapping[str, Run], prefix: str = "") -> dict[str, float]:
    values = {}
    for name, run in of.items():
        if run.target_s is not None:
            values[f"{prefix}{name}, s to the target"] = run.target_s
        values[f"{prefix}{name}, s for all steps"] = run.seconds
        values[f"{prefix}{name}, held-out loss"] = run.loss
        values[f"{prefix}{name}, held-out accuracy, %"] = 100 * run.accuracy
    return values


def sata_figure_6() -> Measured:
    """Digits on eight ranks, one of them 2 or 10 times slower."""
    contenders = {
        "All-Reduce": Contender("bsp"),
        "AD-PSGD": Contender("ad-psgd"),
        "SATA": Contender("sata", {"every_steps": 16}),
    }
    values, lines = {}, []
    for factor in (2, 10):
        sample_s = [0.002] * 7 + [0.002 * factor]
        of = _trained(_scenario(f"one {factor}x slower", [0.005] * 8, sample_s, contenders))
        values |= _figures(of, f"{factor}x, ")
        lines.append(Line(f"{factor}x slower", list(of), [run.target_s for run in of.values()]))
    return Measured(values, Chart("", "s to the target loss", lines, bars=True))


def lbb_figure_6() -> Measured:
    """Digits on Table 2's four workers, at a quarter of the paper's times."""
    contenders = {
        "SSGD": Contender("bsp"),
        "Local SGD, H 8": Contender("local-sgd"),
        "OSA": Contender("osa"),
        "2-Soft": Contender("n-soft"),
        "LBB": Contender("lbb"),
    }
    # A rank has 8 samples here and 128 there.
    sample_s = [4e-3 * ms for ms in (0.59308, 0.58077, 0.60233, 2.67139)]
    fixed_s = [0.25e-3 * ms for ms in (5.896, 7.152, 8.291, 50.982)]
    of = _trained(_scenario("LBB's four workers", fixed_s, sample_s, contenders))
    values = _figures(of)
    for other in ("SSGD", "OSA"):
        values[f"LBB less than {other}, all steps, %"] = 100 * (
            1 - of["LBB"].seconds / of[other].seconds
        )
    lines = [
        Line("all steps", list(of), [run.seconds for run in of.values()]),
        Line("to the target", list(of), [run.target_s for run in of.values()]),
    ]
    return Measured(values, Chart("", "s", lines, bars=True))
