"""Summary of a simulation: figures per policy, and the fluid limit from the true speeds of ranks.

``paceline simulate`` uses `run` for one simulation and `compare` for several policies. The figures
leave out the first `warmup` steps of each policy and attempt, except that `plan_s` and `moved`
cover all segments. `run`, `counted` and `compare` raise `ScenarioError` if no steps remain.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
import numpy as np

from paceline import policies
from paceline.core.cost import Features
from paceline.core.emulation import Emulation
from paceline.policies.base import Floats
from paceline_backend.simulator.scenario import Scenario, ScenarioError
from paceline_backend.simulator.simulation import Simulation, TrainedSegment

BASELINE = "bsp"


@dataclass(frozen=True)
class Summary:
    """Figures of the steps that a policy planned; docs/glossary.md defines them."""

    steps: int
    step_time_s: float
    # Virtual time of the steps.
    total_s: float
    se: float
    step_dif: float
    waste: float
    ett_mape: float | None
    # Time of all steps ÷ the sum of the steps' fluid limits and communication times.
    time_over_fluid: float | None
    load_per_s: float  # size units
    # Mean real time in seconds to plan a segment.
    plan_s: float
    moved: int
    # Number of exchanges of relaxed synchronisation; 0 under the all-reduce.
    rounds: int
    contributors: float | None  # per round
    # Number of samples whose gradients were dropped as too old.
    dropped: int
    # `load_per_s` ÷ `load_per_s` under plain data parallelism (`bsp`); None: `bsp` did not run.
    speedup: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as plain values."""
        return asdict(self)


def fluid_s(devices: Emulation, step: int, batch: Features, threads: Any = 1) -> float:
    """Return the fluid limit of a step: its minimum time if loads were divisible, in seconds.

    The limit T solves Σ_j max(T − b_j, 0) / a_j = Λ', where Λ' is the effective load of the step,
    and rank j takes a_j seconds per size unit and b_j seconds per step. Costs per sample are
    included in a_j. Slowdowns are included; padding, delays and noise are not. `batch` has the
    batches of all ranks; only their totals matter. `threads` are the ranks' CPU threads, a number
    or [W].
    """
    unpadded = msgspec.structs.replace(devices.cost, padded=False)
    load = float(np.sum(unpadded.load(batch)))
    factors = devices.factors(step)
    a_s = np.array(devices.a_s)
    if devices.c_s:
        a_s = a_s + np.array(devices.c_s) * float(batch.samples.sum()) / load
    a_s = a_s * factors * (devices.serial + (1 - devices.serial) / np.maximum(threads, 1))
    speed = 1.0 / np.maximum(a_s, 1e-300)
    b_s = np.array(devices.b_s) * factors + np.array(devices.data_s or 0.0)
    # ``times[k]`` is the time if only the k + 1 ranks with the smallest b_j work.
    order = np.argsort(b_s, kind="stable")
    times = (load + np.cumsum((b_s * speed)[order])) / np.cumsum(speed[order])
    return float(times.min())


@dataclass
class SegmentSums:
    """Figures of a simulation's segments, without the first `warmup` steps of each policy."""

    warmup: int = 0
    _parts: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    _plans: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    # By policy: the numbers of contributors and of dropped samples of each reduction round.
    _rounds: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    # Attempt, policy version, and first step with this attempt and version.
    _start: tuple[int, int, int] = (-1, -1, 0)

    def add(self, trained: TrainedSegment, devices: Emulation) -> None:
        """Add a segment; `devices` are the devices that trained the segment."""
        plan = trained.plan
        self._plans.setdefault(plan.policy, []).append((trained.plan_s, plan.moved))
        mine = self._parts.setdefault(plan.policy, [])
        rounds = self._rounds.setdefault(plan.policy, [])
        if self._start[:2] != (trained.attempt, plan.version):
            self._start = (trained.attempt, plan.version, plan.first_step)
        ett_s, step_s = trained.ett_s, trained.evened_s
        first = self._start[2] + self.warmup - plan.first_step
        rounds += [
            (round_.contributors, round_.dropped)
            for round_ in trained.rounds
            if round_.step >= first
        ]
        # Ranks that share batches train a step's batches at different times, so compare the
        # segment's totals.
        shared = plan.pooled
        totals = trained.compute_s.sum(axis=0), trained.features.load.sum(axis=0)
        load = trained.evened_load
        for k, compute_s in enumerate(trained.compute_s):
            step = plan.first_step + k
            if step < self._start[2] + self.warmup:
                continue
            batch = Features(*(column[k] for column in trained.features))
            limit_s = fluid_s(devices, step, batch, np.array(plan.threads or 1))
            mine.append(
                {
                    "step_s": float(step_s[k]),
                    "load": float(load[k]),
                    "fluid_s": limit_s + float(trained.communication_s[k].max()),
                    **(_spread(*totals) if shared else _spread(compute_s, batch.load)),
                    "ett_mape": np.nan if ett_s is None else _mape(ett_s[k], compute_s),
                }
            )

    def summaries(self) -> dict[str, Summary]:
        """Return the summary of each policy, in the order of the policies' start."""
        summaries = {}
        for policy, parts in self._parts.items():
            table = {name: np.array([part[name] for part in parts]) for name in (parts or [{}])[0]}
            if not table:
                continue
            plans = np.array(self._plans[policy])
            total_s = float(table["step_s"].sum())
            known = table["ett_mape"][~np.isnan(table["ett_mape"])]
            limit_s = float(table["fluid_s"].sum())
            rounds = np.array(self._rounds[policy]).reshape(-1, 2)
            summaries[policy] = Summary(
                steps=len(parts),
                step_time_s=total_s / len(parts),
                total_s=total_s,
                se=float(table["se"].mean()),
                step_dif=float(table["dif"].mean()),
                waste=float(table["waste"].mean()),
                ett_mape=float(known.mean()) if len(known) else None,
                time_over_fluid=total_s / limit_s if limit_s else None,
                load_per_s=float(table["load"].sum()) / total_s if total_s else 0.0,
                plan_s=float(plans[:, 0].mean()),
                moved=int(plans[:, 1].sum()),
                rounds=len(rounds),
                contributors=float(rounds[:, 0].mean()) if len(rounds) else None,
                dropped=int(rounds[:, 1].sum()),
            )
        return summaries


def _spread(compute_s: Floats, load: Floats) -> dict[str, float]:
    most, mean = float(compute_s.max()), float(compute_s.mean())
    return {
        "se": (most - float(compute_s.min())) / mean if mean else 0.0,
        "waste": 1 - mean / most if most else 0.0,
        "dif": float(load.std(ddof=1)) if len(load) > 1 else 0.0,
    }


def _mape(ett_s: Floats, compute_s: Floats) -> float:
    worked = (compute_s > 0) & ~np.isnan(ett_s)
    if not worked.any():
        return float("nan")
    return float((np.abs(ett_s - compute_s)[worked] / compute_s[worked]).mean())


def run(simulation: Simulation, warmup: int = 0) -> dict[str, Summary]:
    """Run a simulation to its end; return a summary per policy, in the order of their start."""
    tally = SegmentSums(warmup)
    while not simulation.finished:
        # Read the devices before `advance`, in which a failure may change them.
        devices = simulation.devices
        tally.add(simulation.advance(), devices)
    return counted(tally)


def counted(tally: SegmentSums) -> dict[str, Summary]:
    """Return the summaries of a finished simulation; raise `ScenarioError` if there are none."""
    summaries = tally.summaries()
    if not summaries:
        raise ScenarioError(f"--warmup: {tally.warmup} steps leave nothing to measure; give fewer")
    return summaries


def under(scenario: Scenario, policy: str) -> Scenario:
    """Return the scenario with a single policy from start to end.

    If `policy` is the scenario's first policy, it gets the scenario's parameters; any other policy
    gets its defaults. Raise `ScenarioError` if the policy does not exist or refuses the parameters.
    """
    parameters = scenario.parameters if policy == scenario.policy else {}
    try:
        policies.make(policy, parameters, scenario.workers)
    except ValueError as error:
        raise ScenarioError(str(error)) from error
    return msgspec.structs.replace(scenario, policy=policy, parameters=parameters, switches=[])


def compare(scenario: Scenario, names: list[str], warmup: int = 0) -> dict[str, Summary]:
    """Simulate the scenario once under each of the policies `names`; see `under`."""
    runs = [under(scenario, name) for name in names]
    summaries = {
        variant.policy: run(Simulation.of(variant), warmup)[variant.policy] for variant in runs
    }
    return with_speedups(summaries)


def with_speedups(summaries: dict[str, Summary]) -> dict[str, Summary]:
    """Return the summaries with their speed-up over `bsp`, if `bsp` is among the policies."""
    base = summaries.get(BASELINE)
    if base is None or not base.load_per_s:
        return summaries
    values = {
        name: {**summary.as_dict(), "speedup": summary.load_per_s / base.load_per_s}
        for name, summary in summaries.items()
    }
    return {name: Summary(**value) for name, value in values.items()}
