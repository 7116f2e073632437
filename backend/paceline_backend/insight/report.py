"""Results of a run: what each preset achieved, compared with plain DDP and the fluid limit."""

from __future__ import annotations

from collections import Counter
from dataclasses import field
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic import Field
from pydantic.dataclasses import dataclass

from paceline.core.emulation import Emulation
from paceline.wire import PLANNED, Hello
from paceline_backend.store import Connection, Store, choices, records, rounds, runs
from paceline_backend.store.coverage import coverage, effective

BASELINE = "bsp"
# If an emulated device takes longer than this, fitted speeds replace the emulated speeds.
_SLOWEST_S = 1e9  # seconds per size unit, or per step
# A policy's figures leave out this many of its first steps, in which it learns the ranks' speeds.
WARMUP_STEPS = 20

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FluidLimit:
    """Parameters of the fluid limit."""

    a_s: list[float] = Field(
        description="computing time of each rank per size unit, seconds", examples=[[3.6e-05]]
    )
    b_s: list[float] = Field(
        description="fixed computing time of each rank per step, seconds", examples=[[0.005]]
    )
    communication_s: float = Field(
        description="mean communication time per step, seconds", examples=[0.003]
    )
    source: Literal["emulated", "fitted"] = Field(
        description="emulated: `a_s` and `b_s` are the exact speeds of emulated devices; "
        "fitted: they are estimates from the ranks' steps",
        examples=["fitted"],
    )

    @property
    def overhead_s(self) -> float:
        """Return Σ(b_j/a_j) / Σ(1/a_j) + communication, the overhead of a step, in seconds.

        In its fixed time b_j, rank j could process a load of b_j/a_j; all ranks together process a
        load of Σ(1/a_j) per second.
        """
        b_s = np.average(self.b_s, weights=1.0 / np.array(self.a_s))
        return float(b_s) + self.communication_s

    def limit_s(self, load: float, count: int) -> float:
        """Return the fluid limit of `count` steps, Σλ / Σ(1/a_j) + steps · overhead, in seconds."""
        return load / float(np.sum(1.0 / np.array(self.a_s))) + count * self.overhead_s


def run_report(store: Store, run_id: str, warmup: int = WARMUP_STEPS) -> dict[str, Any]:
    """Return figures of each preset, how often epochs used each sample, and reduction rounds.

    The figures leave out steps that no policy planned, and the first `warmup` steps after the start
    of a policy or of an attempt. Only the numbers of samples that moved to another rank (`moved`)
    or node (`across`) include these first steps. `speedup` is the time per unit of load under plain
    DDP (`bsp`) ÷ the time per unit of load under the preset. Times are divided by the load because
    an epoch's last batch may be smaller. `speedup_limit` is the speed-up of the fluid limit over
    plain DDP.
    """
    with store.read() as connection:
        key = runs.key_of(connection, run_id)
        hello = runs.hello(connection, key)
        planned = _planned(connection, key, hello, warmup)
        table = _steps(connection, key)
        covered = coverage(connection, key)
        relaxed = rounds.in_force(connection, key, (None, None))
        chosen = choices.chosen(connection, key, (None, None))
        fell_back = choices.fallbacks(connection, key, (None, None))
        kept = {
            policy: np.isin(table["step"], np.array(sorted(steady_steps), dtype=np.float64))
            for policy, steady_steps in planned.steady.items()
        }
        steady = np.logical_or.reduce([np.zeros(len(table["step"]), bool), *kept.values()])
        fluid = None
        if steady.any():
            communication_s = float(table["comm_s"][steady].mean())
            fluid = _fluid(connection, key, hello, communication_s, planned.threads)
    base = _time_per_load(table, kept[BASELINE]) if BASELINE in kept else None
    return {
        "presets": {
            policy: {
                **_preset(table, steady_steps, fluid, base),
                "moved": planned.moved[policy],
                "across": planned.across[policy],
            }
            for policy, steady_steps in kept.items()
        },
        "warmup": warmup,
        "coasted": planned.coasted,
        "overhead_s": fluid.overhead_s if fluid else None,
        "fluid": fluid,
        "coverage": covered,
        "synchronisation": [figures | {"words": round_words(figures)} for figures in relaxed],
        "chosen": chosen,
        "fallbacks": fell_back,
    }


def round_words(figures: dict[str, Any]) -> str:
    """Return sentences about a policy's rounds; `figures` come from `store.rounds.in_force`."""
    rate = "" if figures["rounds_per_s"] is None else f", {figures['rounds_per_s']:,.1f} a second"
    copying = f", copying {_time(figures['copied_s'])}" if figures["copied_s"] else ""
    words = (
        f"{figures['policy']} ({figures['synchroniser']}), "
        f"steps {figures['from']}–{figures['to']}: "
        f"{figures['rounds']:,} rounds{rate}, with {figures['contributors']:.1f} of "
        f"{figures['world']} ranks on average; response time {_time(figures['waited_s'])} "
        f"(95 %: up to {_time(figures['waited_s_p95'])}){copying}."
    )
    if not figures["dropped"]:
        return words
    share = "" if figures["dropped_share"] is None else f" ({100 * figures['dropped_share']:.1f} %)"
    return (
        f"{words} {figures['dropped']:,} samples{share} were computed, but not applied: too late."
    )


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


@dataclass
class _Planned:
    # Numbers of the steps after the warm-up, by policy.
    steady: dict[str, set[int]] = field(default_factory=dict)
    # Numbers of samples that moved to another rank, and to another node, by policy.
    moved: Counter[str] = field(default_factory=Counter)
    across: Counter[str] = field(default_factory=Counter)
    coasted: int = 0  # steps
    threads: bool = False


def _planned(connection: Connection, key: int, hello: Hello | None, warmup: int) -> _Planned:
    planned = _Planned()
    start: tuple[int, int, int] | None = None  # attempt, version, first step
    for part in effective(connection, key, hello):
        plan = part.plan
        planned.threads = planned.threads or bool(plan.threads)
        if start is None or start[:2] != (part.attempt, plan.version):
            start = (part.attempt, plan.version, plan.first_step)
        if plan.source not in PLANNED:
            planned.coasted += part.end - plan.first_step
        else:
            steady = planned.steady.setdefault(plan.policy, set())
            steady.update(range(max(plan.first_step, start[2] + warmup), part.end))
            planned.moved[plan.policy] += plan.moved
            planned.across[plan.policy] += plan.across
    return planned


def _steps(connection: Connection, key: int) -> dict[str, Floats]:
    names = ("se", "dif", "waste", "ett_error", "comm_s", "step_s")
    values = records.step_table(connection, key, names)
    return dict(zip(("step", "load", *names), values.T, strict=True))


def _preset(
    table: dict[str, Floats],
    chosen: npt.NDArray[np.bool_],
    fluid: FluidLimit | None,
    base: float | None,
) -> dict[str, Any]:
    count = int(chosen.sum())
    total, load = float(table["step_s"][chosen].sum()), float(table["load"][chosen].sum())
    limit = fluid.limit_s(load, count) if fluid and count else None
    own = _time_per_load(table, chosen)
    return {
        "steps": count,
        "step_time_s": total / count if count else None,
        "se": _mean(table["se"][chosen]),
        "step_dif": _mean(table["dif"][chosen]),
        "waste": _mean(table["waste"][chosen]),
        "ett_mape": _mean(table["ett_error"][chosen]),
        "time_over_fluid": total / limit if limit else None,
        "speedup": base / own if base and own else None,
        "speedup_limit": base / (limit / load) if base and limit and load else None,
    }


def _time_per_load(table: dict[str, Floats], chosen: npt.NDArray[np.bool_]) -> float | None:
    load = float(table["load"][chosen].sum())
    return float(table["step_s"][chosen].sum()) / load if load else None


def _mean(values: Floats) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _fluid(
    connection: Connection,
    key: int,
    hello: Hello | None,
    communication_s: float,
    threads: bool,
) -> FluidLimit | None:
    """Return the fluid limit; None if there are no records to which speeds can be fitted.

    If the run's devices are emulated and their speeds are constant, these true speeds are used.
    `threads` is true if a plan set the number of CPU threads, which changes the speed of devices
    with a parallel part.
    """
    if hello is not None and hello.emulated is not None and not hello.stream:
        devices = msgspec.convert(hello.emulated, Emulation)
        lasting = not (devices.slowdowns or devices.delay_s[1] or (threads and devices.serial < 1))
        a_s, b_s = _true(devices, hello.sizes_array())
        # With padding, the load depends on which samples share a batch, so it is not divisible.
        sane = all(0 < a < _SLOWEST_S for a in a_s) and max(b_s) < _SLOWEST_S
        if lasting and not devices.cost.padded and sane:
            return FluidLimit(a_s, b_s, communication_s, "emulated")
    attempt, world = (None, None) if hello is None else (hello.attempt, hello.world)
    fitted = [_line(*sums) for sums in records.sums(connection, key, attempt, world)]
    if not fitted:
        return None
    return FluidLimit([a for a, _ in fitted], [b for _, b in fitted], communication_s, "fitted")


def _true(devices: Emulation, sizes: Floats) -> tuple[list[float], list[float]]:
    """Return each rank's true seconds per size unit, and per step, including data loading.

    The seconds per size unit include the mean cost per sample (c_j) and the mean quadratic cost.
    """
    load = float(sizes.sum())
    a_s = np.array(devices.a_s) * float(devices.cost.sizes(sizes).sum()) / load
    a_s += np.array(devices.c_s or 0.0) * len(sizes) / load
    b_s = np.array(devices.b_s) + np.array(devices.data_s or 0.0)
    return a_s.tolist(), b_s.tolist()


def _line(n: float, x: float, y: float, xx: float, xy: float) -> tuple[float, float]:
    """Fit time = a · load + b to a rank's steps, with a > 0 and b ≥ 0; return (a, b).

    The steps are given as sums over x = load and y = time: their number n, Σx, Σy, Σx² and Σxy. If
    loads do not vary, or the best line has a ≤ 0 or b < 0, a is the time per load and b is 0.
    """
    spread = n * xx - x * x
    a = (n * xy - x * y) / spread if spread > 1e-9 * n * xx else 0.0
    b = (y - a * x) / n
    if a > 0 and b >= 0:
        return a, b
    return max(y / x if x > 0 else 0.0, 1e-12), 0.0
