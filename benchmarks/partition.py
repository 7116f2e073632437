"""`paceline.partition` beside verl, flatflow and the greedy cut, and beside proven optima.

Random instances have 2 to 1,024 ranks; costs are lengths, squares of lengths, or lengths of padded
batches; counts are equal or free; some ranks are slower than others, and some have little memory.
Each peer divides the instances that it can express. Small instances are solved with OR-Tools'
CP-SAT, which proves their optimum. ``scripts/setup.sh bench`` installs the peers.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from harness import Check, finish, parser
from ortools.sat.python import cp_model
from peers import flatflow_parts, verl_parts

import paceline

Ints = npt.NDArray[np.int64]
Parts = list[Ints]

# The solver was tuned on instances with smaller seeds.
FIRST_SEED = 2_000_000
# Differences below this are rounding.
ROUNDING = 1e-9
# Seconds within which the solver must prove an optimum; else the instance does not count.
PROOF_S = 10.0
# verl joins lists in Python, and flatflow plans anew for each rank: the largest instances for them.
VERL_MOST = 1_500_000  # items times ranks
FLATFLOW_RANKS = 64


@dataclass(frozen=True)
class Instance:
    """A global batch to divide.

    Args:
        lengths: of the items, [n].
        ranks: number of ranks.
        speeds: relative speed of each rank, [W].
        square: an item costs the square of its length.
        padded: a rank computes its number of items times its longest item.
        equal_count: each rank must get the same number of items.
        limit: maximum number of items of a rank; None: no limit.
    """

    lengths: Ints
    ranks: int
    speeds: Ints
    square: bool
    padded: bool
    equal_count: bool
    limit: int | None

    @property
    def costs(self) -> Ints:
        """Cost of each item, [n]."""
        return self.lengths**2 if self.square else self.lengths

    @property
    def room(self) -> int:
        """Maximum number of items of a rank."""
        items = len(self.lengths)
        return items // self.ranks if self.equal_count else self.limit or items

    @property
    def kind(self) -> str:
        """Return the kind of the costs, and of the counts."""
        cost = "padded" if self.padded else "squares" if self.square else "sums"
        return f"{cost}, {'equal' if self.equal_count else 'free'} counts"

    def slowest(self, parts: Parts) -> float:
        """Return the time of the slowest rank, after checking that the division is valid."""
        everything = np.sort(np.concatenate(parts))
        assert len(parts) == self.ranks
        assert (everything == np.arange(len(self.lengths))).all()
        assert not self.equal_count or {len(part) for part in parts} == {self.room}
        assert max(map(len, parts)) <= self.room
        if self.padded:
            loads = [len(part) * self.costs[part].max(initial=0) for part in parts]
        else:
            loads = [self.costs[part].sum() for part in parts]
        return float(np.max(np.array(loads) / self.speeds))

    def ours(self) -> Parts:
        """Divide the batch with `paceline.partition`."""
        return paceline.partition(
            self.costs.astype(np.float64),
            self.ranks,
            speeds=self.speeds.astype(np.float64),
            limits=self.limit,
            equal_count=self.equal_count,
            padded=self.padded,
        )


def drawn(seed: int, *, small: bool) -> Instance:
    """Draw a random instance, one that a solver can prove if `small`."""
    rng = np.random.default_rng(seed)
    padded, equal_count = bool(rng.random() < 0.25), bool(rng.random() < 0.5)
    if small:
        ranks = int(rng.integers(2, 7))
        items = int(rng.integers(ranks, 13 if padded else 25))
    else:
        ranks = round(2 ** rng.uniform(1, 10))
        items = round(ranks * 2 ** rng.uniform(0.5, 5 if ranks <= 128 else 2))
    if equal_count:
        items = max(1, items // ranks) * ranks
    law = rng.integers(4)
    lengths = [
        rng.integers(1, 8193, items),
        np.clip(rng.lognormal(5, 1, items).round(), 1, 8192),
        rng.integers(1, 101, items),
        np.clip(rng.exponential(300, items).round(), 1, 8192),
    ][law].astype(np.int64)
    equal_speeds = rng.random() < 0.5
    speeds = np.full(ranks, 1) if equal_speeds else rng.integers(2, 7, ranks)
    limit = None
    if not equal_count and rng.random() < 0.3:
        limit = -(-items // ranks) + int(rng.integers(0, 3))
    square = bool(not padded and rng.random() < 0.5)
    return Instance(lengths, ranks, speeds.astype(np.int64), square, padded, equal_count, limit)


def greedy_parts(instance: Instance) -> Parts:
    """Give each item, largest first, to the rank with room that then ends first."""
    parts: list[list[int]] = [[] for _ in range(instance.ranks)]
    load, count = np.zeros(instance.ranks), np.zeros(instance.ranks)
    longest = np.zeros(instance.ranks)
    for item in np.argsort(-instance.costs, kind="stable"):
        cost = instance.costs[item]
        then = (count + 1) * np.maximum(longest, cost) if instance.padded else load + cost
        then = np.where(count < instance.room, then / instance.speeds, np.inf)
        rank = int(then.argmin())
        parts[rank].append(int(item))
        load[rank] += cost
        count[rank] += 1
        longest[rank] = max(longest[rank], cost)
    return [np.array(part, np.int64) for part in parts]


def of_peers(instance: Instance) -> Iterator[tuple[str, Parts]]:
    """Divide the batch with each peer that can express it."""
    yield "greedy, with speeds", greedy_parts(instance)
    items = len(instance.costs)
    plain = not instance.padded and np.ptp(instance.speeds) == 0
    if plain and instance.limit is None and items * instance.ranks <= VERL_MOST:
        yield "verl", verl_parts(instance.costs, instance.ranks, equal=instance.equal_count)
    if plain and instance.equal_count and instance.ranks <= FLATFLOW_RANKS:
        for mode in ("sched", "sched_unstable"):
            yield f"flatflow {mode}", flatflow_parts(instance.costs, instance.ranks, mode)


def proven(instance: Instance, known: float) -> float | None:
    """Return the time of the slowest rank in an optimal division; None: not proven in time.

    `known` is the time of a division that exists.
    """
    model = cp_model.CpModel()
    items, ranks = len(instance.costs), instance.ranks
    costs = instance.costs.tolist()
    common = int(np.lcm.reduce(instance.speeds))
    factor = [common // int(speed) for speed in instance.speeds]
    makespan = model.new_int_var(0, round(known * common), "makespan")
    given = [[model.new_bool_var("") for _ in range(ranks)] for _ in range(items)]
    for of_item in given:
        model.add_exactly_one(of_item)
    for rank in range(ranks):
        of_rank = [given[item][rank] for item in range(items)]
        if instance.equal_count:
            model.add(sum(of_rank) == instance.room)
        else:
            model.add(sum(of_rank) <= instance.room)
        if instance.padded:
            longest = model.new_int_var(0, max(costs), "")
            for item in range(items):
                model.add(longest >= costs[item]).only_enforce_if(of_rank[item])
            number, area = model.new_int_var(0, items, ""), model.new_int_var(0, 10**9, "")
            model.add(number == sum(of_rank))
            model.add_multiplication_equality(area, [number, longest])
            model.add(factor[rank] * area <= makespan)
        else:
            load = sum(cost * used for cost, used in zip(costs, of_rank, strict=True))
            model.add(factor[rank] * load <= makespan)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = PROOF_S
    solver.parameters.num_workers = 1
    if solver.solve(model) != cp_model.OPTIMAL:
        return None
    return float(solver.objective_value) / common


def against_peers(instances: int) -> dict[str, dict[str, Any]]:
    """Compare with the peers; return the results by peer."""
    rows: dict[str, dict[str, Any]] = {}
    for seed in range(FIRST_SEED, FIRST_SEED + instances):
        instance = drawn(seed, small=False)
        ours = instance.slowest(instance.ours())
        for name, parts in of_peers(instance):
            row = rows.setdefault(name, {"instances": 0, "better": 0, "worse": [], "ratios": []})
            ratio = instance.slowest(parts) / ours
            row["instances"] += 1
            row["better"] += ratio > 1 + ROUNDING
            row["ratios"].append(ratio)
            if ratio < 1 - ROUNDING:
                row["worse"].append({"seed": seed, "kind": instance.kind, "ratio": ratio})
    for row in rows.values():
        ratios = row.pop("ratios")
        row |= {"mean_ratio": float(np.mean(ratios)), "most": float(np.max(ratios))}
    return rows


def against_solver(wanted: int) -> dict[str, Any]:
    """Compare with proven optima of `wanted` instances."""
    proved: Counter[str] = Counter()
    optimal: Counter[str] = Counter()
    gaps, missed, seed = [], [], 0
    while proved.total() < wanted and seed < 2 * wanted:
        instance = drawn(FIRST_SEED + seed, small=True)
        seed += 1
        ours = instance.slowest(instance.ours())
        best = proven(instance, ours)
        if best is None:
            continue
        gap = ours / best - 1
        gaps.append(gap)
        proved[instance.kind] += 1
        if gap <= ROUNDING:
            optimal[instance.kind] += 1
        else:
            missed.append({"seed": FIRST_SEED + seed - 1, "kind": instance.kind, "gap": gap})
    return {
        "instances": seed,
        "proven": proved.total(),
        "optimal": optimal.total(),
        "mean_gap": float(np.mean(gaps)),
        "by_kind": {kind: [optimal[kind], number] for kind, number in sorted(proved.items())},
        "missed": missed,
    }


def large(items: int, ranks: int) -> dict[str, float]:
    """Return the seconds of one division of many items, by kind, once kernels are compiled."""
    rng = np.random.default_rng(0)
    costs, speeds = rng.lognormal(5, 1, items), rng.uniform(0.5, 2, ranks)
    kinds: dict[str, dict[str, Any]] = {
        "sums": {},
        "sums, speeds": {"speeds": speeds},
        "sums, equal counts": {"equal_count": True},
        "sums, equal counts, speeds": {"equal_count": True, "speeds": speeds},
        "sums, limits": {"limits": items // ranks + 50},
        "padded": {"padded": True},
    }
    seconds = {}
    for kind, options in kinds.items():
        few = {**options, **({"speeds": speeds[:100]} if "speeds" in options else {})}
        paceline.partition(costs[:2_000], 100, **few)
        began = time.perf_counter()
        paceline.partition(costs, ranks, **options)
        seconds[kind] = time.perf_counter() - began
    return seconds


def main() -> None:
    """Measure and print."""
    options: argparse.Namespace = parser(__doc__).parse_args()
    instances, wanted = (100, 50) if options.quick else (2_000, 1_000)
    peers, solver = against_peers(instances), against_solver(wanted)
    seconds = large(1_000_000, 1_024)
    share = 100 * solver["optimal"] / solver["proven"]
    checks = [
        *(Check(f"worse than {name}", len(row["worse"]), 0, "<=") for name, row in peers.items()),
        Check("instances with a proven optimum", solver["proven"], wanted, ">="),
        Check("optimal, % of them", share, 99.8, ">="),
        Check("1 M items, 1,024 ranks, s", max(seconds.values()), 2.0, "<="),
    ]
    lines = [
        "peer                     instances  better  worse  its slowest rank / ours, mean, most"
    ]
    for name, row in peers.items():
        counts = f"{row['instances']:9}  {row['better']:6}  {len(row['worse']):5}"
        lines.append(f"{name:<25}{counts}  {row['mean_ratio']:.4f}  {row['most']:.3f}")
    for kind, (optimal, proved) in solver["by_kind"].items():
        lines.append(f"{kind:<25}optimal in {optimal} of {proved}")
    lines += [f"{kind:<30}{taken:6.2f} s" for kind, taken in seconds.items()]
    config = {"instances": instances, "proven": wanted, "proof_s": PROOF_S}
    results = {"peers": peers, "solver": solver, "seconds": seconds}
    finish(options, config, results, checks, "\n".join(lines))


if __name__ == "__main__":
    main()
