"""Scenarios for verdicts: synthetic per-step timings of data-parallel jobs, with what is to be said of each.

numpy only. Every case is drawn (`KINDS[name](rng, seed)`), with truths whose cost is exact: the wall time with everything minus
the wall time of the same random numbers without that one cause. `python verdict_cases.py` checks three cases of each kind.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

Rng = np.random.Generator


@dataclass(frozen=True)
class Truth:
    kind: str
    ranks: tuple[int, ...]
    since: int | None
    cost_s: float
    sigmas: float | None


@dataclass(frozen=True)
class Case:
    name: str
    seed: int
    samples: np.ndarray
    load: np.ndarray
    squares: np.ndarray
    longest: np.ndarray
    data_s: np.ndarray
    compute_s: np.ndarray
    sync_s: np.ndarray
    between_s: np.ndarray
    first: np.ndarray
    nodes: tuple[str, ...]
    truths: tuple[Truth, ...]


CAUSES = ("node", "transient", "periodic", "input", "data", "network", "between", "planning")


def wall_of(case: Case) -> float:
    """The wall time as documented, from the arrays of a case alone."""
    active = case.samples > 0
    own = np.where(active, case.data_s + case.compute_s, -np.inf)
    sync = np.where(active, case.sync_s, np.inf)
    return float((own.max(axis=1) + sync.min(axis=1) + case.between_s).sum())


# ---------------------------------------------------------------------------------------------------------------- the world


@dataclass
class Cause:
    kind: str
    ranks: tuple[int, ...]
    since: int | None
    sigmas: float | None
    factor: np.ndarray | None = None  # [K, W] multiplies compute
    pause: np.ndarray | None = None  # [K, W] is added to compute
    wait: np.ndarray | None = None  # [K, W] is added to data
    reduce: np.ndarray | None = None  # [K] is added to the reduction
    between: np.ndarray | None = None  # [K]
    cost_without: np.ndarray | None = (
        None  # [K, W] what the batches would cost without it ("data", or a plan that makes up for it)
    )
    zero: str = ""  # "data", "reduce", "between": without it there is none of that at all
    events: list[tuple[int, int]] | None = None  # [start, end) of each time
    min_share: float = 0.03


@dataclass
class World:
    rng: Rng
    K: int
    W: int
    gpn: int
    nodes: tuple[str, ...]
    first: np.ndarray
    active: np.ndarray
    samples: np.ndarray
    load: np.ndarray
    squares: np.ndarray
    longest: np.ndarray
    cost: np.ndarray  # seconds of each batch on the usual machine, no noise
    T: float  # usual seconds of a batch
    speed: np.ndarray
    noise: np.ndarray
    wait0: np.ndarray
    reduce0: np.ndarray
    reduce_sd: float
    between0: np.ndarray
    between_sd: float
    wait_sd: float
    jitter: np.ndarray
    pause0: np.ndarray | None = None  # too little to be named
    coef: dict[str, float] = field(default_factory=dict)
    causes: list[Cause] = field(default_factory=list)
    planned: bool = False  # a plan makes up for slow ranks: batches differ on purpose

    @property
    def sd(self) -> float:
        return float(self.noise.std())

    def times(self, without: frozenset[int] = frozenset(), mean_cost: bool = False):
        cost, wait, red, bet = self.cost, self.wait0, self.reduce0, self.between0
        comp_pause = 0.0 if self.pause0 is None else self.pause0
        factor = np.ones((self.K, self.W))
        for i, c in enumerate(self.causes):
            if i in without:
                if c.cost_without is not None:
                    cost = c.cost_without
                if c.zero == "data":
                    wait = np.zeros_like(wait)
                if c.zero == "reduce":
                    red = np.zeros_like(red)
                if c.zero == "between":
                    bet = np.zeros_like(bet)
        for i, c in enumerate(self.causes):
            if i in without:
                continue
            if c.factor is not None:
                factor = factor * c.factor
            if c.pause is not None:
                comp_pause = comp_pause + c.pause
            if c.wait is not None:
                wait = wait + c.wait
            if c.reduce is not None:
                red = red + c.reduce
            if c.between is not None:
                bet = bet + c.between
        if mean_cost:
            cost = row_mean(cost, self.active)
        comp = cost * self.speed[None, :] * factor * self.noise + comp_pause
        data = np.where(self.active, wait, 0.0)
        comp = np.where(self.active, comp, 0.0)
        slowest = np.where(self.active, data + comp, -np.inf).max(axis=1)
        sync = np.where(
            self.active, slowest[:, None] - (data + comp) + red[:, None] + self.jitter, 0.0
        )
        return data, comp, sync, bet, slowest, red

    def wall(self, without: frozenset[int] = frozenset(), mean_cost: bool = False) -> float:
        _, _, sync, bet, slowest, _ = self.times(without, mean_cost)
        return float((slowest + np.where(self.active, sync, np.inf).min(axis=1) + bet).sum())


def row_mean(a: np.ndarray, active: np.ndarray) -> np.ndarray:
    mean = np.where(active, a, 0.0).sum(axis=1) / active.sum(axis=1)
    return np.broadcast_to(mean[:, None], a.shape).copy()


def logu(rng: Rng, lo: float, hi: float) -> float:
    return float(np.exp(rng.uniform(np.log(lo), np.log(hi))))


def draw_noise(rng: Rng, shape: tuple[int, int], kind: str, sd: float) -> np.ndarray:
    if kind == "normal":
        x = 1 + sd * rng.standard_normal(shape)
    elif kind == "lognormal":
        s = np.sqrt(np.log1p(sd * sd))
        x = np.exp(s * rng.standard_normal(shape) - s * s / 2)
    elif kind == "gamma":
        x = rng.gamma(1 / sd**2, sd**2, shape)
    else:  # a bit of heavy tail
        nu = rng.uniform(5, 9)
        t = np.clip(rng.standard_t(nu, shape), -6, 6)
        x = 1 + sd * t / np.sqrt(nu / (nu - 2))
    return np.clip(x, 0.3, None)


def draw_machines(
    rng: Rng, W: tuple[int, int], gpn: tuple[int, ...], nodes_min: int
) -> tuple[int, int, tuple[str, ...]]:
    for _ in range(1000):
        g = int(rng.choice(gpn))
        n = int(round(logu(rng, max(1.0, W[0] / g), max(1.0, W[1] / g))))
        if W[0] <= n * g <= W[1] and n >= nodes_min:
            break
    else:
        raise RuntimeError("no such cluster")
    style = int(rng.integers(3))
    names = [
        f"node{i}"
        if style == 0
        else f"gpu-{i:03d}"
        if style == 1
        else f"10.0.{i // 250}.{i % 250 + 1}"
        for i in range(n)
    ]
    return n * g, g, tuple(names[r // g] for r in range(n * g))


def draw_first(rng: Rng, K: int, length: int | None = None, mid: bool | None = None) -> np.ndarray:
    """First steps of segments; the range may begin in the middle of one."""
    length = int(length or round(logu(rng, 8, 200)))
    mid = rng.random() < 0.3 if mid is None else mid
    first = np.zeros(K, bool)
    offset = int(rng.integers(length)) if mid else 0
    first[offset::length] = True
    return first


def draw_sizes(rng: Rng, shape: tuple[int, ...], dist: str) -> np.ndarray:
    """Sizes λ with mean about 1."""
    if dist == "uniform":
        lo = rng.uniform(0.1, 0.8)
        return rng.uniform(lo, 2 - lo, shape)
    if dist == "lognormal":
        s = rng.uniform(0.3, 1.0)
        return np.exp(s * rng.standard_normal(shape) - s * s / 2)
    if dist == "gamma":
        k = rng.uniform(0.8, 6)
        return rng.gamma(k, 1 / k, shape) + 0.01
    if dist == "long tail":
        s = rng.uniform(0.8, 1.3)
        return np.minimum(np.exp(s * rng.standard_normal(shape) - s * s / 2), 60.0)
    raise ValueError(dist)


def make_world(
    rng: Rng,
    *,
    W: tuple[int, int] = (4, 64),
    K: tuple[int, int] = (100, 600),
    gpn: tuple[int, ...] = (1, 2, 4, 8),
    nodes_min: int = 1,
    sizes: str | None = None,
    model: str = "load",  # what a batch costs: load, padded, squares, count, flat
    balance: str | None = "load",  # load, cost or None
    n: tuple[int, int] = (4, 96),
    noise: str | None = None,
    sd: tuple[float, float] = (0.005, 0.08),
    vary: float | None = None,  # how much the global size of the steps varies
    spread: float | None = None,  # of the ranks' speeds
    reduce: tuple[float, float] = (0.005, 0.10),
    between: tuple[float, float] = (0.0, 0.04),
    loader: tuple[float, float] = (0.0, 0.015),
    bfrac: tuple[float, float] = (0.0, 0.5),
    idle: bool | None = None,
    segment: int | None = None,
    mid: bool | None = None,
    reweight: Callable[[Rng, int, int], np.ndarray]
    | None = None,  # [K, W] factor of the batches' sizes
    counts: Callable[[Rng, int, int, int], np.ndarray]
    | None = None,  # [K, W] counts; constant sizes then
) -> World:
    W_, g, nodes = draw_machines(rng, W, gpn, nodes_min)
    K_ = int(round(logu(rng, *K)))
    if W_ >= 512:
        K_ = min(K_, 150)
    shape = (K_, W_)
    if sizes is None:
        sizes = str(rng.choice(["constant", "constant", "uniform", "lognormal", "gamma"]))
    n_ = int(round(logu(rng, *n)))
    n_ = max(2, min(n_, int(1_200_000 / (K_ * W_))))
    if counts is not None:
        sizes = "constant"
    if sizes == "constant":
        n_ = int(round(logu(rng, 8, 256)))
    if vary is None:
        vary = float(rng.uniform(0.05, 0.3)) if rng.random() < 0.35 else 0.0
    g_k = np.exp(vary * rng.standard_normal(K_)) if vary else np.ones(K_)
    unit = logu(rng, 1, 2000)
    if sizes == "constant":
        if counts is not None:
            samples = counts(rng, K_, W_, n_).astype(float)
        else:
            samples = np.repeat(np.maximum(1, np.round(n_ * g_k))[:, None], W_, axis=1)
        lam = unit * np.ones(shape)
        if reweight is not None:
            lam = lam * reweight(rng, K_, W_)
        load, squares, longest = samples * lam, samples * lam**2, lam
    else:
        samples = np.full(shape, float(n_))
        x = draw_sizes(rng, (K_, W_, n_), sizes)
        load, squares, longest = x.sum(axis=2), (x * x).sum(axis=2), x.max(axis=2)
        del x
        if balance == "load":
            near = 1 + rng.uniform(0, 0.0012) * rng.standard_normal(shape)
            scale = n_ * g_k[:, None] * near / load
        else:
            scale = np.repeat(g_k[:, None], W_, axis=1)
        if reweight is not None:
            scale = scale * reweight(rng, K_, W_)
        load, squares, longest = load * scale, squares * scale**2, longest * scale
        load, squares, longest = load * unit, squares * unit**2, longest * unit
    T = logu(rng, 0.04, 4.0)
    b = rng.uniform(*bfrac)
    coef: dict[str, float] = {}
    if model == "load":
        x = load / load.mean()
    elif model == "padded":
        p = samples * longest
        x = p / p.mean()
    elif model == "squares":
        q = rng.uniform(0.35, 0.9)
        coef["q"] = q
        if balance == "cost":  # scale each batch so that load and squares together cost the same
            l0, s0 = load / load.mean(), squares / squares.mean()
            want = g_k[:, None] * (1 + rng.uniform(0, 0.0012) * rng.standard_normal(shape))
            bb, aa = (1 - q) * l0, q * s0
            s = (-bb + np.sqrt(bb * bb + 4 * aa * want)) / (2 * aa)
            lm, sm = load.mean(), squares.mean()
            load, squares, longest = load * s, squares * s * s, longest * s
            x = (1 - q) * load / lm + q * squares / sm
        else:
            x = (1 - q) * load / load.mean() + q * squares / squares.mean()
    elif model == "count":
        x = samples / samples.mean()
    else:
        x, b = np.zeros(shape), 1.0
    if model == "padded" and balance == "cost":
        want = g_k[:, None] * (1 + rng.uniform(0, 0.0012) * rng.standard_normal(shape))
        s = want / x
        load, squares, longest, x = load * s, squares * s * s, longest * s, x * s
    cost = T * (b + (1 - b) * x)
    coef["b"] = b

    active = np.ones(shape, bool)
    if idle or (idle is None and rng.random() < 0.08 and W_ >= 6):
        rows = np.flatnonzero(rng.random(K_) < rng.uniform(0.02, 0.15))
        for k in rows:
            off = rng.choice(W_, int(rng.integers(1, max(2, W_ // 3))), replace=False)
            active[k, off] = False

    noise_kind = noise or str(rng.choice(["normal", "normal", "lognormal", "gamma", "heavy"]))
    sd_ = logu(rng, *sd)
    nz = draw_noise(rng, shape, noise_kind, sd_)
    width = rng.uniform(0, 0.015) if spread is None else spread
    speed = 1 + width * (rng.random(W_) - 0.5)

    def little(mean: float, rel: float, shp):
        return np.clip(mean * (1 + rel * rng.standard_normal(shp)), 0.1 * mean, None)

    rel_r = rng.uniform(0.01, 0.15)
    r = rng.uniform(*reduce) * T
    rel_b = rng.uniform(0.02, 0.3)
    bt = max(rng.uniform(*between), 1e-4) * T
    rel_l = rng.uniform(0.05, 0.4)
    ld = max(rng.uniform(*loader), 1e-4) * T
    wait0 = ld * rng.gamma(1 / rel_l**2, rel_l**2, shape)
    jitter = rng.random(shape) * (rng.uniform(0, 0.001) * T if rng.random() < 0.5 else 0.0)
    first = draw_first(rng, K_, segment, mid)
    z = np.where(active, 1.0, 0.0)
    return World(
        rng, K_, W_, g, nodes, first, active, samples * z, load * z, squares * z, longest * z, cost * z, T, speed, nz, wait0,
        little(r, rel_r, K_), r * rel_r, little(bt, rel_b, K_), bt * rel_b, ld * rel_l, jitter, coef=coef,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- drawing of causes


class Again(Exception):
    """This draw would not be fair, or too weak: draw another."""


def need(ok: bool, why: str = "") -> None:
    if not ok:
        raise Again(why)


def pick(w: World, how: str, avoid: tuple[int, ...] = ()) -> tuple[int, ...]:
    rng = w.rng
    free = [r for r in range(w.W) if r not in avoid]
    if how == "one":
        return (int(rng.choice(free)),)
    if how == "few":
        m = int(rng.integers(2, max(3, w.W // 5 + 1)))
        return tuple(sorted(int(r) for r in rng.choice(free, min(m, len(free)), replace=False)))
    if how == "one or few":
        return pick(w, "one" if rng.random() < 0.6 or w.W < 8 else "few", avoid)
    if how == "node":
        taken = {w.nodes[r] for r in avoid}
        names = sorted({x for x in w.nodes if x not in taken})
        name = str(rng.choice(names))
        return tuple(r for r in range(w.W) if w.nodes[r] == name)
    if how == "half":
        half = w.W // 2
        if rng.random() < 0.5:
            return tuple(range(half)) if rng.random() < 0.5 else tuple(range(w.W - half, w.W))
        return tuple(sorted(int(r) for r in rng.choice(w.W, half, replace=False)))
    if how == "all":
        return tuple(range(w.W))
    raise ValueError(how)


def since_step(w: World, lo: float = 0.1, hi: float = 0.8, rest: int = 35) -> int:
    a, b = max(25, int(lo * w.K)), min(int(hi * w.K), w.K - rest)
    need(b > a, "too few steps")
    return int(w.rng.integers(a, b))


def grid(w: World, ranks: tuple[int, ...], per_step: np.ndarray, one: float = 0.0) -> np.ndarray:
    out = np.full((w.K, w.W), one)
    out[:, list(ranks)] = per_step[:, None]
    return out


def span(w: World, start: int | None, end: int | None = None) -> np.ndarray:
    k = np.arange(w.K)
    return (k >= (start or 0)) & (k < (w.K if end is None else end))


def excess(rng: Rng, lo: float = 0.08, hi: float = 1.8) -> float:
    return logu(rng, lo, hi)


def node_cause(
    w: World,
    ranks: tuple[int, ...],
    since: int | None,
    f: float | None = None,
    same: bool | None = None,
    strong: float = 0.0,
) -> Cause:
    """Slow by a factor from the beginning or since a step, for good."""
    rng = w.rng
    f = 1 + (excess(rng, max(0.08, strong)) if f is None else f)
    same = rng.random() < 0.5 if same is None else same
    factors = (
        np.full(len(ranks), f)
        if same
        else 1 + np.maximum(0.085, (f - 1) * rng.uniform(0.7, 1.2, len(ranks)))
    )
    fac = np.ones((w.K, w.W))
    on = span(w, since)
    for r, x in zip(ranks, factors, strict=True):
        fac[on, r] = x
    need(float((factors.min() - 1) / w.sd * np.sqrt(on.sum())) > 12, "too weak to see")
    if since is not None:
        # an onset that can be placed at all
        need((factors.mean() - 1) / w.sd > 0.8, "onset drowns")
    c = Cause(
        "node",
        ranks,
        since,
        None if since is None else float((factors.mean() - 1) / w.sd),
        factor=fac,
    )
    w.causes.append(c)
    return c


def growing_cause(w: World, ranks: tuple[int, ...], since: int | None = None) -> Cause:
    rng = w.rng
    s = since if since is not None else since_step(w, 0.08, 0.6, 60)
    to_end = rng.random() < 0.6
    length = w.K - s if to_end else int(rng.integers(45, max(46, w.K - s)))
    need(length >= 45, "grows too quickly")
    F = 1 + logu(rng, 0.2, 2.0)
    x = np.clip((np.arange(w.K) - s + 1) / length, 0, 1) ** rng.uniform(0.8, 1.3)
    fac = grid(w, ranks, 1 + (F - 1) * x, 1.0)
    need((F - 1) / w.sd > 4, "drowns")
    c = Cause("node", ranks, s, None, factor=fac)
    w.causes.append(c)
    return c


def stairs_cause(w: World, ranks: tuple[int, ...]) -> Cause:
    rng = w.rng
    m = int(rng.integers(2, 5))
    s = since_step(w, 0.08, 0.4, 25 * m + 10)
    cuts = np.sort(rng.choice(np.arange(s + 20, w.K - 20), m - 1, replace=False))
    need(all(np.diff(np.concatenate([[s], cuts])) >= 20))
    rises = [logu(rng, 0.08, 0.5) for _ in range(m)]
    x = np.zeros(w.K)
    for at, rise in zip([s, *cuts], rises, strict=True):
        x[at:] += rise
    need(min(rises) / w.sd > 1.5, "drowns")
    c = Cause("node", ranks, s, rises[0] / w.sd, factor=grid(w, ranks, 1 + x, 1.0))
    w.causes.append(c)
    return c


def irregular(rng: Rng, K: int, m: int, longest: int, lo: int = 5, tail: int = 22) -> list[int]:
    """Starts of m times at no regular distance, the last of which has passed well before the end."""
    need(K - tail - longest - lo > m * (longest + 4))
    for _ in range(200):
        at = np.sort(rng.choice(np.arange(lo, K - tail - longest), m, replace=False))
        gaps = np.diff(at)
        if m == 1:
            return [int(at[0])]
        if gaps.min() < longest + 4:
            continue
        if m > 2:
            if np.any(np.abs(np.diff(gaps)) <= 3):
                continue
            # no lattice either: no period explains all of the times within a step
            bad = False
            for p in range(6, int(gaps.max()) + 2):
                off = (at - at[0]) % p
                if np.minimum(off, p - off).max() <= 1.5:
                    bad = True
                    break
            if bad:
                continue
        return [int(a) for a in at]
    raise Again("no irregular times")


def regular(
    rng: Rng, K: int, lo: int = 6, hi: int | None = None, since: int = 1, width: int = 1
) -> tuple[int, list[int]]:
    hi = hi or (K - since) // 4
    need(hi > lo)
    p = int(round(logu(rng, lo, hi)))
    start = since + int(rng.integers(0, p))
    at = np.arange(start, K - width + 1, p)
    if rng.random() < 0.4 and p >= 8:  # within a step
        at = at + rng.integers(0, 2, len(at))
        at = at[at + width <= K]
    need(len(at) >= 3, "fewer than three times")
    need(at[-1] + p >= K, "the range ends within a time")
    return p, [int(a) for a in at]


def pause_sizes(w: World, m: int, share: float, even: bool) -> np.ndarray:
    """Seconds of m pauses that together take about that share of the wall time."""
    total = share / (1 - share) * w.K * w.T
    x = (
        np.ones(m) * (1 + 0.05 * w.rng.standard_normal(m))
        if even
        else np.exp(0.35 * w.rng.standard_normal(m))
    )
    return np.clip(x, 0.3, None) * total / m


def pauses_cause(
    w: World,
    kind: str,
    ranks: tuple[int, ...],
    at: list[int],
    even: bool,
    share: float | None = None,
    floor: float = 0.25,
) -> Cause:
    """Pauses of a single step."""
    rng = w.rng
    share = rng.uniform(0.04, 0.4) if share is None else share
    p = pause_sizes(w, len(at), share, even)
    need(p.min() / w.T > max(floor, 7 * w.sd), "pauses drown")
    pause = np.zeros((w.K, w.W))
    for a, x in zip(at, p, strict=True):
        pause[a, list(ranks)] = x * (1 + 0.03 * rng.standard_normal(len(ranks)))
        need(bool(w.active[a, list(ranks)].all()), "a pause of a rank that takes no part")
    c = Cause(
        kind, ranks, at[0], float(p[0] / w.T / w.sd), pause=pause, events=[(a, a + 1) for a in at]
    )
    w.causes.append(c)
    return c


def spells_cause(w: World, kind: str, ranks: tuple[int, ...], spells: list[tuple[int, int]], f: float | None = None,
                 since_null: bool = False) -> Cause:  # fmt: skip
    """Slower by a factor during spells of steps [a, b)."""
    rng = w.rng
    base = logu(rng, 0.15, 2.5) if f is None else f
    fac = np.ones((w.K, w.W))
    amount = []
    for a, b in spells:
        x = (
            base * rng.uniform(0.85, 1.15)
            if kind == "transient"
            else base * rng.uniform(0.96, 1.04)
        )
        fac[a:b, list(ranks)] = 1 + x
        amount.append(x)
        need(x / w.sd * np.sqrt(b - a) > 8 and x / w.sd > 2, "spells drown")
    sig = None if since_null else float(amount[0] / w.sd)
    c = Cause(kind, ranks, None if since_null else spells[0][0], sig, factor=fac, events=spells)
    w.causes.append(c)
    return c


def noisy_spells(w: World, m: int, share_of_steps: float) -> list[tuple[int, int]]:
    rng = w.rng
    length = max(3, int(share_of_steps * w.K / m))
    at = irregular(rng, w.K, m, length + 2)
    return [(a, a + int(rng.integers(max(2, int(0.6 * length)), length + 1))) for a in at]


def wait_cause(
    w: World,
    ranks: tuple[int, ...],
    on: np.ndarray,
    mean: float,
    since: int | None,
    *,
    rel: float | None = None,
    common: bool = False,
) -> Cause:
    """Ranks wait for their loader in the steps of `on`, about `mean` batches' time."""
    rng = w.rng
    rel = rng.uniform(0.03, 0.35) if rel is None else rel
    shp = (w.K, 1) if common else (w.K, w.W)
    x = mean * w.T * rng.gamma(1 / rel**2, rel**2, shp) * np.ones((w.K, w.W))
    wait = np.zeros((w.K, w.W))
    idx = np.ix_(on, list(ranks))
    wait[idx] = x[idx]
    # one step's noise: the root mean square of that before the onset and that after it
    sd = max(w.wait_sd, 1e-4 * w.T)
    c = Cause(
        "input",
        ranks,
        since,
        None if since is None else float(mean * w.T / np.hypot(sd, rel * mean * w.T) * np.sqrt(2)),
        wait=wait,
    )
    w.causes.append(c)
    return c


def reduce_cause(
    w: World, on: np.ndarray, mean: float, since: int | None, rel: float | None = None
) -> Cause:
    rng = w.rng
    rel = rng.uniform(0.03, 0.3) if rel is None else rel
    x = mean * w.T * rng.gamma(1 / rel**2, rel**2, w.K) * on
    need(mean * w.T > 4 * w.reduce_sd, "drowns")
    c = Cause(
        "network",
        (),
        since,
        None
        if since is None
        else float(mean * w.T / np.hypot(w.reduce_sd, rel * mean * w.T) * np.sqrt(2)),
        reduce=x,
    )
    w.causes.append(c)
    return c


def long_reduce(w: World, share: float) -> Cause:
    """In all steps: a reduction of at least 25 % of the wall time; the reduction is set, not added."""
    rng = w.rng
    slow = w.T * (1 + 1.5 * w.sd)
    m = share / (1 - share) * slow
    rel = rng.uniform(0.02, 0.2)
    w.reduce0 = np.clip(m * (1 + rel * rng.standard_normal(w.K)), 0.3 * m, None)
    w.reduce_sd = m * rel
    c = Cause("network", (), None, None, zero="reduce", min_share=0.28)
    w.causes.append(c)
    return c


def long_between(w: World, share: float) -> Cause:
    rng = w.rng
    m = share / (1 - share) * w.T * (1 + 1.5 * w.sd + w.reduce0.mean() / w.T)
    rel = rng.uniform(0.02, 0.25)
    w.between0 = np.clip(m * (1 + rel * rng.standard_normal(w.K)), 0.3 * m, None)
    w.between_sd = m * rel
    c = Cause("between", (), None, None, zero="between", min_share=0.28)
    w.causes.append(c)
    return c


def between_cause(w: World, at: np.ndarray, share: float, spread: float) -> Cause:
    rng = w.rng
    need(len(at) >= 1 and at[0] >= 1)
    total = share / (1 - share) * w.K * w.T
    x = np.exp(spread * rng.standard_normal(len(at))) * total / len(at)
    need(x.min() > max(0.15 * w.T, 6 * w.between_sd), "drowns")
    bet = np.zeros(w.K)
    bet[at] = x
    c = Cause("between", (), int(at[0]), float(x[0] / max(w.between_sd, 1e-4 * w.T)), between=bet)
    w.causes.append(c)
    return c


def planning_cause(w: World, share: float, since: int | None) -> Cause:
    rng = w.rng
    at = np.flatnonzero(w.first)
    if since is not None:
        at = at[at >= since]
    need(len(at) >= 3, "few segments")
    total = share / (1 - share) * w.K * w.T
    spread = rng.uniform(0.02, 0.3)
    x = np.exp(spread * rng.standard_normal(len(at))) * total / len(at)
    need(x.min() > 0.15 * w.T)
    wait = np.zeros((w.K, w.W))
    tiny = 0.01 * rng.uniform(0, 1, (len(at), w.W))
    wait[at] = x[:, None] * (1 + tiny)
    sd = max(w.wait_sd, 1e-4 * w.T)
    c = Cause("planning", (), since, None if since is None else float(x[0] / sd), wait=wait)
    w.causes.append(c)
    return c


def data_cause(w: World, ranks: tuple[int, ...] = ()) -> Cause:
    c = Cause("data", ranks, None, None, cost_without=row_mean(w.cost, w.active))
    w.causes.append(c)
    return c


# ------------------------------------------------------------------------------------------------------------ judging a draw


def judge(w: World, healthy: bool) -> tuple[list[float], list[float], list[float]]:
    """Costs, their shares, and the shares of each alone; raises Again where a case would not be fair."""
    everyone = frozenset(range(len(w.causes)))
    full, base = w.wall(), w.wall(everyone)
    costs, shares, alone = [], [], []
    for i, c in enumerate(w.causes):
        cost = full - w.wall(frozenset({i}))
        only = w.wall(everyone - {i})
        costs.append(cost)
        shares.append(cost / full)
        alone.append((only - base) / only)
        need(
            c.min_share <= min(shares[-1], alone[-1]) and max(shares[-1], alone[-1]) <= 0.6,
            f"{c.kind} {shares[-1]:.3f} {alone[-1]:.3f}",
        )
    for c in w.causes:
        if c.since is not None and c.ranks:
            need(bool(w.active[c.since, list(c.ranks)].all()), "sits out the first step of it")
    kinds = {c.kind for c in w.causes}
    zeros = {c.zero for c in w.causes}
    ref = min(full, base) if not zeros - {""} else full
    lim = 0.20 if healthy else 0.15
    if "reduce" not in zeros:
        need(
            w.reduce0.sum() / ref < (lim if "network" not in kinds else 0.13),
            "usual reduction is long",
        )
    if "between" not in zeros:
        need(
            w.between0.sum() / ref < (lim if "between" not in kinds else 0.10),
            "usual time between is long",
        )
    if "data" not in zeros:
        usual = np.where(w.active, w.wait0, 0).sum() / w.active.sum() * w.K
        need(usual / ref < (0.035 if healthy else 0.025), "usual loader is slow")
    if "data" not in kinds and not w.planned:
        need((full - w.wall(mean_cost=True)) / full < 0.0045, "sizes cost something")
        need((base - w.wall(everyone, mean_cost=True)) / base < 0.0045, "sizes cost something")
    if w.pause0 is not None:
        keep, w.pause0 = w.pause0, None
        less = w.wall()
        w.pause0 = keep
        need((full - less) / full < 0.004, "not so small")
    return costs, shares, alone


def to_case(w: World, name: str, seed: int, costs: list[float]) -> Case:
    data, comp, sync, bet, _, _ = w.times()
    truths = tuple(
        Truth(c.kind, tuple(sorted(int(r) for r in c.ranks)), None if c.since is None else int(c.since), float(cost),
              None if c.sigmas is None else min(1000.0, float(c.sigmas)))
        for c, cost in sorted(zip(w.causes, costs, strict=True), key=lambda x: -x[1])
    )  # fmt: skip
    return Case(
        name,
        seed,
        w.samples,
        w.load,
        w.squares,
        w.longest,
        data,
        comp,
        sync,
        bet.copy(),
        w.first,
        w.nodes,
        truths,
    )


class Maker:
    def __init__(self, name: str, build: Callable[[Rng], World], healthy: bool) -> None:
        self.name, self.build, self.healthy = name, build, healthy
        self.why: dict[str, int] = {}

    def detail(self, rng: Rng, seed: int) -> tuple[Case, World, list[float], list[float]]:
        for _ in range(400):
            try:
                w = self.build(rng)
                costs, shares, alone = judge(w, self.healthy)
            except Again as e:
                self.why[str(e)] = self.why.get(str(e), 0) + 1
                continue
            return to_case(w, self.name, seed, costs), w, shares, alone
        raise RuntimeError(f"{self.name}: no fair draw in 400: {self.why}")

    def __call__(self, rng: Rng, seed: int) -> Case:
        return self.detail(rng, seed)[0]


KINDS: dict[str, Callable[[Rng, int], Case]] = {}
HEALTHY: dict[str, Callable[[Rng, int], Case]] = {}


def kind(name: str):
    def put(f: Callable[[Rng], World]):
        assert name not in KINDS
        KINDS[name] = Maker(name, f, False)
        return f

    return put


def healthy(name: str):
    def put(f: Callable[[Rng], World]):
        assert name not in HEALTHY
        HEALTHY[name] = Maker(name, f, True)
        return f

    return put


# ------------------------------------------------------------------------------------------------------------------ node


@kind("slow rank from the beginning")
def _(rng):
    w = make_world(rng)
    node_cause(w, pick(w, "one"), None)
    return w


@kind("some old cards among new ones")
def _(rng):
    w = make_world(rng, W=(10, 64))
    node_cause(w, pick(w, "few"), None, same=False)
    return w


@kind("thermal throttling at once")
def _(rng):
    w = make_world(rng)
    node_cause(w, pick(w, "one or few"), since_step(w))
    return w


@kind("thermal throttling that grows")
def _(rng):
    w = make_world(rng, K=(150, 600))
    growing_cause(w, pick(w, "one"))
    return w


@kind("throttling in stairs")
def _(rng):
    w = make_world(rng, K=(180, 600), sd=(0.005, 0.05))
    stairs_cause(w, pick(w, "one"))
    return w


@kind("slow node from the beginning")
def _(rng):
    w = make_world(rng, W=(6, 64), gpn=(2, 4, 8), nodes_min=3)
    node_cause(w, pick(w, "node"), None)
    return w


@kind("slow node since a step")
def _(rng):
    w = make_world(rng, W=(6, 64), gpn=(2, 4, 8), nodes_min=3)
    node_cause(w, pick(w, "node"), since_step(w))
    return w


@kind("half of all ranks slow from the beginning")
def _(rng):
    w = make_world(rng, gpn=(2, 4, 8), nodes_min=2)
    node_cause(w, pick(w, "half"), None, f=excess(rng, 0.12, 1.3))
    return w


@kind("half of all ranks slow since a step")
def _(rng):
    w = make_world(rng, gpn=(2, 4, 8), nodes_min=2)
    node_cause(w, pick(w, "half"), since_step(w), f=excess(rng, 0.1, 1.3))
    return w


@kind("all ranks slower since a step")
def _(rng):
    w = make_world(rng)
    node_cause(
        w,
        pick(w, "all"),
        since_step(w, 0.15, 0.75),
        f=excess(rng, 0.09, 1.2),
        same=rng.random() < 0.7,
    )
    return w


@kind("slow rank while the steps' sizes vary a lot")
def _(rng):
    w = make_world(rng, vary=float(rng.uniform(0.25, 0.6)))
    node_cause(w, pick(w, "one or few"), None if rng.random() < 0.5 else since_step(w))
    return w


@kind("slow rank among hundreds")
def _(rng):
    w = make_world(rng, W=(128, 1024), K=(100, 300), gpn=(4, 8), n=(2, 16), sd=(0.005, 0.05))
    node_cause(
        w, pick(w, "one"), None if rng.random() < 0.4 else since_step(w, 0.1, 0.6), strong=0.15
    )
    return w


@kind("slow node among hundreds of ranks")
def _(rng):
    w = make_world(rng, W=(128, 1024), K=(100, 300), gpn=(4, 8), n=(2, 16), sd=(0.005, 0.05))
    node_cause(
        w, pick(w, "node"), None if rng.random() < 0.4 else since_step(w, 0.1, 0.6), strong=0.12
    )
    return w


@kind("half of hundreds of ranks slow since a step")
def _(rng):
    w = make_world(rng, W=(128, 1024), K=(100, 300), gpn=(4, 8), n=(2, 16), sd=(0.005, 0.05))
    half = w.W // 2
    node_cause(
        w,
        tuple(range(half, 2 * half)),
        since_step(w, 0.1, 0.6),
        f=excess(rng, 0.12, 1.0),
        same=True,
    )
    return w


def compensated(rng: Rng, how: tuple[float, float], late: bool) -> World:
    """A plan gives slow ranks less to do: `how` of the way to equal times; late: only some steps after the onset."""
    w = make_world(
        rng, W=(4, 20), sizes="constant", vary=0.0, bfrac=(0.0, 0.25), sd=(0.005, 0.04), idle=False
    )
    ranks = pick(w, "one" if rng.random() < 0.5 or w.W < 8 else "few")
    f = 1 + logu(rng, 0.25, 2.5)
    since = since_step(w, 0.1, 0.5, 50) if late else None
    starts = 0
    if late:
        starts = since + int(rng.integers(10, 40))
        need(starts < w.K - 25)
    share = rng.uniform(*how)
    b, a = w.coef["b"], 1 - w.coef["b"]
    m, W, K = len(ranks), w.W, w.K
    need(m <= W // 2)
    vary = rng.uniform(0.03, 0.2) if rng.random() < 0.5 else 0.0
    n0 = w.samples[0, 0]
    n0 *= float(rng.integers(1, 4)) * max(
        1.0, np.ceil(100 / n0)
    )  # enough samples for a plan to be fine
    mean = np.maximum(30, np.round(n0 * np.exp(vary * rng.standard_normal(K))))  # samples a rank
    g = mean / n0
    # equal times: f (a x + b) = a y + b, where m x + (W - m) y = W g; then only so much of the way there
    x = (a * W * g / (W - m) + b - f * b) / (f * a + a * m / (W - m))
    need(float(x.min()) > 0.12)
    x = g + (x - g) * share
    y = (W * g - m * x) / (W - m)
    want = np.repeat((y * n0)[:, None], W, axis=1)
    want[:, list(ranks)] = (x * n0)[:, None]
    want[:starts] = mean[:starts, None]
    counts = np.floor(want)
    order = np.argsort(-(want - counts) - 1e-3 * rng.random((K, W)), axis=1)
    rest = np.round(mean * W - counts.sum(axis=1)).astype(int)
    for k in range(K):
        counts[k, order[k, : rest[k]]] += 1
    unit = w.longest[0, 0]
    if rng.random() < 0.5:  # sizes that differ, and a plan by load
        cv2 = rng.uniform(0.05, 0.8)
        load = want * unit * (1 + 0.001 * rng.standard_normal((K, W)))
        mid = load / counts
        squares = counts * mid**2 * (1 + cv2 * rng.uniform(0.8, 1.2, (K, W)))
        longest = mid * (2 + rng.gamma(4, 0.2, (K, W)))
        w.samples, w.load, w.squares, w.longest = (
            counts,
            load,
            squares,
            np.minimum(longest, 0.98 * np.sqrt(squares)),
        )
    else:
        w.samples, w.load, w.squares = counts, counts * unit, counts * unit**2
    w.cost = w.T * (b + a * w.load / (n0 * unit))
    before = w.T * (b + a * np.repeat(w.load.mean(axis=1, keepdims=True), W, axis=1) / (n0 * unit))
    w.planned = True
    if late:
        # the plan sets in with a segment
        w.first[:] = False
        w.first[0] = True
        w.first[starts :: int(rng.integers(15, 80))] = True
    c = node_cause(w, ranks, since, f=f - 1, same=True)
    c.cost_without = before
    return w


@kind("plan makes up for slow ranks")
def _(rng):
    return compensated(rng, (0.97, 1.0), False)


@kind("plan makes up for slow ranks half-way")
def _(rng):
    return compensated(rng, (0.35, 0.7), False)


@kind("plan makes up for slow ranks some steps late")
def _(rng):
    return compensated(rng, (0.8, 1.0), True)


# ------------------------------------------------------------------------------------------------------------- transient


@kind("rank was slow and recovered")
def _(rng):
    w = make_world(rng, K=(120, 600))
    a = since_step(w, 0.1, 0.5, 60)
    b = int(rng.integers(a + 20, w.K - 25))
    spells_cause(w, "transient", pick(w, "one or few"), [(a, b)])
    return w


@kind("slow at the beginning, then recovered")
def _(rng):
    w = make_world(rng, K=(120, 600))
    b = int(rng.integers(15, int(0.6 * w.K)))
    spells_cause(w, "transient", pick(w, "one or few"), [(0, b)], since_null=True)
    return w


@kind("noisy neighbour on one rank")
def _(rng):
    w = make_world(rng, K=(150, 600))
    spells_cause(
        w,
        "transient",
        pick(w, "one"),
        noisy_spells(w, int(rng.integers(3, 7)), rng.uniform(0.1, 0.4)),
    )
    return w


@kind("noisy neighbour on a node")
def _(rng):
    w = make_world(rng, W=(6, 64), gpn=(2, 4, 8), nodes_min=3, K=(150, 600))
    spells_cause(
        w,
        "transient",
        pick(w, "node"),
        noisy_spells(w, int(rng.integers(2, 6)), rng.uniform(0.1, 0.4)),
    )
    return w


@kind("rare long pauses of a rank")
def _(rng):
    w = make_world(rng, K=(150, 600))
    at = irregular(rng, w.K, int(rng.integers(3, 10)), 2)
    pauses_cause(w, "transient", pick(w, "one"), at, even=False, floor=1.0)
    return w


@kind("one very long pause")
def _(rng):
    w = make_world(rng)
    at = [int(rng.integers(5, w.K - 25))]
    pauses_cause(
        w,
        "transient",
        pick(w, "one" if rng.random() < 0.7 or w.gpn == 1 else "node"),
        at,
        even=True,
    )
    return w


@kind("slowness that has just begun")
def _(rng):
    w = make_world(rng, K=(100, 250))
    a = w.K - int(rng.integers(6, 18))
    spells_cause(w, "transient", pick(w, "one or few"), [(a, w.K)], f=logu(rng, 0.5, 4))
    return w


@kind("all ranks slower for a while")
def _(rng):
    w = make_world(rng, K=(120, 600))
    a = since_step(w, 0.1, 0.5, 60)
    b = int(rng.integers(a + 10, min(w.K - 25, a + w.K // 2)))
    spells_cause(w, "transient", pick(w, "all"), [(a, b)], f=logu(rng, 0.15, 1.5))
    return w


@kind("pauses of one rank among hundreds")
def _(rng):
    w = make_world(rng, W=(128, 1024), K=(100, 250), gpn=(4, 8), n=(2, 12), sd=(0.005, 0.06))
    at = irregular(rng, w.K, int(rng.integers(3, 7)), 2)
    pauses_cause(w, "transient", pick(w, "one"), at, even=False, floor=0.8)
    return w


# -------------------------------------------------------------------------------------------------------------- periodic


@kind("garbage collection of a rank at a strict period")
def _(rng):
    w = make_world(rng)
    _, at = regular(rng, w.K)
    pauses_cause(w, "periodic", pick(w, "one"), at, even=True)
    return w


@kind("garbage collection of all ranks at once")
def _(rng):
    w = make_world(rng)
    _, at = regular(rng, w.K)
    pauses_cause(w, "periodic", pick(w, "all"), at, even=True)
    return w


@kind("cron job on a node")
def _(rng):
    w = make_world(rng, W=(6, 64), gpn=(2, 4, 8), nodes_min=3, K=(150, 600))
    d = int(rng.integers(2, 9))
    p, at = regular(rng, w.K, 4 * d + 4, width=d)
    spells_cause(w, "periodic", pick(w, "node"), [(a, a + d) for a in at])
    return w


@kind("cron job of one rank's host since a step")
def _(rng):
    w = make_world(rng, K=(200, 600))
    s = since_step(w, 0.15, 0.4, 100)
    d = int(rng.integers(1, 6))
    p, at = regular(rng, w.K, 4 * d + 5, since=s, width=d)
    spells_cause(w, "periodic", pick(w, "one"), [(a, a + d) for a in at], f=logu(rng, 0.3, 4))
    return w


@kind("rank that is slow a third of each period")
def _(rng):
    w = make_world(rng, K=(200, 600))
    p = int(rng.integers(24, w.K // 5))
    d = max(4, int(p * rng.uniform(0.2, 0.4)))
    at = np.arange(int(rng.integers(2, p)), w.K - d, p)
    need(len(at) >= 3 and at[-1] + p >= w.K)
    spells_cause(w, "periodic", pick(w, "one or few"), [(int(a), int(a) + d) for a in at])
    return w


@kind("garbage collection of one rank among hundreds")
def _(rng):
    w = make_world(rng, W=(128, 1024), K=(100, 250), gpn=(4, 8), n=(2, 12), sd=(0.005, 0.06))
    _, at = regular(rng, w.K)
    pauses_cause(w, "periodic", pick(w, "one"), at, even=True, floor=0.4)
    return w


# ----------------------------------------------------------------------------------------------------------------- input


@kind("slow disk of one rank")
def _(rng):
    w = make_world(rng)
    wait_cause(w, pick(w, "one or few"), span(w, None), logu(rng, 0.08, 1.2), None)
    return w


@kind("slow disk of a node since a step")
def _(rng):
    w = make_world(rng, W=(6, 64), gpn=(2, 4, 8), nodes_min=3)
    s = since_step(w)
    wait_cause(w, pick(w, "node"), span(w, s), logu(rng, 0.1, 1.4), s)
    return w


@kind("NFS hiccup of one node's loaders")
def _(rng):
    w = make_world(rng, W=(6, 64), gpn=(2, 4, 8), nodes_min=3)
    a = since_step(w, 0.08, 0.7, 50)
    b = a + int(rng.integers(4, max(5, min(w.K - a - 25, w.K // 3))))
    wait_cause(w, pick(w, "node"), span(w, a, b), logu(rng, 0.3, 6), a)
    return w


@kind("loaders of all ranks too slow in all steps")
def _(rng):
    w = make_world(rng)
    share = rng.uniform(0.08, 0.5)
    m = share / (1 - share) * w.T
    rel = rng.uniform(0.02, 0.25)
    w.wait0 = m * rng.gamma(1 / rel**2, rel**2, (w.K, w.W))
    w.wait_sd = m * rel
    w.causes.append(Cause("input", pick(w, "all"), None, None, zero="data", min_share=0.07))
    return w


@kind("storage slower for all ranks since a step")
def _(rng):
    w = make_world(rng)
    s = since_step(w, 0.1, 0.75)
    wait_cause(w, pick(w, "all"), span(w, s), logu(rng, 0.1, 1.2), s).min_share = 0.06
    return w


@kind("storage hangs for all ranks in some steps")
def _(rng):
    w = make_world(rng, K=(150, 600))
    at = irregular(rng, w.K, int(rng.integers(3, 10)), 2)
    on = np.zeros(w.K, bool)
    on[at] = True
    share = rng.uniform(0.05, 0.35)
    wait_cause(w, pick(w, "all"), on, share / (1 - share) * w.K / len(at), at[0], common=True)
    return w


@kind("loaders of the ranks hang in turn")
def _(rng):
    w = make_world(rng, W=(4, 20), K=(200, 600), idle=False)
    m = w.W * int(rng.integers(2, max(3, int(0.4 * w.K / w.W) + 1)))
    need(m <= 0.45 * w.K)
    at = np.sort(rng.choice(np.arange(2, w.K), m, replace=False))
    who = np.concatenate([rng.permutation(w.W) for _ in range(m // w.W)])
    share = rng.uniform(0.06, 0.4)
    mean = share / (1 - share) * w.K / m * w.T
    need(mean > max(0.25, 5 * w.sd) * w.T)
    wait = np.zeros((w.K, w.W))
    sizes = mean * np.clip(np.exp(0.3 * rng.standard_normal(m)), 0.4, 3)
    wait[at, who] = sizes
    w.causes.append(
        Cause("input", (), int(at[0]), float(sizes[0] / max(w.wait_sd, 1e-4 * w.T)), wait=wait)
    )
    return w


@kind("one rank opens a new shard file every n steps")
def _(rng):
    w = make_world(rng, idle=False)
    _, at = regular(rng, w.K)
    on = np.zeros(w.K, bool)
    on[at] = True
    share = rng.uniform(0.05, 0.35)
    mean = share / (1 - share) * w.K / len(at)
    need(mean > 0.3)
    wait_cause(w, pick(w, "one"), on, mean, at[0])
    return w


# ------------------------------------------------------------------------------------------------------------------ data


@kind("long-tailed sizes")
def _(rng):
    w = make_world(rng, sizes="long tail", balance=None, n=(4, 64), bfrac=(0.0, 0.35))
    data_cause(w)
    return w


@kind("uneven sizes, gamma or uniform")
def _(rng):
    w = make_world(
        rng, sizes=str(rng.choice(["gamma", "uniform"])), balance=None, n=(3, 40), bfrac=(0.0, 0.35)
    )
    data_cause(w)
    return w


@kind("padded batches")
def _(rng):
    w = make_world(rng, sizes=str(rng.choice(["lognormal", "gamma", "long tail"])), balance=str(rng.choice(["load", "none"])), model="padded",
                   n=(4, 64), bfrac=(0.0, 0.35))  # fmt: skip
    data_cause(w)
    return w


@kind("quadratic batches balanced by load")
def _(rng):
    w = make_world(rng, sizes=str(rng.choice(["lognormal", "gamma", "long tail"])), balance="load", model="squares", n=(4, 64),
                   bfrac=(0.0, 0.3))  # fmt: skip
    data_cause(w)
    return w


def varied_counts(rng: Rng, K: int, W: int, n: int) -> np.ndarray:
    s = rng.uniform(0.05, 0.35)
    return np.maximum(1, np.round(n * np.exp(s * rng.standard_normal((K, W)))))


@kind("counts that differ from batch to batch")
def _(rng):
    w = make_world(
        rng,
        counts=varied_counts,
        balance=None,
        bfrac=(0.0, 0.35),
        model=str(rng.choice(["load", "count"])),
    )
    data_cause(w)
    return w


@kind("shard of one rank has longer samples")
def _(rng):
    who: list[int] = []

    def longer(rng: Rng, K: int, W: int) -> np.ndarray:
        x = np.ones((K, W))
        m = 1 if rng.random() < 0.7 or W < 8 else 2
        who[:] = sorted(int(r) for r in rng.choice(W, m, replace=False))
        x[:, who] = (1 + logu(rng, 0.12, 1.2)) * (
            1 + rng.uniform(0.0, 0.06) * rng.standard_normal((K, m))
        )
        return x

    w = make_world(rng, reweight=longer, bfrac=(0.0, 0.3), n=(8, 96), idle=False)
    c = data_cause(w, tuple(who))
    others = [r for r in range(w.W) if r not in who]
    gap = w.cost[:, who].min(axis=1) / w.cost[:, others].max(axis=1)
    need(float((gap > 1.02).mean()) > 0.97, "not throughout")
    assert c.ranks
    return w


@kind("some ranks get more samples throughout")
def _(rng):
    who: list[int] = []

    def more(rng: Rng, K: int, W: int, n: int) -> np.ndarray:
        n = max(n, 24)
        m = 1 if rng.random() < 0.5 else int(rng.integers(1, max(2, W // 4)))
        who[:] = sorted(int(r) for r in rng.choice(W, m, replace=False))
        x = np.full((K, W), n)
        x[:, who] = int(np.ceil(n * (1 + logu(rng, 0.12, 1.2))))
        return x

    w = make_world(
        rng,
        counts=more,
        balance=None,
        bfrac=(0.0, 0.3),
        model=str(rng.choice(["load", "count"])),
        idle=False,
    )
    data_cause(w, tuple(who))
    return w


# --------------------------------------------------------------------------------------------------------------- network


@kind("congested switch for a while")
def _(rng):
    w = make_world(rng, K=(120, 600))
    a = since_step(w, 0.08, 0.6, 60)
    b = a + int(rng.integers(10, max(11, min(w.K - a - 25, w.K // 2))))
    reduce_cause(w, span(w, a, b), logu(rng, 0.15, 3), a)
    return w


@kind("slower network since a step")
def _(rng):
    w = make_world(rng)
    s = since_step(w)
    reduce_cause(w, span(w, s), logu(rng, 0.06, 1.5), s)
    return w


@kind("flapping link")
def _(rng):
    w = make_world(rng)
    on = rng.random(w.K) < rng.uniform(0.03, 0.15)
    on[:2] = False
    need(on.sum() >= 4)
    share = rng.uniform(0.04, 0.4)
    mean = share / (1 - share) * w.K / on.sum()
    need(mean > 0.3)
    reduce_cause(w, on, mean, int(np.flatnonzero(on)[0]))
    return w


@kind("long reduction in all steps")
def _(rng):
    w = make_world(rng, between=(0.0, 0.03))
    long_reduce(w, rng.uniform(0.3, 0.58))
    return w


@kind("slower network since a step, hundreds of ranks")
def _(rng):
    w = make_world(rng, W=(128, 1024), K=(100, 250), gpn=(4, 8), n=(2, 12))
    s = since_step(w, 0.1, 0.6)
    reduce_cause(w, span(w, s), logu(rng, 0.1, 1.5), s)
    return w


# --------------------------------------------------------------------------------------------------------------- between


def every(rng: Rng, K: int, lo: int = 8, hi: int | None = None) -> np.ndarray:
    n = int(round(logu(rng, lo, hi or K // 3)))
    at = np.arange(int(rng.integers(1, n)), K, n)
    need(len(at) >= 2)
    return at


@kind("checkpoint every n steps")
def _(rng):
    w = make_world(rng)
    between_cause(w, every(rng, w.K), rng.uniform(0.04, 0.5), rng.uniform(0.01, 0.15))
    return w


@kind("a few long evaluations")
def _(rng):
    w = make_world(rng)
    m = int(rng.integers(1, 4))
    at = np.sort(rng.choice(np.arange(10, w.K), m, replace=False))
    between_cause(w, at, rng.uniform(0.05, 0.55), rng.uniform(0.02, 0.2))
    return w


@kind("script does much between all steps")
def _(rng):
    w = make_world(rng)
    long_between(w, rng.uniform(0.3, 0.57))
    return w


@kind("uploads between the steps now and then")
def _(rng):
    w = make_world(rng, K=(150, 600))
    at = np.array(irregular(rng, w.K, int(rng.integers(4, 11)), 1, tail=5))
    between_cause(w, at, rng.uniform(0.04, 0.4), rng.uniform(0.1, 0.5))
    return w


# -------------------------------------------------------------------------------------------------------------- planning


@kind("planning that is slow")
def _(rng):
    w = make_world(rng, segment=int(round(logu(rng, 6, 45))), mid=False, idle=False)
    planning_cause(w, rng.uniform(0.04, 0.5), None)
    return w


@kind("planning that becomes slow")
def _(rng):
    w = make_world(rng, K=(150, 600), segment=int(round(logu(rng, 6, 25))), mid=False, idle=False)
    at = np.flatnonzero(w.first)
    need(len(at) >= 8)
    s = int(at[int(rng.integers(3, len(at) - 3))])
    planning_cause(w, rng.uniform(0.04, 0.4), s)
    return w


@kind("planning that is slow, hundreds of ranks")
def _(rng):
    w = make_world(
        rng,
        W=(128, 1024),
        K=(100, 250),
        gpn=(4, 8),
        n=(2, 12),
        segment=int(round(logu(rng, 6, 25))),
        mid=False,
        idle=False,
    )
    planning_cause(w, rng.uniform(0.04, 0.4), None)
    return w


# ------------------------------------------------------------------------------------------------------------- two causes


@kind("two: rank slow since a step, and checkpoints")
def _(rng):
    w = make_world(rng)
    node_cause(w, pick(w, "one"), since_step(w))
    between_cause(w, every(rng, w.K), rng.uniform(0.06, 0.35), 0.08)
    return w


@kind("two: throttling that grows, and pauses of another rank")
def _(rng):
    w = make_world(rng, K=(180, 600))
    a = pick(w, "one")
    growing_cause(w, a)
    at = irregular(rng, w.K, int(rng.integers(3, 8)), 2)
    pauses_cause(
        w, "transient", pick(w, "one", a), at, even=False, share=rng.uniform(0.08, 0.35), floor=2.0
    )
    return w


@kind("two: one rank slow since a step, another slower since a later one")
def _(rng):
    w = make_world(rng, K=(180, 600), sd=(0.005, 0.05))
    s1 = since_step(w, 0.1, 0.4, 110)
    s2 = int(rng.integers(s1 + 35, w.K - 40))
    f1 = excess(rng, 0.12, 0.9)
    f2 = (1 + f1) * (1 + logu(rng, 0.15, 0.9)) - 1
    a = pick(w, "one")
    node_cause(w, a, s1, f=f1, same=True)
    node_cause(w, pick(w, "one", a), s2, f=f2, same=True)
    return w


@kind("two: congestion for a while, and garbage collection of a rank")
def _(rng):
    w = make_world(rng, K=(150, 600))
    a = since_step(w, 0.1, 0.5, 60)
    b = a + int(rng.integers(15, max(16, min(w.K - a - 25, w.K // 2))))
    reduce_cause(w, span(w, a, b), logu(rng, 0.2, 2.5), a)
    _, at = regular(rng, w.K)
    pauses_cause(w, "periodic", pick(w, "one"), at, even=True, share=rng.uniform(0.06, 0.3))
    return w


@kind("two: long-tailed sizes, and a slow rank")
def _(rng):
    w = make_world(
        rng,
        sizes="long tail",
        balance=None,
        n=(16, 64),
        bfrac=(0.0, 0.3),
        W=(4, 32),
        sd=(0.005, 0.05),
    )
    data_cause(w)
    node_cause(w, pick(w, "one"), None if rng.random() < 0.5 else since_step(w), strong=0.25)
    return w


@kind("two: padded batches, and a loader hiccup of a node")
def _(rng):
    w = make_world(
        rng,
        W=(6, 48),
        gpn=(2, 4, 8),
        nodes_min=3,
        sizes="lognormal",
        balance="load",
        model="padded",
        n=(8, 48),
        bfrac=(0.0, 0.3),
    )
    data_cause(w)
    a = since_step(w, 0.1, 0.6, 60)
    b = a + int(rng.integers(6, max(7, min(w.K - a - 25, w.K // 3))))
    wait_cause(w, pick(w, "node"), span(w, a, b), logu(rng, 0.6, 6), a)
    return w


@kind("two: slow disk of a rank, and a slower network since a step")
def _(rng):
    w = make_world(rng)
    wait_cause(w, pick(w, "one"), span(w, None), logu(rng, 0.12, 0.9), None)
    s = since_step(w)
    reduce_cause(w, span(w, s), logu(rng, 0.1, 1.0), s)
    return w


@kind("two: slow planning, and a slow node")
def _(rng):
    w = make_world(
        rng,
        W=(6, 64),
        gpn=(2, 4, 8),
        nodes_min=3,
        segment=int(round(logu(rng, 6, 40))),
        mid=False,
        idle=False,
    )
    planning_cause(w, rng.uniform(0.06, 0.35), None)
    node_cause(w, pick(w, "node"), None if rng.random() < 0.5 else since_step(w))
    return w


@kind("two: script between all steps, and a rank that was slow")
def _(rng):
    w = make_world(rng, K=(150, 600))
    long_between(w, rng.uniform(0.36, 0.5))
    a = since_step(w, 0.1, 0.5, 60)
    b = int(rng.integers(a + 20, w.K - 25))
    spells_cause(w, "transient", pick(w, "one"), [(a, b)])
    return w


@kind("two: two ranks pause at different strict periods")
def _(rng):
    w = make_world(rng, K=(150, 600))
    p1, at1 = regular(rng, w.K, 6, 30)
    p2, at2 = regular(rng, w.K, 9, w.K // 5)
    need(min(p1, p2) * 1.35 < max(p1, p2))
    need(
        min(abs(max(p1, p2) / min(p1, p2) - q) for q in range(1, 60)) > 0.08,
        "one period is a multiple of the other",
    )
    a = pick(w, "one")
    pauses_cause(w, "periodic", a, at1, even=True, share=rng.uniform(0.06, 0.3), floor=0.3)
    pauses_cause(
        w, "periodic", pick(w, "one", a), at2, even=True, share=rng.uniform(0.06, 0.3), floor=0.3
    )
    return w


@kind("two: a rank with a slow card and a slow disk")
def _(rng):
    w = make_world(rng)
    r = pick(w, "one")
    node_cause(w, r, None if rng.random() < 0.5 else since_step(w))
    wait_cause(w, r, span(w, None), logu(rng, 0.1, 0.8), None)
    return w


@kind("two: long reduction in all steps, and checkpoints")
def _(rng):
    w = make_world(rng)
    long_reduce(w, rng.uniform(0.36, 0.52))
    between_cause(w, every(rng, w.K), rng.uniform(0.06, 0.25), 0.1)
    return w


@kind("two: slow rank, and a noisy neighbour on another that is worse")
def _(rng):
    w = make_world(rng, K=(150, 600), sd=(0.005, 0.06))
    a = pick(w, "one")
    f = excess(rng, 0.1, 0.5)
    node_cause(w, a, None, f=f, same=True)
    m = int(rng.integers(2, 6))
    spells_cause(
        w,
        "transient",
        pick(w, "one", a),
        noisy_spells(w, m, rng.uniform(0.1, 0.35)),
        f=f + logu(rng, 0.3, 2),
    )
    return w


@kind("two: quadratic batches, and planning that is slow")
def _(rng):
    w = make_world(rng, sizes="lognormal", balance="load", model="squares", n=(8, 64), bfrac=(0.0, 0.3), idle=False, mid=False,
                   segment=int(round(logu(rng, 6, 40))))  # fmt: skip
    data_cause(w)
    planning_cause(w, rng.uniform(0.06, 0.35), None)
    return w


@kind("two: shard with longer samples, and another rank that throttles")
def _(rng):
    who: list[int] = []

    def longer(rng: Rng, K: int, W: int) -> np.ndarray:
        x = np.ones((K, W))
        who[:] = [int(rng.integers(W))]
        x[:, who] = 1 + logu(rng, 0.15, 0.6)
        return x

    w = make_world(rng, reweight=longer, bfrac=(0.0, 0.2), n=(8, 64), idle=False, sd=(0.005, 0.05))
    data_cause(w, tuple(who))
    top = float((w.cost[:, who[0]] / np.median(w.cost, axis=1)).mean())
    node_cause(
        w,
        pick(w, "one", tuple(who)),
        since_step(w, 0.2, 0.6),
        f=top * (1 + logu(rng, 0.1, 0.8)) - 1,
        same=True,
    )
    return w


@kind("two: flapping link, and evaluations")
def _(rng):
    w = make_world(rng)
    on = rng.random(w.K) < rng.uniform(0.03, 0.12)
    on[:2] = False
    need(on.sum() >= 4)
    share = rng.uniform(0.06, 0.3)
    mean = share / (1 - share) * w.K / on.sum()
    need(mean > 0.3)
    reduce_cause(w, on, mean, int(np.flatnonzero(on)[0]))
    at = np.sort(rng.choice(np.arange(10, w.K), int(rng.integers(2, 5)), replace=False))
    between_cause(w, at, rng.uniform(0.06, 0.35), 0.15)
    return w


# ---------------------------------------------------------------------------------------------------------------- healthy


@healthy("quiet machines")
def _(rng):
    return make_world(rng, noise="normal", sd=(0.005, 0.012), vary=0.0)


@healthy("normal noise")
def _(rng):
    return make_world(rng, noise="normal")


@healthy("lognormal noise")
def _(rng):
    return make_world(rng, noise="lognormal", sd=(0.02, 0.1))


@healthy("a bit of heavy tail")
def _(rng):
    return make_world(rng, noise="heavy", sd=(0.01, 0.06))


@healthy("noise of nearly ten percent")
def _(rng):
    return make_world(rng, noise=str(rng.choice(["normal", "gamma", "lognormal"])), sd=(0.08, 0.1))


@healthy("hundreds of ranks")
def _(rng):
    return make_world(rng, W=(128, 1024), K=(100, 300), gpn=(4, 8), n=(2, 12))


@healthy("a thousand ranks")
def _(rng):
    return make_world(rng, W=(1024, 1024), K=(100, 150), gpn=(8,), n=(2, 8))


@healthy("uneven sizes balanced by cost, quadratic")
def _(rng):
    return make_world(
        rng,
        sizes=str(rng.choice(["lognormal", "gamma", "uniform"])),
        model="squares",
        balance="cost",
    )


@healthy("uneven sizes balanced by cost, padded")
def _(rng):
    return make_world(
        rng,
        sizes=str(rng.choice(["lognormal", "gamma", "uniform"])),
        model="padded",
        balance="cost",
    )


@healthy("uneven sizes that cost nothing")
def _(rng):
    return make_world(
        rng, sizes=str(rng.choice(["lognormal", "gamma", "long tail"])), model="flat", balance=None
    )


@healthy("machines that differ by less than two percent")
def _(rng):
    return make_world(rng, spread=float(rng.uniform(0.012, 0.019)), sd=(0.005, 0.04))


@healthy("one rank three percent slower for good")
def _(rng):
    w = make_world(rng, spread=float(rng.uniform(0, 0.006)))
    w.speed[int(rng.integers(w.W))] = rng.uniform(1.02, 1.035)
    return w


@healthy("constant small loader time")
def _(rng):
    return make_world(rng, loader=(0.012, 0.034))


@healthy("short reduction")
def _(rng):
    return make_world(rng, reduce=(0.08, 0.22))


@healthy("small constant time between steps")
def _(rng):
    return make_world(rng, between=(0.04, 0.2))


@healthy("steps whose size varies a lot together")
def _(rng):
    return make_world(rng, vary=float(rng.uniform(0.3, 0.8)))


@healthy("a fast rank")
def _(rng):
    w = make_world(rng, W=(6, 64))
    m = int(rng.integers(1, max(2, w.W // 6 + 1)))
    w.speed[rng.choice(w.W, m, replace=False)] *= rng.uniform(0.6, 0.92)
    return w


@healthy("few steps")
def _(rng):
    return make_world(rng, K=(20, 60))


@healthy("ranks that sit out some steps")
def _(rng):
    return make_world(rng, W=(6, 64), idle=True)


@healthy("pauses too short to matter")
def _(rng):
    w = make_world(rng, K=(200, 600))
    w.pause0 = np.zeros((w.K, w.W))
    m = int(rng.integers(1, 4))
    for k in rng.choice(w.K, m, replace=False):
        w.pause0[k, int(rng.integers(w.W))] = w.T * rng.uniform(0.1, 0.003 * w.K / m + 0.1)
    return w


@healthy("checkpoints that cost next to nothing")
def _(rng):
    w = make_world(rng, between=(0.0, 0.01))
    at = every(rng, w.K)
    w.between0[at] += rng.uniform(0.0005, 0.0035) * w.K * w.T / len(at)
    return w


# ------------------------------------------------------------------------------------------------------------------ check


def check(case: Case, w: World, shares: list[float], alone: list[float]) -> None:
    K, W = case.samples.shape
    for a in (
        case.samples,
        case.load,
        case.squares,
        case.longest,
        case.data_s,
        case.compute_s,
        case.sync_s,
    ):
        assert (
            a.shape == (K, W) and a.dtype == np.float64 and np.isfinite(a).all() and (a >= 0).all()
        )
    assert (
        case.between_s.shape == (K,)
        and np.isfinite(case.between_s).all()
        and (case.between_s >= 0).all()
    )
    assert case.first.shape == (K,) and case.first.dtype == bool and len(case.nodes) == W
    assert W <= 1024 and (W < 1024 or K <= 150)
    active = case.samples > 0
    assert active.sum(axis=1).min() >= 1
    for a in (case.load, case.squares, case.longest):
        assert (a[active] > 0).all() and (a[~active] == 0).all()
    for a in (case.data_s, case.compute_s, case.sync_s):
        assert (a[~active] == 0).all()
    # sizes that samples can have: max² ≤ Σλ² ≤ max·Σλ, Σλ ≤ n·max, (Σλ)² ≤ n·Σλ²
    e = 1 + 1e-9
    assert (case.longest**2 <= case.squares * e).all() and (
        case.squares <= case.longest * case.load * e
    ).all()
    assert (case.load <= case.samples * case.longest * e).all() and (
        case.load**2 <= case.samples * case.squares * e
    ).all()
    # all ranks of a step end together, but for the jitter; the wall time is as documented
    _, _, _, bet, slowest, red = w.times()
    end = np.where(active, case.data_s + case.compute_s + case.sync_s, np.nan)
    assert ((np.nanmax(end, axis=1) - np.nanmin(end, axis=1)) <= 0.0011 * w.T).all()
    wall = wall_of(case)
    assert abs(wall - float((slowest + red + bet).sum())) <= 0.0011 * w.T * K
    assert abs(wall - w.wall()) <= 1e-9 * wall
    for t in case.truths:
        assert (
            t.kind in CAUSES
            and t.ranks == tuple(sorted(set(t.ranks)))
            and all(0 <= r < W for r in t.ranks)
        )
        assert t.since is None or 0 < t.since < K
        assert 0.02 * wall <= t.cost_s <= 0.6 * wall
        assert t.sigmas is None or (t.sigmas > 0 and t.since is not None)
        if t.kind in ("network", "between", "planning"):
            assert not t.ranks
        if t.kind in ("node", "transient", "periodic"):
            assert t.ranks
    assert all(s >= 0.02 for s in shares) and all(s >= 0.02 for s in alone)
    for c in w.causes:
        if c.kind == "node":
            f = c.factor[:, list(c.ranks)]
            assert (
                (f[-20:] >= 1.08).all()
                and (f[c.since or 0 :] > 1).all()
                and (c.since is None or (f[: c.since] == 1).all())
            )
            assert w.K - (c.since or 0) >= 20
        if c.kind == "periodic":
            gaps = np.diff([a for a, _ in c.events])
            assert len(c.events) >= 3 and gaps.max() - gaps.min() <= 2 and c.events[0][0] == c.since
            assert w.K - c.events[-1][0] <= gaps.max() + 2, "overdue"
        if c.kind == "transient":
            assert c.events[-1][1] <= w.K - 10 or w.K - c.events[-1][0] < 20
    if not case.truths:
        assert np.where(active, case.sync_s, np.inf).min(axis=1).sum() < 0.22 * wall
        assert case.between_s.sum() < 0.22 * wall
        assert (
            case.data_s.max(axis=1).sum() < 0.12 * wall
        )  # the slowest loader of each step, all noise
        assert case.data_s.sum() / active.sum() * K < 0.04 * wall
        # by rank, machines are alike or fast: no rank 5 % above the typical one for its batches
        rel = np.where(active, case.compute_s / np.where(active, w.cost, 1), np.nan)
        by_rank = np.nanmean(rel, axis=0)
        assert by_rank.max() / np.median(by_rank) < 1.05 + 4 * w.sd / np.sqrt(K)
        cost0 = row_mean(w.cost, active)
        off = np.abs(w.cost / cost0 - 1)[active]
        assert off.max() < 0.012


def main() -> int:
    quick = "-v" in sys.argv
    start = time.time()
    two = 0
    kinds_seen: set[str] = set()
    for table, is_healthy in ((KINDS, False), (HEALTHY, True)):
        for i, (name, maker) in enumerate(table.items()):
            t0 = time.time()
            line = []
            for s in range(3):
                rng = np.random.default_rng([7, int(is_healthy), i, s])
                case, w, shares, alone = maker.detail(rng, s)
                assert case.name == name and case.seed == s
                assert bool(case.truths) != is_healthy
                check(case, w, shares, alone)
                # the same seed gives the same case
                if s == 0:
                    again = maker(np.random.default_rng([7, int(is_healthy), i, s]), s)
                    assert again.truths == case.truths and np.array_equal(
                        again.compute_s, case.compute_s
                    )
                kinds_seen |= {t.kind for t in case.truths}
                wall = wall_of(case)
                line.append(f"K{w.K} W{w.W} sd{w.sd:.3f} " + "; ".join(
                    f"{t.kind}{list(t.ranks) if len(t.ranks) < 4 else f'[{len(t.ranks)}]'} @{t.since} {t.cost_s / wall:.1%}"
                    + (f" {t.sigmas:.1f}σ" if t.sigmas else "")
                    for t in case.truths
                ))  # fmt: skip
            two += len(case.truths) == 2
            if quick:
                print(f"{name}  ({time.time() - t0:.2f} s, redrawn {sum(maker.why.values())})")
                for x in line:
                    print("     ", x)
    assert len(KINDS) >= 26 and two >= 7 and len(HEALTHY) >= 10
    assert kinds_seen == set(CAUSES), kinds_seen
    print(
        f"ok: {len(KINDS)} kinds with causes, {two} of them with two; {len(HEALTHY)} healthy; {time.time() - start:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
