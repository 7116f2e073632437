"""Paceline and its peers where ranks' times are noisy: lengths × costs × speeds, at 8 and 64 ranks.

Policies learn speeds and cost from steps whose times have 3 % noise. Peers learn nothing. The
figure is the time of two epochs' batches without noise, over the fluid limit. Free mode is compared
with all peers, exact mode with those that keep the global batches of plain DDP. The goal: fastest,
or within 0.1 %.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import numpy as np
from balance import EXACT, FREE, OVERHEAD, over_limit, theirs
from harness import Check, finish, parser
from peers import PEERS
from virtual import Floats, train

from paceline.core.cost import Cost
from paceline.core.emulation import Emulation
from paceline.wire import Hello
from paceline_backend import policies
from paceline_backend.simulator import Simulation
from paceline_backend.simulator.hello import hello_of

STEPS, EPOCHS, LOCAL = 64, 3, 8
NOISE = 0.03
CLOSE = 1.001

Lengths = Literal["pareto", "text", "bimodal"]
Costs = Literal["sum", "padded", "quadratic"]


@dataclass(frozen=True)
class Setting:
    """One data set on one cluster."""

    lengths: Lengths
    cost: Costs
    uneven: bool  # every second rank half as fast
    world: int

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.world * LOCAL

    @property
    def sizes(self) -> Floats:
        """λ of each sample, [N]: whole numbers."""
        rng = np.random.default_rng(1)
        count = STEPS * self.global_batch
        if self.lengths == "pareto":
            drawn = np.minimum(30 * (1 + rng.pareto(1.5, count)), 8192)
        elif self.lengths == "text":
            drawn = np.clip(rng.lognormal(5.5, 1, count), 8, 2048)
        else:
            drawn = np.where(rng.random(count) < 0.2, 1000, 50) * rng.uniform(0.9, 1.1, count)
        return np.maximum(np.round(drawn), 1.0)

    @property
    def devices(self) -> Emulation:
        """The ranks' devices, without noise."""
        sizes = self.sizes
        typical = float((sizes**2).sum() / sizes.sum())
        cost = Cost(1 / typical if self.cost == "quadratic" else 0.0, self.cost == "padded")
        slow = [1.0 + (self.uneven and rank % 2) for rank in range(self.world)]
        step_s = OVERHEAD * 1e-3 * LOCAL * float(cost.sizes(sizes).mean())
        return Emulation(
            a_s=[1e-3 * factor for factor in slow],
            b_s=[step_s] * self.world,
            cost=cost,
        )

    @property
    def hello(self) -> Hello:
        """What the leader of a run in this setting would say hello with."""
        return hello_of(self.sizes, self.world, self.global_batch, epochs=EPOCHS)

    def __str__(self) -> str:
        speeds = "half slow" if self.uneven else "equal"
        return f"{self.lengths}, {self.cost}, {speeds}, {self.world} ranks"


def settings(*, quick: bool) -> list[Setting]:
    """18 settings of 8 ranks, three of 64."""
    axes: tuple[Iterable[Any], ...] = (
        ("pareto", "text", "bimodal"),
        ("sum", "padded", "quadratic"),
        (False, True),
    )
    few = [Setting(*values, 8) for values in itertools.product(*axes)]
    many = [
        Setting("text", "sum", False, 64),
        Setting("bimodal", "padded", True, 64),
        Setting("pareto", "quadratic", False, 64),
    ]
    return few[::5] if quick else few + many


def measure(setting: Setting) -> dict[str, float | None]:
    """Time over the fluid limit of each contender; None: it is not installed."""
    row: dict[str, float | None] = {}
    noisy = msgspec.structs.replace(setting.devices, noise=NOISE)
    for name, mode in ((FREE, "free"), (EXACT, "exact")):
        policy = policies.make("paceline", {"mode": mode})
        trained = train(Simulation(setting.hello, noisy, policy)).since(1)
        row[name] = over_limit(trained.features, setting.devices)
    for peer in PEERS:
        row[peer.name] = theirs(setting, peer)["over_limit"] if peer.version else None
    return row


def against(row: dict[str, float | None], ours: str) -> tuple[float, str]:
    """Our time over that of the best peer that composes batches alike, and that peer's name."""
    of = [
        (figure, peer.name)
        for peer in PEERS
        if (figure := row[peer.name]) is not None and (ours == FREE or peer.same_batches)
    ]
    best, name = min(of)
    mine = row[ours]
    assert mine is not None
    return mine / best, name


def main() -> None:
    """Runs the benchmark."""
    options = parser(__doc__).parse_args()
    rows, lines = [], [f"{'setting':<38}{'free':>8}{'best peer':>36}{'exact':>8}{'best peer':>36}"]
    for setting in settings(quick=options.quick):
        print(setting, file=sys.stderr)
        row = measure(setting)
        rows.append({"setting": str(setting), **row})
        line = f"{setting!s:<38}"
        for ours in (FREE, EXACT):
            ratio, name = against(row, ours)
            mark = " " if ratio <= CLOSE else "*"
            line += f"{row[ours]:>8.4f}{ratio - 1:>+9.2%}{mark} {name:<25}"
        lines.append(line)
    checks = [
        Check(f"{ours} over the best peer", max(against(row, ours)[0] for row in rows), CLOSE, "<=")
        for ours in (FREE, EXACT)
    ]
    config = {"steps": STEPS, "local_batch": LOCAL, "noise": NOISE, "epochs_counted": EPOCHS - 1}
    finish(options, config, {"settings": rows}, checks, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
