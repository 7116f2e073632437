"""Random segments of ranks under relaxed synchronisers, and traces of all that happens in them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from paceline.wire.synchronisation import RoundRules, Synchronisation, convert

RNA = {"probes": 2, "staleness": 4, "mean": True}
SOLO = {"probes": None, "staleness": 4, "mean": False}
EAGER = {"waits": True, "paced": True}
PARTIAL: dict[str, dict[str, Any]] = {
    "rna": RNA,
    "none too old": {**RNA, "staleness": 0},
    "majority": {**SOLO, **EAGER, "probes": 1},
    "solo": {**SOLO, **EAGER, "staleness": 1},
    "any": SOLO,
    "n-soft": {"parts": 2, "staleness": 4, "mean": False},
    "ssp": {"quorum": 1, "staleness": None, "lead": 2, "mean": False},
    "close": {"quorum": 1, "staleness": None, "lead": 0, "mean": False},
    "backup": {"spare": 1, "staleness": 0, "waits": True, "mean": False},
    "all": {"quorum": 99, "staleness": 4, "mean": False},
    "led": {"probes": None, "staleness": None, "lead": 1, "mean": True},
}


@dataclass(frozen=True)
class Scenario:
    """What ranks do in one or several segments."""

    what: Synchronisation
    work_s: list[list[float]]  # [S][W]
    samples: list[list[int]]  # [S][W]
    round_s: float
    call_s: float
    pair_s: float | None
    seed: int
    segments: list[int]  # how many steps each has; Σ = S

    @property
    def world(self) -> int:
        return len(self.work_s[0])

    @property
    def rules(self) -> RoundRules:
        """Of its rounds."""
        rules = self.what.parameters
        assert isinstance(rules, RoundRules)
        return rules

    @staticmethod
    def of_ranks(table: list[list[Any]]) -> list[list[Any]]:
        """A table [S][W] as [W][S]."""
        return [list(column) for column in zip(*table, strict=True)]


def _partial(draw: random.Random, world: int) -> dict[str, Any]:
    """Rules of a partial all-reduce, also such as no preset has."""
    if draw.random() < 0.6:
        return dict(draw.choice(list(PARTIAL.values())))
    calls: list[dict[str, Any]] = [
        {"probes": draw.choice([None, 1, 2, 3])},
        {"quorum": draw.randint(1, world + 1)},
        {"parts": draw.randint(1, world)},
        {"spare": draw.randint(0, world)},
    ]
    # A lead is told by rounds, so any rank must be able to call one: else all wait, where real
    # ranks call a round after some seconds.
    drift = {
        "staleness": draw.choice([None, None, 0, 1, 4, 20]),
        "lead": draw.choice([None, 0, 1, 3]) if draw.random() < 0.5 else None,
        "mean": draw.random() < 0.5,
        "waits": (waits := draw.random() < 0.4),
        "paced": waits and draw.random() < 0.5,
    }
    if drift["lead"] is not None:
        calls = [{"probes": None}, {"quorum": 1}]
        drift |= {"paced": False, "staleness": None}
    return draw.choice(calls) | drift


def _what(draw: random.Random, world: int, kind: str) -> Synchronisation:
    if kind == "averaging":
        return convert(kind, {"every": draw.choice([None, 1, 2, 3, 5])})
    if kind == "pairwise":
        return convert(kind)
    if kind == "hierarchical":
        of = [draw.randint(0, 2) for _ in range(world)]
        groups = [[rank for rank in range(world) if of[rank] == group] for group in sorted(set(of))]
        parameters = {"groups": groups, "every": draw.choice([None, 1, 3])}
        return convert(kind, _partial(draw, world) | parameters)
    return convert("partial", _partial(draw, world))


KINDS = ("partial", "hierarchical", "pairwise", "averaging")


def scenario(
    seed: int, kind: str, *, ties: bool = True, most: tuple[int, int] = (7, 14)
) -> Scenario:
    """A scenario that depends on nothing but these arguments, with any version of Python.

    Args:
        kind: of `KINDS`.
        ties: durations are of a few values, so that much happens at the same moment; else nothing
            does.
    """
    draw = random.Random(f"{kind} {seed}")
    world, steps = draw.randint(1, most[0]), draw.randint(1, most[1])
    speeds = [draw.choice([1.0, 1.0, 1.0, 2.0, 5.0]) for _ in range(world)]
    durations = (0.0, 0.5, 1.0, 2.5, 9.0)

    def lasts(rank: int) -> float:
        if ties:
            return draw.choice(durations) * draw.choice([1.0, speeds[rank]])
        return (0.2 + draw.random()) * speeds[rank] * draw.choice([1.0, 1.0, 4.0])

    work_s = [[lasts(rank) for rank in range(world)] for _ in range(steps)]
    samples = [[draw.choice([0, 1, 3, 8]) for _ in range(world)] for _ in range(steps)]
    fuzz = 0.0 if ties else draw.random() / 64
    cuts = sorted(draw.sample(range(1, steps), draw.randint(0, min(2, steps - 1))))
    return Scenario(
        _what(draw, world, kind),
        work_s,
        samples,
        draw.choice([0.0, 0.25, 1.5, 6.0]) + fuzz,
        draw.choice([0.0, 0.125, 0.5]) + fuzz / 3,
        draw.choice([None, 0.0, 0.5, 3.0]),
        draw.randrange(1 << 31),
        [end - first for first, end in zip([0, *cuts], [*cuts, steps], strict=True)],
    )


def scenarios(kind: str, *, ties: bool = True) -> st.SearchStrategy[Scenario]:
    """`scenario` with any seed, the smaller the earlier."""
    return st.builds(
        lambda seed, ranks, steps: scenario(seed, kind, ties=ties, most=(ranks, steps)),
        st.integers(0, 2**32),
        st.integers(1, 7),
        st.integers(1, 14),
    )


def simulated(given: Scenario, sync: Any) -> list[Any]:
    """The trace of a scenario in a simulator, segment by segment.

    Args:
        sync: a package as `paceline_backend.simulator.sync`.

    Returns:
        of each segment: ends of steps, work, waits, communication, and rounds.
    """
    costs = sync.Costs(given.round_s, given.call_s, 7, pair_s=given.pair_s)
    work_s, samples = np.array(given.work_s), np.array(given.samples)
    model, now, first, trace = sync.make(given.what, given.world, given.seed), None, 0, []
    now = np.zeros(given.world)
    for number, steps in enumerate(given.segments):
        part, last = slice(first, first + steps), number == len(given.segments) - 1
        if not model.goes_on:
            model = sync.make(given.what, given.world, given.seed + number)
        nothing = np.zeros_like(work_s[part])
        work = sync.Work(first, work_s[part], samples[part], nothing, costs, last)
        base = float(now.min())
        made = model.run(now - base, work)
        ends = now + np.cumsum(made.work_s + made.wait_s + made.communication_s, axis=0)
        first, now = first + steps, ends[-1]
        if not model.goes_on:
            now = np.full(given.world, now.max())
        rounds = [
            [
                each.rank,
                each.number,
                each.step,
                each.world,
                each.contributors,
                each.staleness,
                each.dropped,
                each.waited_s,
                each.reduced_s,
                each.ended_at,
            ]
            for each in made.rounds
        ]
        arrays = (ends, made.work_s, made.wait_s, made.communication_s)
        trace.append([*(array.tolist() for array in arrays), rounds])
    return trace
