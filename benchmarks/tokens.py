"""Steps of a token budget: how near planners come to the fluid limit, in tokens a second.

The figure is trained tokens a second over those of a perfectly divisible load in the fewest steps:
``Σλ / (Σλ / Σ(1/a) + ⌈Σλ / budget⌉ · b)``. Nothing is faster. Training is virtual: rank j's step
takes ``a_j · Λ + b`` seconds. The longest sample has half of a rank's equal share of the budget.
Policies learn the ranks' speeds in the first epoch, which does not count. A peer that is not
installed has null as its figure.

With limits of tokens, nothing is faster than a divisible load that keeps them in the same steps:
that is the limit which the figure of `paceline exact, token limits` is over.

verl's Karmarkar-Karp divides the same steps as Paceline. So do NeMo-RL's packers, into
micro-batches of up to a rank's equal share, as many for each rank; what a rank has in a step counts
as one batch here. lhotse's DynamicBucketingSampler makes batches of about a rank's equal share from
samples of similar lengths.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec
import numpy as np
from harness import Check, finish, parser
from packing import (
    Packer,
    concatenative,
    first_fit_shuffle,
    modified_first_fit_decreasing,
    packed,
)
from peers import PEERS, Ints, Steps, dynamic_bucketing, karmarkar_karp
from virtual import Floats, train

from paceline.core.amounts.budget import counts_within
from paceline.core.cost import Features, features
from paceline.core.emulation import Emulation
from paceline.wire import Hello
from paceline_backend import policies
from paceline_backend.policies.solve.order import epoch_order
from paceline_backend.simulator import Simulation
from paceline_backend.simulator.hello import hello_of

SHARE = 16_384  # tokens of a step for each rank
LONGEST = SHARE // 2
SPEED_S = 1e-5  # a of the fast workers, s per token
OVERHEAD = 0.02  # b as a share of a mean step
STEPS = 32  # steps of an epoch, about
EPOCHS = 3  # the first epoch is not counted
ROOM = 1.25  # a rank's limit of tokens over its equal share of the budget, where there are limits

OURS, LIMITED, PLAIN = "paceline exact", "paceline exact, token limits", "bsp"
VERL, LHOTSE = "verl Karmarkar-Karp, unequal", "lhotse DynamicBucketing"
NEMO: dict[str, Packer] = {
    "NeMo-RL modified FFD": modified_first_fit_decreasing,
    "NeMo-RL first-fit shuffle": first_fit_shuffle,
    "NeMo-RL concatenative": concatenative,
}
Lengths = Literal["lognormal", "pareto", "bimodal"]


@dataclass(frozen=True)
class Setting:
    """One data set on one cluster."""

    lengths: Lengths
    world: int
    uneven: bool  # half of the workers half as fast

    @property
    def budget(self) -> float:
        """Tokens of a step over all ranks."""
        return float(SHARE * self.world)

    @property
    def sizes(self) -> Floats:
        """λ of each sample, [N]: whole numbers up to `LONGEST`, which one sample has."""
        rng = np.random.default_rng(7)
        wanted, many = STEPS * self.budget, 400_000
        if self.lengths == "lognormal":
            drawn = rng.lognormal(math.log(400), 1.0, many)
        elif self.lengths == "pareto":
            drawn = 200 * (1 + rng.pareto(1.5, many))
        else:
            long = rng.random(many) < 0.2
            drawn = np.where(long, rng.normal(4_000, 800, many), rng.normal(250, 80, many))
        whole = np.clip(np.round(drawn), 1, LONGEST)
        whole[0] = LONGEST
        return np.asarray(whole[: int(np.searchsorted(np.cumsum(whole), wanted))])

    @property
    def hello(self) -> Hello:
        """What the leader of a run in this setting would say hello with."""
        sizes = self.sizes
        return hello_of(
            sizes,
            self.world,
            round(len(sizes) / STEPS),
            epochs=EPOCHS,
            loss_mean="size",
            token_budget=self.budget,
        )

    @property
    def devices(self) -> Emulation:
        """The ranks' devices; in an uneven setting, ranks with odd numbers are slow."""
        slow = [1.0 + (self.uneven and rank % 2) for rank in range(self.world)]
        return Emulation(
            a_s=[SPEED_S * factor for factor in slow],
            b_s=[OVERHEAD * SPEED_S * SHARE] * self.world,
        )

    def __str__(self) -> str:
        speeds = "half slow" if self.uneven else "equal"
        return f"{self.lengths}, {self.world} ranks, {speeds}"


def of_limit(setting: Setting, batches: Features, tokens: float) -> float:
    """Tokens a second over those of the fluid limit; batches are [S, W], `tokens` an epoch's."""
    devices = setting.devices
    load = float(batches.load.sum())
    step_s = devices.compute_s(0, batches).max(axis=1).sum()
    fewest = math.ceil(tokens / setting.budget)
    limit_s = tokens / float(np.sum(1 / np.array(devices.a_s))) + fewest * devices.b_s[0]
    return float((load / step_s) / (tokens / limit_s))


def limited_s(load: float, a_s: Floats, limit: float) -> float:
    """Time of a divisible load of which no rank takes more than a limit, s."""
    among = np.ones(len(a_s), bool)
    while True:
        time_s = (load - limit * int((~among).sum())) / float(np.sum(1 / a_s[among]))
        full = among & (time_s / a_s > limit)
        if not full.any():
            return time_s
        among &= ~full


def of_limited(setting: Setting, batches: Features) -> float:
    """Tokens a second over those of a divisible load that keeps the limits; batches are [S, W]."""
    devices = setting.devices
    step_s = devices.compute_s(0, batches).max(axis=1).sum()
    loads = batches.load.sum(axis=1).tolist()
    least_s = sum(limited_s(load, np.array(devices.a_s), ROOM * SHARE) for load in loads)
    return float((least_s + len(loads) * devices.b_s[0]) / step_s)


def ours(setting: Setting, policy: str, *, limited: bool = False) -> dict[str, float]:
    """One of Paceline's policies."""
    hello = setting.hello
    if limited:
        hello = msgspec.structs.replace(hello, token_limits=[ROOM * SHARE] * setting.world)
    trained = train(Simulation(hello, setting.devices, policies.make(policy))).since(1)
    load = trained.features.load
    assert load.sum(axis=1).max() <= setting.budget
    if limited:
        assert load.max() <= ROOM * SHARE
    tokens = float(setting.sizes.sum())
    assert load.sum() == tokens * (EPOCHS - 1)
    reached = of_limited(setting, trained.features) if limited else None
    return {
        "of_limit": reached or of_limit(setting, trained.features, tokens),
        "most_tokens": float(load.max()),
        "plan_s": trained.plan_s,
    }


def theirs(setting: Setting, name: str) -> dict[str, float]:
    """A peer."""
    sizes = setting.sizes.astype(np.int64)
    begun = time.process_time()
    steps: Steps = []
    for epoch in range(1, EPOCHS):
        if name == LHOTSE:
            steps += dynamic_bucketing(sizes, setting.world, SHARE, STEPS, 0, epoch)
        for step in planned(setting, epoch) if name != LHOTSE else []:
            if name == VERL:
                steps.append(karmarkar_karp(step, sizes, setting.world))
            else:
                steps.append(packed(step, sizes, setting.world, SHARE, NEMO[name]))
    spent = time.process_time() - begun
    counts = np.array([[len(part) for part in step] for step in steps])
    flat = np.concatenate([part for step in steps for part in step])
    batches = features(setting.sizes[flat], counts)
    return {
        "of_limit": of_limit(setting, batches, float(sizes.sum())),
        "most_tokens": float(batches.load.max()),
        "plan_s": spent / len(steps),
    }


def planned(setting: Setting, epoch: int) -> list[Ints]:
    """The samples of each step of an epoch, as the budget makes them."""
    order = epoch_order(len(setting.sizes), 0, epoch)
    counts = counts_within(setting.sizes[order], setting.budget)
    return np.split(order, np.cumsum(counts)[:-1])


def measure(setting: Setting) -> dict[str, Any]:
    """All contenders in one setting; a contender that is not installed gets None."""
    row: dict[str, Any] = {
        OURS: ours(setting, "paceline"),
        PLAIN: ours(setting, "bsp"),
    }
    if setting.uneven:
        row[LIMITED] = ours(setting, "paceline", limited=True)
    for peer in PEERS:
        if peer.name in (VERL, LHOTSE):
            row[peer.name] = theirs(setting, peer.name) if peer.version else None
    row |= {name: theirs(setting, name) for name in NEMO}
    sizes = setting.sizes
    return {
        **asdict(setting),
        "samples": len(sizes),
        "mean": float(sizes.mean()),
        "longest": float(sizes.max()),
        "contenders": row,
    }


def least(rows: list[dict[str, Any]], name: str, *, uneven: bool) -> float:
    """A contender's least figure among the settings with these workers."""
    figures = [r["contenders"][name]["of_limit"] for r in rows if r["uneven"] == uneven]
    return float(min(figures))


def against(rows: list[dict[str, Any]]) -> float:
    """The figure of `paceline exact` over that of the best peer: the least of all settings."""
    ratios = []
    for row in rows:
        got = [row["contenders"][name] for name in (VERL, LHOTSE, *NEMO)]
        best = max((figures["of_limit"] for figures in got if figures), default=math.nan)
        ratios.append(row["contenders"][OURS]["of_limit"] / best)
    return float(np.nanmin(ratios)) if not np.isnan(ratios).all() else math.inf


def checks_of(rows: list[dict[str, Any]]) -> list[Check]:
    """What the results must keep."""
    figure = "tokens/s over fluid limit"
    return [
        Check(f"equal workers: {figure}", least(rows, OURS, uneven=False), 0.99, ">="),
        Check(f"half of them slow: {figure}", least(rows, OURS, uneven=True), 0.98, ">="),
        Check(f"half slow, token limits: {figure}", least(rows, LIMITED, uneven=True), 0.98, ">="),
        Check("exact over the best peer", against(rows), 1.0, ">="),
    ]


def table_of(rows: list[dict[str, Any]]) -> str:
    """One line a contender, one column a setting."""
    heads = [f"{r['lengths']}/{r['world']}{' uneven' if r['uneven'] else ''}" for r in rows]
    lines = [f"{'tokens/s over fluid limit':<31}" + "".join(f"{head:>19}" for head in heads)]
    names = list(dict.fromkeys(name for row in rows for name in row["contenders"]))
    for name in names:
        cells = [row["contenders"].get(name) for row in rows]
        texts = [f"{cell['of_limit']:.4f}" if cell else "-" for cell in cells]
        lines.append(f"{name:<31}" + "".join(f"{text:>19}" for text in texts))
    missing = [p.name for p in PEERS if p.name in (VERL, LHOTSE) and not p.version]
    if missing:
        lines.append(f"\nnot installed: {', '.join(missing)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the benchmark."""
    options = parser(__doc__).parse_args()
    worlds = (8,) if options.quick else (8, 32)
    rows = []
    for axes in itertools.product(("lognormal", "pareto", "bimodal"), worlds, (False, True)):
        setting = Setting(*axes)
        print(setting, file=sys.stderr)
        rows.append(measure(setting))
    config = {
        "share": SHARE,
        "longest": LONGEST,
        "steps": STEPS,
        "epochs_counted": EPOCHS - 1,
        "overhead_share": OVERHEAD,
        "room": ROOM,
        "peers": {
            peer.name: {"package": peer.package, "version": peer.version, "licence": peer.licence}
            for peer in PEERS
            if peer.name in (VERL, LHOTSE)
        },
    }
    finish(options, config, {"settings": rows}, checks_of(rows), table_of(rows))


if __name__ == "__main__":
    main()
