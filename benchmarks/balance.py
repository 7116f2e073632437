"""Comparison of planners with the fluid limit: Paceline's policies and peers of other projects.

The figure is an epoch's time over the fluid limit, ``Σλ / Σ(1/a) + steps · b``, the time of a
perfectly divisible load. Nothing is faster. Training is virtual: rank j's step takes
``a_j · Λ' + b`` seconds, where Λ' is the sum of the sizes or, if padded, samples times the longest
size. Policies do not get the ranks' speeds: they learn the speeds in the first epoch, which does
not count. Peers never learn speeds. The figure of a peer that is not installed is null.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from bounds import fluid_s, indivisible_s
from harness import Check, finish, parser
from peers import PEERS, Peer, Steps
from virtual import Floats, train

from paceline import policies
from paceline.core.cost import Cost, Features, features
from paceline.core.emulation import Emulation
from paceline.wire import Hello
from paceline_backend.simulator import Simulation
from paceline_backend.simulator.scenario import hello_of
from paceline_backend.simulator.sizes import Sizes

# Mean size, as in CHRONICA's data sets.
MEAN = 45.0  # frames

# Seconds per size unit (a) of the fast workers.
SPEED_S = 1e-3  # s per size unit
# Seconds per step (b) of every worker, as a fraction of a mean step of a fast worker.
OVERHEAD = 0.02
# Number of steps of an epoch.
STEPS = 64
# Number of epochs. The first epoch is not counted.
EPOCHS = 3

FREE, EXACT = "paceline free", "paceline exact"
OURS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (FREE, "paceline", {"mode": "free"}),
    (EXACT, "paceline", {"mode": "exact"}),
    ("CHRONICA, levelled", "chronica", {"picks": "levelled"}),
    ("CHRONICA, as printed", "chronica", {"picks": "paper", "ett": "per-sample"}),
)


@dataclass(frozen=True)
class Setting:
    """A data set on a cluster. In an uneven cluster, half of the workers are half as fast."""

    dif: int
    world: int
    local_batch: int
    uneven: bool
    padded: bool
    distribution: Literal["lognormal", "gamma"] = "lognormal"

    @property
    def global_batch(self) -> int:
        """Number of samples of a step."""
        return self.world * self.local_batch

    @property
    def sizes(self) -> Floats:
        """λ of each sample, [N]: whole numbers, as frames or tokens are."""
        drawn = Sizes(
            distribution=self.distribution,
            samples=STEPS * self.global_batch,
            mean=MEAN,
            dif=float(self.dif),
        ).draw(seed=self.dif)
        return np.maximum(np.round(drawn), 1.0)

    @property
    def hello(self) -> Hello:
        """Hello of the leader of a run in this setting."""
        return hello_of(self.sizes, self.world, self.global_batch, epochs=EPOCHS)

    @property
    def devices(self) -> Emulation:
        """Devices of the ranks. In an uneven setting, ranks with odd numbers are slow."""
        slow = [1.0 + (self.uneven and rank % 2) for rank in range(self.world)]
        overhead = OVERHEAD * SPEED_S * MEAN * self.local_batch
        return Emulation(
            a_s=[SPEED_S * factor for factor in slow],
            b_s=[overhead] * self.world,
            cost=Cost(padded=self.padded),
        )

    def __str__(self) -> str:
        speeds = "half slow" if self.uneven else "equal"
        cost = "padded" if self.padded else "sum"
        return f"DIF {self.dif:>2}, {self.world:>2} x {self.local_batch:>2}, {speeds}, {cost}"


def over_limit(batches: Features, devices: Emulation) -> float:
    """Return the time of all steps over the fluid limit of their samples; batches are [S, W]."""
    step_s = devices.compute_s(0, batches).max(axis=1)
    return float(step_s.sum()) / fluid_s(
        float(batches.load.sum()), len(step_s), np.array(devices.a_s), devices.b_s[0]
    )


def bound_over_limit(setting: Setting) -> float | None:
    """Return the lower bound of all planners over the fluid limit, or None for padded costs."""
    if setting.padded:
        return None
    sizes, devices = setting.sizes, setting.devices
    a_s, b_s = np.array(devices.a_s), devices.b_s[0]
    limit_s = fluid_s(float(sizes.sum()), STEPS, a_s, b_s)
    return indivisible_s(sizes, STEPS, a_s, b_s) / limit_s


def ours(setting: Setting, policy: str, parameters: dict[str, Any]) -> dict[str, float]:
    """Return time over limit and planning time per step, in s, of one of Paceline's policies."""
    made = policies.make(policy, parameters)
    trained = train(Simulation(setting.hello, setting.devices, made)).since(1)
    return {
        "over_limit": over_limit(trained.features, setting.devices),
        "plan_s": trained.plan_s,
    }


def theirs(setting: Setting, peer: Peer) -> dict[str, float]:
    """Return time over limit and planning time per step, in s, of a peer."""
    sizes = setting.sizes
    begun = time.process_time()
    steps: Steps = []
    for epoch in range(1, EPOCHS):
        steps += peer.plan(sizes.astype(np.int64), setting.world, setting.global_batch, 0, epoch)
    spent = time.process_time() - begun
    counts = np.array([[len(part) for part in step] for step in steps])
    flat = np.concatenate([part for step in steps for part in step])
    return {
        "over_limit": over_limit(features(sizes[flat], counts), setting.devices),
        "plan_s": spent / len(steps),
    }


def contenders(*, quick: bool) -> list[tuple[str, str, dict[str, Any]]]:
    """Return Paceline's registered policies, as (label, preset, parameters)."""
    known = policies.names()
    made = [row for row in OURS if row[1] in known]
    # ep4ddl balances with threads, and has the batches of bsp.
    others = [name for name in known if name not in {"paceline", "chronica", "ep4ddl"}]
    # Relaxed presets have the batches of bsp, too.
    others = [name for name in others if not policies.make(name).relaxed]
    return made if quick else made + [(name, name, {}) for name in others]


def measure(setting: Setting, *, quick: bool) -> dict[str, Any]:
    """Measure all contenders in a setting. A peer that is not installed gets None."""
    row: dict[str, Any] = {
        name: ours(setting, policy, parameters)
        for name, policy, parameters in contenders(quick=quick)
    }
    for peer in PEERS:
        row[peer.name] = theirs(setting, peer) if peer.version else None
    return {
        **asdict(setting),
        "dif_drawn": float(np.std(setting.sizes, ddof=1)),
        "bound_over_limit": bound_over_limit(setting),
        "contenders": row,
    }


def settings(options: argparse.Namespace) -> list[Setting]:
    """Return the settings to run."""
    if options.quick:
        axes: tuple[Iterable[Any], ...] = ((0, 16, 64), (8,), (4,), (False, True), (False, True))
    else:
        axes = ((0, 4, 16, 64), (8, 32), (4, 16), (False, True), (False, True))
    return [Setting(*values, options.sizes) for values in itertools.product(*axes)]


def worst(rows: list[dict[str, Any]], name: str, **where: Any) -> float:
    """Return a contender's largest time over limit in rows whose fields have the given values."""
    return max(
        row["contenders"][name]["over_limit"]
        for row in rows
        if all(row[field] in values for field, values in where.items())
    )


def against(rows: list[dict[str, Any]], name: str, peers: Iterable[str], *, padded: bool) -> float:
    """Return a contender's largest ratio to the best peer's time, over the rows with this cost."""
    ratios = []
    for row in rows:
        got = [row["contenders"][peer] for peer in peers]
        best = min((figures["over_limit"] for figures in got if figures), default=np.inf)
        if row["padded"] == padded:
            ratios.append(row["contenders"][name]["over_limit"] / best)
    return max(ratios)


def checks_of(rows: list[dict[str, Any]]) -> list[Check]:
    """Return the checks of the results."""
    if "paceline" not in policies.names():
        return []
    big, linear = (16, 64), (False,)
    everyone = [peer.name for peer in PEERS]
    first = {row["dif"]: row for row in reversed(rows) if not (row["uneven"] or row["padded"])}
    flat = first[64]["contenders"][FREE]["over_limit"] / first[0]["contenders"][FREE]["over_limit"]
    keeping = [peer.name for peer in PEERS if peer.same_batches]
    over_bound = max(
        row["contenders"][FREE]["over_limit"] / row["bound_over_limit"]
        for row in rows
        if row["dif"] not in big and row["uneven"] and not row["padded"]
    )
    equal = worst(rows, FREE, uneven=(False,), padded=linear)
    uneven = worst(rows, FREE, uneven=(True,), padded=linear, dif=big)
    checks = {
        "free, equal workers: time over fluid limit": (equal, 1.005),
        "free, half of them slow, DIF 16 and 64: time over fluid limit": (uneven, 1.02),
        "free, half of them slow, DIF 0 and 4: time over the bound": (over_bound, 1.005),
        "free, 8 equal workers: epoch at DIF 64 over DIF 0, same load": (flat, 1.01),
        "free over the best peer": (against(rows, FREE, everyone, padded=False), 1.0),
        "free over the best peer, padded": (against(rows, FREE, everyone, padded=True), 1.0),
        "exact over the best peer that keeps global batches": (
            against(rows, EXACT, keeping, padded=False),
            1.0,
        ),
    }
    return [Check(name, value, bound, "<=") for name, (value, bound) in checks.items()]


def table_of(rows: list[dict[str, Any]]) -> str:
    """Return a table with a line per contender and a column per setting."""
    lines = []
    for padded, uneven in itertools.product((False, True), (False, True)):
        shown = [r for r in rows if r["padded"] == padded and r["uneven"] == uneven]
        cost = "padded to the longest" if padded else "sum of sizes"
        speeds = "half of the workers half as fast" if uneven else "equal workers"
        lines.append(f"\nTime over fluid limit: {cost}, {speeds}")
        heads = [f"{r['dif']}/{r['world']}x{r['local_batch']}" for r in shown]
        lines.append(f"{'DIF/workers x local batch':<30}" + "".join(f"{h:>9}" for h in heads))
        for name in rows[0]["contenders"]:
            cells = [r["contenders"][name] for r in shown]
            texts = [f"{c['over_limit']:.3f}" if c else "-" for c in cells]
            lines.append(f"{name:<30}" + "".join(f"{text:>9}" for text in texts))
        if not padded:
            bounds = "".join(f"{r['bound_over_limit']:>9.3f}" for r in shown)
            lines.append(f"{'lower bound of all planners':<30}{bounds}")
    missing = [peer.name for peer in PEERS if not peer.version]
    if missing:
        lines.append(f"\nnot installed: {', '.join(missing)}")
    return "\n".join(lines[1:]) + "\n"


def main() -> None:
    """Run the benchmark."""
    options_ = parser(__doc__)
    options_.add_argument("--sizes", choices=("lognormal", "gamma"), default="lognormal")
    options = options_.parse_args()
    rows = []
    for setting in settings(options):
        print(setting, file=sys.stderr)
        rows.append(measure(setting, quick=options.quick))
    config = {
        "steps": STEPS,
        "epochs_counted": EPOCHS - 1,
        "mean_size": MEAN,
        "sizes": options.sizes,
        "overhead_share": OVERHEAD,
        "peers": {
            peer.name: {field: getattr(peer, field) for field in ("package", "version", "licence")}
            for peer in PEERS
        },
    }
    finish(options, config, {"settings": rows}, checks_of(rows), table_of(rows))


if __name__ == "__main__":
    main()
