"""Scenarios for verdicts on the step timings of a data-parallel job.

Written from the documentation alone.  How things are read here where the documentation leaves it open:

* The wait for a plan is part of `data_s` of all ranks in the first step of a segment.
* A rank that takes no part in a step has 0.0 in all its arrays there; the maximum and the minimum of the wall time go over
  those that take part.
* `since` of what happens in some steps (transient, periodic, between, some of input and network) is the first time, if
  that is after step 0; what is there from step 0 on has None.  Planning that is slow at all segments, step 0's included: None.
* `sigmas` is given wherever the cause sets in abruptly after step 0, also for pauses.  The noise is that of the one quantity
  in which the step shows (compute_s of a rank, data_s, the reduction, between_s); where the noise grows with the
  step (data_s, reduction, between_s), it is the root mean square of before and after.
* A cause that is the same on all ranks of a node differs by about a percent from rank to rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


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


class Again(Exception):
    """What was drawn does not suit: draw again."""


def need(ok: bool) -> None:
    if not ok:
        raise Again


# ---------------------------------------------------------------------------------------------------- the physics


@dataclass(eq=False)
class Effect:
    kind: str
    ranks: tuple[int, ...]
    since: int | None
    sigmas: float | None = None
    mult: np.ndarray | None = None  # [K, W] on compute_s
    add: np.ndarray | None = None  # [K, W] on compute_s
    data: np.ndarray | None = None  # [K, W]
    red: np.ndarray | None = None  # [K]
    bet: np.ndarray | None = None  # [K]
    equal: bool = False  # without it, all batches of a step cost the mean
    zero_data: bool = False  # without it, there is no waiting for the loader at all
    zero_red: bool = False
    zero_bet: bool = False
    truth: bool = True
    least: float = 0.03  # smallest share that is accepted


@dataclass(eq=False)
class World:
    rng: np.random.Generator
    K: int
    W: int
    T: float  # typical compute_s
    sd: float  # noise of one step of one rank
    samples: np.ndarray
    load: np.ndarray
    squares: np.ndarray
    longest: np.ndarray
    f: np.ndarray  # cost of the batches
    A: float  # f = A·load + B, where that is so
    B: float
    speed: np.ndarray  # [W]
    noise: np.ndarray  # [K, W]
    data0: np.ndarray  # [K, W]
    data_sd: float
    plan0: np.ndarray  # [K, W]
    red0: np.ndarray  # [K]
    red_sd: float
    jitter: np.ndarray  # [K, W]
    bet0: np.ndarray  # [K]
    bet_sd: float
    first: np.ndarray
    seg: int
    nodes: tuple[str, ...]
    per: int
    active: np.ndarray  # [K, W] bool
    effects: list[Effect] = field(default_factory=list)

    def node_ranks(self, node: str) -> list[int]:
        return [r for r in range(self.W) if self.nodes[r] == node]


def simulate(
    w: World, off: tuple[Effect, ...] = ()
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]:
    """data_s, compute_s, sync_s, between_s, wall time; without the effects in `off`."""
    on = [e for e in w.effects if e not in off]
    f = w.f
    if any(e.equal for e in off):
        mean = (f * w.active).sum(1) / w.active.sum(1)
        f = np.broadcast_to(mean[:, None], f.shape)
    compute = f * w.speed * w.noise
    for e in on:
        if e.mult is not None:
            compute = compute * e.mult
    for e in on:
        if e.add is not None:
            compute = compute + e.add
    data = w.plan0.copy() if any(e.zero_data for e in off) else w.plan0 + w.data0
    red = np.zeros(w.K) if any(e.zero_red for e in off) else w.red0.copy()
    bet = np.zeros(w.K) if any(e.zero_bet for e in off) else w.bet0.copy()
    for e in on:
        data = data + e.data if e.data is not None else data
        red = red + e.red if e.red is not None else red
        bet = bet + e.bet if e.bet is not None else bet
    own = data + compute
    slowest = np.where(w.active, own, -np.inf).max(1)
    sync = slowest[:, None] - own + red[:, None] + w.jitter
    data, compute, sync = (np.where(w.active, x, 0.0) for x in (data, compute, sync))
    return data, compute, sync, bet, wall_time(data, compute, sync, bet, w.active)


def wall_time(
    data: np.ndarray, compute: np.ndarray, sync: np.ndarray, between: np.ndarray, active: np.ndarray
) -> float:
    a = np.where(active, data + compute, -np.inf).max(1)
    b = np.where(active, sync, np.inf).min(1)
    return float((a + b + between).sum())


def finish(w: World, name: str, seed: int) -> Case:
    data, compute, sync, bet, wall = simulate(w)
    truths = []
    for e in w.effects:
        cost = wall - simulate(w, (e,))[-1]
        if not e.truth:
            need(cost / wall < 0.004)
            continue
        need(e.least <= cost / wall <= 0.60)
        if sum(x.truth for x in w.effects) > 1:  # also where it is the only one
            rest = tuple(x for x in w.effects if x is not e)
            bare = simulate(w, tuple(w.effects))[-1]
            only = simulate(w, rest)[-1]
            need((only - bare) / only >= 0.025)
        truths.append(Truth(e.kind, e.ranks, e.since, cost, e.sigmas))
    if not any(e.equal for e in w.effects):
        probe = Effect("data", (), None, equal=True)
        need(wall - simulate(w, (probe,))[-1] < 0.0045 * wall)
    truths.sort(key=lambda t: -t.cost_s)
    act = w.active
    zero = [np.where(act, x, 0.0) for x in (w.samples, w.load, w.squares, w.longest)]
    return Case(name, seed, *zero, data, compute, sync, bet, w.first.copy(), w.nodes, tuple(truths))


# ---------------------------------------------------------------------------------------------- drawing what is ordinary


def logu(rng: np.random.Generator, a: float, b: float) -> float:
    return float(np.exp(rng.uniform(np.log(a), np.log(b))))


def whole(rng: np.random.Generator, a: int, b: int) -> int:
    """a … b, both included"""
    return int(rng.integers(a, b + 1))


def draw_w(rng: np.random.Generator, a: int = 4, b: int = 64) -> int:
    return int(round(logu(rng, a, b)))


def draw_k(rng: np.random.Generator, W: int) -> int:
    if W > 512:
        return whole(rng, 100, 150)
    if W >= 128:
        return whole(rng, 100, 220)
    return int(round(logu(rng, 100, 600)))


def gamma_noise(rng: np.random.Generator, cv: float, size: int | tuple[int, ...]) -> np.ndarray:
    """positive, mean 1"""
    return rng.gamma(1 / cv**2, cv**2, size)


def draw_noise(
    rng: np.random.Generator, shape: str, sd: float, size: tuple[int, int]
) -> np.ndarray:
    if shape == "normal":
        return np.clip(rng.normal(1, sd, size), 0.5, None)
    if shape == "lognormal":
        return rng.lognormal(-(sd**2) / 2, sd, size)
    if shape == "gamma":
        return gamma_noise(rng, sd, size)
    if shape == "heavy":  # a mixture: a few values are far wider, none by more than 10 %
        wide = rng.random(size) < 0.04
        return 1 + np.clip(rng.normal(0, 1, size) * np.where(wide, 4 * sd, sd), -0.10, 0.10)
    raise ValueError(shape)


DISTS = ("constant", "uniform", "lognormal", "gamma")


def draw_sizes(
    rng: np.random.Generator, dist: str, size: tuple[int, ...], spread: float | None
) -> np.ndarray:
    if dist == "uniform":
        h = spread if spread is not None else rng.uniform(0.2, 0.9)
        return rng.uniform(1 - h, 1 + h, size)
    if dist == "lognormal":
        s = spread if spread is not None else rng.uniform(0.2, 0.9)
        return rng.lognormal(-(s**2) / 2, s, size)
    s = spread if spread is not None else logu(rng, 0.3, 0.9)
    return np.maximum(gamma_noise(rng, s, size), 0.01)


def make_nodes(rng: np.random.Generator, W: int, per: int) -> tuple[str, ...]:
    style = whole(rng, 0, 3)
    base = whole(rng, 1, 60)
    n = -(-W // per)
    if style == 0 and n <= 26:
        names = [chr(97 + i) for i in range(n)]
    elif style == 1:
        names = [f"node{i:02d}" for i in range(n)]
    elif style == 2:
        names = [f"gpu-{base + i}" for i in range(n)]
    else:
        names = [f"r{i // 4}n{i % 4}" for i in range(n)]
    return tuple(names[r // per] for r in range(W))


def base(
    rng: np.random.Generator,
    W: int | None = None,
    K: int | None = None,
    *,
    per: int | None = None,
    dist: str | None = None,
    spread: float | None = None,
    n: int | None = None,
    cost: str = "load",  # load, squares, padded, count
    balance: str = "load",  # load, cost, none
    rank_scale: np.ndarray | None = None,  # [W] on the sizes
    counts: np.ndarray | None = None,  # [K, W] or [W]: factors on the counts
    beta: float | None = None,
    gsd: float | None = None,
    sd: float | None = None,
    shape: str | None = None,
    red: float | None = None,
    bet: float | None = None,
    loader: float | None = None,
    seg: int | None = None,
    first0: bool | None = None,
    plan: float | None = None,
    speed: np.ndarray | None = None,
    idle: bool = False,
) -> World:
    W = W if W is not None else draw_w(rng)
    K = K if K is not None else draw_k(rng, W)
    per = per if per is not None else int(rng.choice([1, 2, 4, 8]))
    T = logu(rng, 0.04, 4.0)
    sd = sd if sd is not None else logu(rng, 0.005, 0.08)
    shape = shape or str(rng.choice(["normal", "lognormal", "gamma"]))
    dist = dist or str(rng.choice(DISTS))
    n = n if n is not None else (whole(rng, 3, 8) if W >= 128 else whole(rng, 4, 24))
    beta = beta if beta is not None else rng.uniform(0, 0.4)
    gsd = gsd if gsd is not None else float(rng.choice([0.0, rng.uniform(0.02, 0.2)]))
    unit = logu(rng, 1, 1000)

    # batches
    g = rng.lognormal(0, gsd, K) if gsd else np.ones(K)
    if dist == "constant":
        nn = np.maximum(np.round(n * 4 * g), 1.0)[:, None] * np.ones((1, W))
        if counts is not None:
            nn = np.maximum(np.round(nn * counts), 1.0)
        lam = np.full((K, W), unit) * (rank_scale if rank_scale is not None else 1.0)
        samples, load, squares, longest = nn, nn * lam, nn * lam**2, lam
    else:
        c = np.full((K, W), float(n))
        if counts is not None:
            c = np.maximum(np.round(c * counts), 1.0)
        top = int(c.max())
        lam = draw_sizes(rng, dist, (K, W, top), spread) * unit
        if counts is not None:
            lam = np.where(np.arange(top) < c[:, :, None], lam, 0.0)
        lam *= g[:, None, None]
        samples = c
        load, squares, longest = lam.sum(2), (lam**2).sum(2), lam.max(2)

    def rescale(s: np.ndarray) -> None:
        nonlocal load, squares, longest
        load, squares, longest = load * s, squares * s**2, longest * s

    eps = 1 + rng.normal(0, rng.uniform(0.0002, 0.0008), (K, W))
    if dist != "constant" and balance == "load":
        rescale(load.mean(1, keepdims=True) / load * eps)
    a = c2 = p = d = 0.0
    free = 1 - beta
    if cost == "load":
        a = free
    elif cost == "squares":
        c2 = free * rng.uniform(0.3, 0.8)
        a = free - c2
    elif cost == "padded":
        p = free * float(rng.choice([1.0, rng.uniform(0.5, 1.0)]))
        a = free - p
    elif cost == "count":
        d = free * rng.uniform(0.3, 1.0)
        a = free - d
    ml, mq, mp, mc = load.mean(), squares.mean(), (samples * longest).mean(), samples.mean()
    if dist != "constant" and balance == "cost":
        x, y = a * load / ml + p * samples * longest / mp, c2 * squares / mq
        t = (x + y).mean(1, keepdims=True) * eps
        rescale(
            np.where(y > 0, (-x + np.sqrt(x * x + 4 * y * t)) / (2 * np.maximum(y, 1e-300)), t / x)
        )
    if rank_scale is not None and dist != "constant":
        rescale(np.broadcast_to(rank_scale, (K, W)))
    f = T * (
        a * load / ml + c2 * squares / mq + p * samples * longest / mp + d * samples / mc + beta
    )

    # the rest of a step
    if speed is None:
        h = rng.uniform(0, 0.007)
        speed = 1 + rng.uniform(-h, h, W)
    loader = loader if loader is not None else float(rng.choice([0.0005, logu(rng, 0.0005, 0.006)]))
    dcv = rng.uniform(0.1, 0.4)
    data0 = loader * T * gamma_noise(rng, dcv, (K, W))
    red = red if red is not None else logu(rng, 0.005, 0.10)
    rcv = rng.uniform(0.01, 0.08)
    red0 = red * T * gamma_noise(rng, rcv, K)
    bet = bet if bet is not None else float(rng.choice([0.0005, logu(rng, 0.001, 0.03)]))
    bcv = rng.uniform(0.02, 0.15)
    bet0 = bet * T * gamma_noise(rng, bcv, K)
    seg = seg if seg is not None else int(round(logu(rng, 12, 120)))
    at = 0 if (first0 if first0 is not None else rng.random() < 0.6) else whole(rng, 1, seg - 1)
    first = np.arange(K) % seg == at % seg
    plan = plan if plan is not None else float(rng.choice([0.0, rng.uniform(0, 0.03)]))
    plan0 = np.zeros((K, W))
    plan0[first] = plan * T * gamma_noise(rng, 0.1, (int(first.sum()), 1))
    plan0 *= gamma_noise(rng, 0.02, (K, W))
    active = np.ones((K, W), bool)
    if idle:  # the last ranks get nothing in some steps
        for k in np.flatnonzero(rng.random(K) < rng.uniform(0.03, 0.15)):
            active[k, W - whole(rng, 1, max(1, W // 4)) :] = False
    return World(
        rng, K, W, T, sd, samples, load, squares, longest, f, a * T / ml, beta * T, speed,
        draw_noise(rng, shape, sd, (K, W)), data0, loader * T * dcv, plan0, red0, red * T * rcv,
        rng.exponential(2e-5 * T, (K, W)), bet0, bet * T * bcv, first, seg, make_nodes(rng, W, per), per, active,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- causes


def ones(w: World) -> np.ndarray:
    return np.ones((w.K, w.W))


def some_ranks(w: World, m: int, but: tuple[int, ...] = ()) -> tuple[int, ...]:
    left = [r for r in range(w.W) if r not in but]
    need(len(left) >= m)
    return tuple(sorted(int(r) for r in w.rng.choice(left, m, replace=False)))


def one_node(w: World, but: tuple[int, ...] = ()) -> tuple[int, ...]:
    """all ranks of a node, which are not more than half of all, and more than one"""
    names = [x for x in dict.fromkeys(w.nodes) if 1 < len(w.node_ranks(x)) <= w.W / 2]
    names = [x for x in names if not set(w.node_ranks(x)) & set(but)]
    need(bool(names))
    return tuple(w.node_ranks(str(w.rng.choice(names))))


def visible(w: World, size: float, steps: int) -> None:
    """a slowness by `size` of a step over `steps` steps stands out of the noise"""
    need(size / w.sd * steps**0.5 >= 8)


def slow_since(w: World, ranks: tuple[int, ...], factor: float, since: int | None) -> Effect:
    at = since or 0
    need(factor >= 1.08 and w.K - at >= 30 and (since is None or since >= 20))
    visible(w, factor - 1, w.K - at)
    mult = ones(w)
    each = factor * (1 + (w.rng.normal(0, 0.006, len(ranks)) if len(ranks) > 1 else 0.0))
    mult[at:, list(ranks)] = np.maximum(each, 1.08)
    e = Effect("node", ranks, since, None if since is None else (factor - 1) / w.sd, mult=mult)
    w.effects.append(e)
    return e


def draw_since(w: World, low: float = 0.12, high: float = 0.8) -> int:
    return int(np.clip(whole(w.rng, int(low * w.K), int(high * w.K)), 20, w.K - 31))


def slow_growing(
    w: World, ranks: tuple[int, ...], factor: float, since: int | None, form: str
) -> Effect:
    at = since or 0
    need(factor >= 1.2 and w.K - at >= 45)
    left = w.K - at
    t = np.arange(1, left + 1) / left
    if form == "linear":
        x = t
    elif form == "then flat":
        x = np.minimum(t / w.rng.uniform(0.5, 0.95), 1)
    elif form == "saturating":
        q = w.rng.uniform(1.0, 2.5)
        x = (1 - np.exp(-q * t)) / (1 - np.exp(-q))
    else:  # faster and faster
        x = t ** w.rng.uniform(1.1, 1.6)
    visible(w, (factor - 1) / 2, left)
    mult = ones(w)
    mult[at:, list(ranks)] += (factor - 1) * x[:, None]
    e = Effect("node", ranks, since, None, mult=mult)
    w.effects.append(e)
    return e


def spaced(
    w: World, m: int, length: Callable[[], int], start: int = 8, end: int = 12, gap: int = 8
) -> list[tuple[int, int]]:
    """m episodes [a, b) at no regular distance"""
    for _ in range(60):
        lens = [length() for _ in range(m)]
        if w.K - end - start < sum(lens) + gap * m:
            continue
        starts = sorted(int(x) for x in w.rng.integers(start, w.K - end, m))
        eps = [(a, a + n) for a, n in zip(starts, lens, strict=True)]
        if eps[-1][1] > w.K - end or any(
            b[0] - a[1] < gap for a, b in zip(eps, eps[1:], strict=False)
        ):
            continue
        d = np.diff(starts)
        if m >= 3 and (d.max() < 1.5 * d.min() or (np.abs(np.diff(d)) <= 3).any()):
            continue
        return eps
    raise Again


def slow_for_a_while(
    w: World, ranks: tuple[int, ...], factor: float, eps: list[tuple[int, int]]
) -> Effect:
    need(factor >= 1.12)
    mult = ones(w)
    for a, b in eps:
        visible(w, factor - 1, b - a)
        each = factor * gamma_noise(w.rng, 0.01, (1, len(ranks)))
        mult[a:b, list(ranks)] = each
    need(sum(b - a for a, b in eps) < 0.6 * w.K)
    at = eps[0][0]
    e = Effect("transient", ranks, at or None, (factor - 1) / w.sd if at else None, mult=mult)
    w.effects.append(e)
    return e


def pauses(
    w: World, kind: str, ranks: tuple[int, ...], steps: list[int], size: float, cv: float
) -> Effect:
    """`size` in typical steps, on all `ranks` at once"""
    need(size * max(1 - 2 * cv, 0.4) >= max(0.3, 6 * w.sd) and steps[0] > 0 and steps[-1] < w.K)
    add = np.zeros((w.K, w.W))
    common = gamma_noise(w.rng, max(cv, 0.005), (len(steps), 1)) * gamma_noise(
        w.rng, 0.03, (len(steps), len(ranks))
    )
    add[np.ix_(steps, list(ranks))] = size * w.T * common
    e = Effect(kind, ranks, steps[0], size / w.sd, add=add)
    w.effects.append(e)
    return e


def every(w: World, period: float, at: int, until: int | None = None) -> list[int]:
    """steps at equal distances; a period that is no whole number gives distances that differ by one"""
    end = until if until is not None else w.K
    steps = [int(np.floor(at + i * period + 1e-9)) for i in range(int((end - at) / period) + 2)]
    return [s for s in steps if s < end]


def draw_period(
    w: World, low: int = 5, high: int = 60, whole_number: bool = True
) -> tuple[float, list[int]]:
    high = min(high, w.K // 6)
    p = float(whole(w.rng, low, high)) if whole_number else w.rng.uniform(low + 3, high)
    at = whole(w.rng, 1, int(p))
    if w.rng.random() < 0.25:  # sets in later
        at = whole(w.rng, 1, max(2, w.K // 3))
    steps = every(w, p, at)
    need(len(steps) >= 5 and steps[0] >= 1)
    return p, steps


def wait_for_loader(
    w: World,
    ranks: tuple[int, ...],
    steps: np.ndarray,
    size: float,
    cv: float,
    since: int | None,
    named: bool = True,
) -> Effect:
    need(size * (1 - cv) >= 0.05)
    m = np.zeros((w.K, w.W))
    own = gamma_noise(w.rng, max(cv * 0.4, 0.01), (len(steps), len(ranks)))
    m[np.ix_(steps, list(ranks))] = size * w.T * gamma_noise(w.rng, cv, (len(steps), 1)) * own
    sd = (((size * w.T * cv) ** 2 + w.data_sd**2) / 2) ** 0.5
    e = Effect(
        "input", ranks if named else (), since, None if since is None else size * w.T / sd, data=m
    )
    w.effects.append(e)
    return e


def slow_network(w: World, steps: np.ndarray, size: float, cv: float, since: int | None) -> Effect:
    need(size * (1 - cv) >= 0.08 and size * w.T >= 1.0 * w.red0.mean())
    red = np.zeros(w.K)
    red[steps] = size * w.T * gamma_noise(w.rng, cv, len(steps))
    sd = (((size * w.T * cv) ** 2 + w.red_sd**2) / 2) ** 0.5
    e = Effect("network", (), since, None if since is None else size * w.T / sd, red=red)
    w.effects.append(e)
    return e


def network_always(w: World) -> Effect:
    e = Effect("network", (), None, None, zero_red=True, least=0.30)
    w.effects.append(e)
    return e


def time_between(w: World, steps: list[int], size: float, cv: float) -> Effect:
    need(size >= 0.3 and len(steps) >= 2 and steps[0] >= 1)
    bet = np.zeros(w.K)
    bet[steps] = size * w.T * gamma_noise(w.rng, cv, len(steps))
    sd = (((size * w.T * cv) ** 2 + w.bet_sd**2) / 2) ** 0.5
    e = Effect("between", (), steps[0], size * w.T / sd, bet=bet)
    w.effects.append(e)
    return e


def slow_planning(w: World, size: float, cv: float, begin: int = 0) -> Effect:
    """`begin`: the number of the segment from which on it is slow"""
    at = np.flatnonzero(w.first)
    need(size >= 0.3 and len(at) - begin >= 4)
    data = np.zeros((w.K, w.W))
    steps = at[begin:]
    data[steps] = (
        size
        * w.T
        * gamma_noise(w.rng, cv, (len(steps), 1))
        * gamma_noise(w.rng, 0.01, (len(steps), w.W))
    )
    since = None if steps[0] == 0 else int(steps[0])
    sd = (((size * w.T * cv) ** 2 + w.data_sd**2) / 2) ** 0.5
    e = Effect("planning", (), since, None if since is None else size * w.T / sd, data=data)
    w.effects.append(e)
    return e


def uneven(w: World, ranks: tuple[int, ...] = ()) -> Effect:
    """the batches as they are; named ranks must have the larger ones throughout, others must not"""
    mean = w.f.mean(1, keepdims=True)
    rel = w.f / mean
    if ranks:
        rest = [r for r in range(w.W) if r not in ranks]
        need(bool((rel[:, list(ranks)].min(1) > rel[:, rest].max(1)).mean() > 0.9))
        need(float(np.median(rel[:, list(ranks)]) / np.median(rel[:, rest])) >= 1.08)
    else:
        need(float(np.ptp(np.median(rel, 0))) < max(0.03, 0.5 * rel.std()))
    e = Effect("data", ranks, None, None, equal=True)
    w.effects.append(e)
    return e


def give_less(w: World, ranks: tuple[int, ...], factor: float, at: int, degree: float) -> None:
    """The plan deals out the load by speed, from step `at` on; `degree` 1 is as well as can be."""
    m, W = len(ranks), w.W
    mean = w.load[at:].mean(1)
    slow = (w.A * W * mean / (W - m) - (factor - 1) * w.B) / (w.A * factor + w.A * m / (W - m))
    slow = mean + degree * (slow - mean)
    need(bool((slow > 0.15 * mean).all()))
    fast = (W * mean - m * slow) / (W - m)
    share = np.repeat((fast / mean)[:, None], W, 1)
    share[:, list(ranks)] = (slow / mean)[:, None]
    w.load[at:] *= share
    w.squares[at:] *= share
    w.samples = w.samples.copy()
    w.samples[at:] = np.maximum(np.round(w.samples[at:] * share), 1)
    w.squares = np.maximum(w.squares, w.load**2 / w.samples)
    w.longest = np.minimum(np.maximum(w.longest, w.squares / w.load), w.load)
    w.f = w.A * w.load + w.B


# ---------------------------------------------------------------------------------------------- scenarios with causes

KINDS: dict[str, Callable[[np.random.Generator, int], Case]] = {}
HEALTHY: dict[str, Callable[[np.random.Generator, int], Case]] = {}


def scenario(name: str, into: dict[str, Callable[[np.random.Generator, int], Case]] | None = None):
    table = KINDS if into is None else into

    def wrap(
        build: Callable[[np.random.Generator], World],
    ) -> Callable[[np.random.Generator], World]:
        def make(rng: np.random.Generator, seed: int) -> Case:
            for _ in range(1000):
                try:
                    return finish(build(rng), name, seed)
                except Again:
                    continue
            raise RuntimeError(f"{name}: nothing suitable in 1000 tries")

        table[name] = make
        return build

    return wrap


def healthy(name: str):
    return scenario(name, HEALTHY)


# -- node


@scenario("one rank slow from the beginning")
def _(rng):
    w = base(rng, idle=rng.random() < 0.3)
    slow_since(w, some_ranks(w, 1), 1 + logu(rng, 0.08, 2.5), None)
    return w


@scenario("thermal throttling at once")
def _(rng):
    w = base(rng)
    slow_since(w, some_ranks(w, 1), 1 + logu(rng, 0.1, 2.0), draw_since(w))
    return w


@scenario("thermal throttling that grows")
def _(rng):
    w = base(rng)
    form = str(rng.choice(["linear", "then flat", "saturating", "accelerating"]))
    slow_growing(w, some_ranks(w, 1), 1 + logu(rng, 0.25, 2.5), draw_since(w, 0.1, 0.6), form)
    return w


@scenario("a leak that slows a rank from the beginning, more and more")
def _(rng):
    w = base(rng)
    slow_growing(w, some_ranks(w, 1), 1 + logu(rng, 0.2, 2.0), None, "linear")
    return w


@scenario("a whole node slow since a step")
def _(rng):
    per = int(rng.choice([2, 4, 8]))
    w = base(rng, per * whole(rng, 2, 64 // per), per=per)
    slow_since(w, one_node(w), 1 + logu(rng, 0.08, 1.5), draw_since(w))
    return w


@scenario("a whole node slow from the beginning, many ranks")
def _(rng):
    w = base(rng, 8 * whole(rng, 16, 128), per=8)
    slow_since(w, one_node(w), 1 + logu(rng, 0.1, 1.5), None)
    return w


@scenario("half of all ranks slow")
def _(rng):
    per = int(rng.choice([2, 4, 8]))
    W = 2 * per * whole(rng, 1, 32 // per)
    w = base(rng, W, per=per)
    ranks = range(W // 2, W) if rng.random() < 0.7 else range(1, W, 2)
    slow_since(
        w, tuple(ranks), 1 + logu(rng, 0.08, 1.2), None if rng.random() < 0.5 else draw_since(w)
    )
    return w


@scenario("half of very many ranks slow")
def _(rng):
    W = 16 * whole(rng, 8, 64)
    w = base(rng, W, per=8)
    ranks = range(W // 2, W) if rng.random() < 0.5 else range(W // 2)
    slow_since(
        w, tuple(ranks), 1 + logu(rng, 0.1, 1.0), None if rng.random() < 0.5 else draw_since(w)
    )
    return w


@scenario("one rank of very many slow since a step")
def _(rng):
    w = base(rng, draw_w(rng, 128, 1024), per=8)
    slow_since(w, some_ranks(w, 1), 1 + logu(rng, 0.2, 2.0), draw_since(w, 0.2, 0.7))
    return w


@scenario("two ranks slow since the same step")
def _(rng):
    w = base(rng, draw_w(rng, 6, 64))
    slow_since(w, some_ranks(w, 2), 1 + logu(rng, 0.1, 1.8), draw_since(w))
    return w


@scenario("all ranks slower since a step")
def _(rng):
    w = base(rng)
    slow_since(w, tuple(range(w.W)), 1 + logu(rng, 0.1, 1.0), draw_since(w, 0.2, 0.75))
    return w


@scenario("a slow rank gets less to do, well")
def _(rng):
    w = base(rng, draw_w(rng, 4, 16), dist=str(rng.choice(DISTS[1:])), gsd=rng.uniform(0.1, 0.25), beta=rng.uniform(0, 0.15),
             n=whole(rng, 8, 24))  # fmt: skip
    ranks, factor = some_ranks(w, 1), 1 + logu(rng, 0.25, 2.0)
    slow_since(w, ranks, factor, None).equal = True
    give_less(w, ranks, factor, 0, rng.uniform(0.93, 1.0))
    return w


@scenario("a slow node gets less to do, but only half of what it should")
def _(rng):
    per = int(rng.choice([2, 4]))
    w = base(rng, per * whole(rng, 2, 8), per=per, dist=str(rng.choice(DISTS[1:])), gsd=rng.uniform(0.1, 0.25),
             beta=rng.uniform(0, 0.15), n=whole(rng, 8, 24))  # fmt: skip
    ranks, factor = one_node(w), 1 + logu(rng, 0.15, 1.5)
    slow_since(w, ranks, factor, None).equal = True
    give_less(w, ranks, factor, 0, rng.uniform(0.35, 0.65))
    return w


@scenario("a rank slow since a step, and the plan follows a segment later")
def _(rng):
    w = base(rng, draw_w(rng, 4, 16), dist=str(rng.choice(DISTS[1:])), gsd=rng.uniform(0.1, 0.25), beta=rng.uniform(0, 0.15),
             n=whole(rng, 8, 24), seg=whole(rng, 12, 40))  # fmt: skip
    ranks, factor, since = some_ranks(w, 1), 1 + logu(rng, 0.25, 2.0), draw_since(w, 0.15, 0.6)
    later = np.flatnonzero(w.first & (np.arange(w.K) > since + 8))
    need(len(later) > 0 and w.K - later[0] > 30)
    slow_since(w, ranks, factor, since).equal = True
    give_less(w, ranks, factor, int(later[0]), rng.uniform(0.6, 1.0))
    return w


# -- transient


@scenario("a noisy neighbour")
def _(rng):
    per = int(rng.choice([2, 4, 8]))
    w = base(rng, per * whole(rng, 2, 64 // per), per=per)
    ranks = one_node(w)
    if len(ranks) > 2 and rng.random() < 0.5:
        ranks = ranks[: len(ranks) // 2]
    slow_for_a_while(
        w, ranks, 1 + logu(rng, 0.25, 2.5), spaced(w, whole(rng, 2, 5), lambda: whole(rng, 5, 30))
    )
    return w


@scenario("rare long pauses of one rank")
def _(rng):
    w = base(rng)
    eps = spaced(w, whole(rng, 2, 7), lambda: 1, start=3, end=3)
    pauses(
        w,
        "transient",
        some_ranks(w, 1),
        [a for a, _ in eps],
        logu(rng, 1, 20),
        rng.uniform(0, 0.25),
    )
    return w


@scenario("one single pause")
def _(rng):
    w = base(rng)
    pauses(w, "transient", some_ranks(w, 1), [whole(rng, 5, w.K - 5)], logu(rng, 4, 60), 0.0)
    return w


@scenario("a rank slow in the middle, which recovered")
def _(rng):
    w = base(rng)
    n = whole(rng, 20, max(21, w.K // 2))
    slow_for_a_while(
        w, some_ranks(w, 1), 1 + logu(rng, 0.12, 2.0), spaced(w, 1, lambda: n, start=20, end=25)
    )
    return w


@scenario("a rank slow at the beginning, which recovered")
def _(rng):
    w = base(rng)
    slow_for_a_while(w, some_ranks(w, 1), 1 + logu(rng, 0.12, 2.0), [(0, whole(rng, 20, w.K // 2))])
    return w


@scenario("a rank slow for a few steps, just now")
def _(rng):
    w = base(rng, K=whole(rng, 100, 250))
    at = w.K - whole(rng, 6, 16)
    slow_for_a_while(w, some_ranks(w, 1), 1 + logu(rng, 0.4, 4.0), [(at, w.K)])
    return w


@scenario("power cap on everything for a while")
def _(rng):
    w = base(rng)
    n = whole(rng, 15, max(16, w.K // 3))
    slow_for_a_while(
        w, tuple(range(w.W)), 1 + logu(rng, 0.15, 1.0), spaced(w, 1, lambda: n, start=25, end=30)
    )
    return w


# -- periodic


@scenario("garbage collection of one rank")
def _(rng):
    w = base(rng)
    _, steps = draw_period(w, 5, 50)
    pauses(w, "periodic", some_ranks(w, 1), steps, logu(rng, 0.3, 8), rng.uniform(0, 0.2))
    return w


@scenario("a cron job on one node, at a period that is no whole number of steps")
def _(rng):
    per = int(rng.choice([2, 4, 8]))
    w = base(rng, per * whole(rng, 2, 64 // per), per=per)
    _, steps = draw_period(w, 6, 70, whole_number=False)
    pauses(w, "periodic", one_node(w), steps, logu(rng, 0.3, 8), rng.uniform(0, 0.15))
    return w


@scenario("a rank slow for several steps at a period")
def _(rng):
    w = base(rng)
    n = whole(rng, 2, 4)
    p, steps = draw_period(w, 4 * n, 70)
    need(len(steps) >= 5 and steps[-1] + n <= w.K)
    factor = 1 + logu(rng, 0.3, 3.0)
    visible(w, factor - 1, n)
    need(factor - 1 > 5 * w.sd)
    mult = ones(w)
    ranks = some_ranks(w, 1)
    for s in steps:
        mult[s : s + n, ranks[0]] = factor
    w.effects.append(Effect("periodic", ranks, steps[0], (factor - 1) / w.sd, mult=mult))
    return w


@scenario("garbage collection of one rank of very many")
def _(rng):
    w = base(rng, draw_w(rng, 128, 600), per=8)
    _, steps = draw_period(w, 4, 20)
    pauses(w, "periodic", some_ranks(w, 1), steps, logu(rng, 0.6, 6), rng.uniform(0, 0.2))
    return w


# -- input


@scenario("one rank always waits for its loader")
def _(rng):
    w = base(rng)
    wait_for_loader(
        w, some_ranks(w, 1), np.arange(w.K), logu(rng, 0.08, 1.5), rng.uniform(0.05, 0.35), None
    )
    return w


@scenario("a slow disk of one node since a step")
def _(rng):
    per = int(rng.choice([2, 4, 8]))
    w = base(rng, per * whole(rng, 2, 64 // per), per=per)
    s = draw_since(w)
    wait_for_loader(
        w, one_node(w), np.arange(s, w.K), logu(rng, 0.1, 1.5), rng.uniform(0.05, 0.35), s
    )
    return w


@scenario("an NFS hiccup of one node's loaders")
def _(rng):
    per = int(rng.choice([2, 4, 8]))
    w = base(rng, per * whole(rng, 2, 64 // per), per=per)
    eps = spaced(w, whole(rng, 1, 3), lambda: whole(rng, 3, 25))
    steps = np.concatenate([np.arange(a, b) for a, b in eps])
    wait_for_loader(w, one_node(w), steps, logu(rng, 0.3, 5), rng.uniform(0.05, 0.35), eps[0][0])
    return w


@scenario("all ranks always wait for their loaders")
def _(rng):
    w = base(rng, loader=logu(rng, 0.10, 1.2))
    w.effects.append(Effect("input", tuple(range(w.W)), None, None, zero_data=True, least=0.07))
    return w


@scenario("the storage of all ranks slow since a step")
def _(rng):
    w = base(rng)
    s = draw_since(w, 0.15, 0.75)
    wait_for_loader(
        w, tuple(range(w.W)), np.arange(s, w.K), logu(rng, 0.12, 1.5), rng.uniform(0.05, 0.3), s
    )
    w.effects[-1].least = 0.06
    return w


@scenario("each rank's loader hiccups in turn")
def _(rng):
    w = base(rng, draw_w(rng, 4, 20), K=whole(rng, 250, 600))
    p = rng.uniform(0.12, 0.4)
    steps = np.flatnonzero(rng.random(w.K) < p)
    need(len(steps) >= 5 * w.W and steps[0] > 0)
    who = rng.integers(0, w.W, len(steps))
    need(bool((np.bincount(who, minlength=w.W) >= 3).all()))
    size, cv = logu(rng, 0.3, 4), rng.uniform(0.1, 0.4)
    need(size > 5 * w.sd)
    data = np.zeros((w.K, w.W))
    data[steps, who] = size * w.T * gamma_noise(rng, cv, len(steps))
    w.effects.append(Effect("input", (), int(steps[0]), 2**0.5 / cv, data=data))
    return w


@scenario("one rank's loader refills its buffer every n steps")
def _(rng):
    w = base(rng)
    p, steps = draw_period(w, 5, 50)
    need(p % w.seg != 0 and w.seg % p != 0)
    wait_for_loader(
        w, some_ranks(w, 1), np.array(steps), logu(rng, 0.4, 6), rng.uniform(0.03, 0.2), steps[0]
    )
    return w


# -- network


@scenario("a congested switch for a while")
def _(rng):
    w = base(rng)
    eps = spaced(w, whole(rng, 1, 3), lambda: whole(rng, 8, max(9, w.K // 6)))
    steps = np.concatenate([np.arange(a, b) for a, b in eps])
    slow_network(w, steps, logu(rng, 0.15, 3), rng.uniform(0.05, 0.3), eps[0][0])
    return w


@scenario("a flapping link")
def _(rng):
    w = base(rng)
    steps = np.flatnonzero(rng.random(w.K) < logu(rng, 0.02, 0.2))
    need(len(steps) >= 4 and steps[0] > 0)
    slow_network(w, steps, logu(rng, 0.4, 10), rng.uniform(0.1, 0.4), int(steps[0]))
    return w


@scenario("the reduction is slower since a step")
def _(rng):
    w = base(rng, draw_w(rng, 4, 200), red=logu(rng, 0.02, 0.08))
    s = draw_since(w)
    slow_network(w, np.arange(s, w.K), logu(rng, 0.1, 1.2), rng.uniform(0.03, 0.2), s)
    return w


@scenario("a network that is too slow in all steps")
def _(rng):
    w = base(rng, draw_w(rng, 4, 300), red=logu(rng, 0.5, 1.8))
    network_always(w)
    return w


# -- data


@scenario("batches whose cost is quadratic, balanced by load")
def _(rng):
    w = base(rng, dist=str(rng.choice(["lognormal", "gamma"])), cost="squares")
    uneven(w)
    return w


@scenario("padded batches")
def _(rng):
    w = base(rng, dist=str(rng.choice(["uniform", "lognormal", "gamma"])), cost="padded")
    uneven(w)
    return w


@scenario("long-tailed sizes that nobody balances")
def _(rng):
    w = base(rng, draw_w(rng, 4, 200), dist=str(rng.choice(["lognormal", "gamma"])), balance="none")
    uneven(w)
    return w


@scenario("one rank's shard has longer samples")
def _(rng):
    W = draw_w(rng)
    r = whole(rng, 0, W - 1)
    scale = np.ones(W)
    scale[r] = 1 + logu(rng, 0.12, 1.2)
    w = base(rng, W, dist=str(rng.choice(DISTS[1:])), rank_scale=scale, gsd=rng.uniform(0.12, 0.3))
    uneven(w, (r,))
    return w


@scenario("counts per rank that differ throughout")
def _(rng):
    W = draw_w(rng, 6, 64)
    ranks = tuple(
        sorted(int(x) for x in rng.choice(W, whole(rng, 1, max(1, W // 5)), replace=False))
    )
    c = np.ones(W)
    c[list(ranks)] = 1 + logu(rng, 0.2, 1.0)
    w = base(
        rng, W, dist="constant", counts=c[None, :], gsd=rng.uniform(0.12, 0.3), n=whole(rng, 4, 20)
    )
    uneven(w, ranks)
    return w


@scenario("counts per batch that differ from step to step")
def _(rng):
    W = draw_w(rng)
    K = draw_k(rng, W)
    w = base(rng, W, K, dist=str(rng.choice(DISTS)), cost="count", n=whole(rng, 8, 20),
             counts=rng.lognormal(0, rng.uniform(0.1, 0.4), (K, W)))  # fmt: skip
    uneven(w)
    return w


# -- between


@scenario("a checkpoint every n steps")
def _(rng):
    w = base(rng)
    n = whole(rng, 8, min(100, w.K // 3))
    time_between(w, list(range(n - 1, w.K, n)), logu(rng, 0.5, 30), rng.uniform(0.02, 0.2))
    return w


@scenario("long evaluations, few of them")
def _(rng):
    w = base(rng)
    n = whole(rng, w.K // 5, int(w.K / 2.2))
    time_between(w, list(range(whole(rng, 5, n), w.K, n)), logu(rng, 4, 80), rng.uniform(0.01, 0.1))
    return w


@scenario("a script that does much between the steps")
def _(rng):
    w = base(rng, bet=logu(rng, 0.5, 1.8))
    w.effects.append(Effect("between", (), None, None, zero_bet=True, least=0.30))
    return w


# -- planning


@scenario("planning that is slow")
def _(rng):
    w = base(rng, first0=True, seg=int(round(logu(rng, 6, 60))), plan=0.0)
    slow_planning(w, logu(rng, 0.4, 15), rng.uniform(0.05, 0.3))
    return w


@scenario("planning that becomes slow")
def _(rng):
    w = base(rng, first0=True, seg=int(round(logu(rng, 6, 40))))
    slow_planning(w, logu(rng, 0.5, 15), rng.uniform(0.05, 0.3), begin=whole(rng, 2, 6))
    return w


# -- two causes at once


@scenario("two: a slow rank and checkpoints")
def _(rng):
    w = base(rng)
    slow_since(
        w, some_ranks(w, 1), 1 + logu(rng, 0.1, 1.5), None if rng.random() < 0.4 else draw_since(w)
    )
    n = whole(rng, 8, min(80, w.K // 4))
    time_between(w, list(range(n - 1, w.K, n)), logu(rng, 0.8, 25), rng.uniform(0.02, 0.2))
    return w


@scenario("two: ranks slow since different steps")
def _(rng):
    w = base(rng, draw_w(rng, 6, 64))
    one = some_ranks(w, 1)
    other = some_ranks(w, 1, one)
    s = draw_since(w, 0.1, 0.4)
    t = draw_since(w, 0.45, 0.8)
    need(t - s >= 40)
    f = 1 + logu(rng, 0.1, 0.8)
    slow_since(w, one, f, s)
    slow_since(w, other, f + logu(rng, 0.15, 1.2), t)
    return w


@scenario("two: one rank collects garbage, another is slow")
def _(rng):
    w = base(rng, draw_w(rng, 5, 64))
    one = some_ranks(w, 1)
    slow_since(w, one, 1 + logu(rng, 0.1, 0.8), None if rng.random() < 0.5 else draw_since(w))
    _, steps = draw_period(w, 5, 40)
    pauses(w, "periodic", some_ranks(w, 1, one), steps, logu(rng, 0.8, 8), rng.uniform(0, 0.2))
    return w


@scenario("two: long-tailed sizes and a congested switch")
def _(rng):
    w = base(rng, dist=str(rng.choice(["lognormal", "gamma"])), balance="none")
    uneven(w)
    n = whole(rng, 15, max(16, w.K // 3))
    eps = spaced(w, 1, lambda: n)
    slow_network(w, np.arange(*eps[0]), logu(rng, 0.3, 3), rng.uniform(0.05, 0.3), eps[0][0])
    return w


@scenario("two: one node's loaders wait, and a rank elsewhere is slow")
def _(rng):
    per = int(rng.choice([2, 4, 8]))
    w = base(rng, per * whole(rng, 3, 64 // per), per=per)
    ranks = one_node(w)
    eps = spaced(w, whole(rng, 1, 3), lambda: whole(rng, 5, 30))
    steps = np.concatenate([np.arange(a, b) for a, b in eps])
    wait_for_loader(w, ranks, steps, logu(rng, 0.5, 5), rng.uniform(0.05, 0.3), eps[0][0])
    slow_since(
        w,
        some_ranks(w, 1, ranks),
        1 + logu(rng, 0.1, 0.8),
        None if rng.random() < 0.5 else draw_since(w),
    )
    return w


@scenario("two: throttling that grows, and planning that is slow")
def _(rng):
    w = base(rng, first0=True, seg=int(round(logu(rng, 8, 40))), plan=0.0)
    slow_planning(w, logu(rng, 0.6, 8), rng.uniform(0.05, 0.3))
    slow_growing(
        w,
        some_ranks(w, 1),
        1 + logu(rng, 0.3, 2.0),
        draw_since(w, 0.1, 0.5),
        str(rng.choice(["linear", "then flat"])),
    )
    return w


@scenario("two: padded batches and evaluations")
def _(rng):
    w = base(rng, dist=str(rng.choice(["uniform", "lognormal", "gamma"])), cost="padded")
    uneven(w)
    n = whole(rng, w.K // 8, w.K // 3)
    time_between(w, list(range(whole(rng, 5, n), w.K, n)), logu(rng, 2, 40), rng.uniform(0.01, 0.1))
    return w


@scenario("two: rare pauses of a rank, and a slower reduction since a step")
def _(rng):
    w = base(rng, red=logu(rng, 0.01, 0.06))
    eps = spaced(w, whole(rng, 2, 6), lambda: 1, start=3, end=3)
    pauses(
        w,
        "transient",
        some_ranks(w, 1),
        [a for a, _ in eps],
        logu(rng, 2, 20),
        rng.uniform(0, 0.25),
    )
    s = draw_since(w)
    slow_network(w, np.arange(s, w.K), logu(rng, 0.1, 0.8), rng.uniform(0.03, 0.2), s)
    return w


@scenario("two: cron jobs of different periods on two ranks")
def _(rng):
    w = base(rng, draw_w(rng, 5, 64), K=whole(rng, 200, 600))
    p, a = draw_period(w, 6, 25)
    q, b = draw_period(w, 6, 60)
    need(abs(p - q) >= 4 and p % q != 0 and q % p != 0)
    one = some_ranks(w, 1)
    pauses(w, "periodic", one, a, logu(rng, 0.4, 4), rng.uniform(0, 0.15))
    pauses(w, "periodic", some_ranks(w, 1, one), b, logu(rng, 0.8, 8), rng.uniform(0, 0.15))
    return w


@scenario("two: a slow node, and a noisy neighbour of another rank")
def _(rng):
    per = int(rng.choice([2, 4, 8]))
    w = base(rng, per * whole(rng, 3, 64 // per), per=per)
    ranks = one_node(w)
    f = 1 + logu(rng, 0.1, 0.6)
    slow_since(w, ranks, f, None if rng.random() < 0.5 else draw_since(w, 0.1, 0.5))
    eps = spaced(w, whole(rng, 2, 4), lambda: whole(rng, 5, 30))
    slow_for_a_while(w, some_ranks(w, 1, ranks), f + logu(rng, 0.3, 2.5), eps)
    return w


@scenario("two: one rank is slow for good and pauses at a period")
def _(rng):
    w = base(rng)
    r = some_ranks(w, 1)
    slow_since(
        w, r, 1 + logu(rng, 0.1, 0.9), None if rng.random() < 0.5 else draw_since(w, 0.15, 0.6)
    )
    _, steps = draw_period(w, 6, 40)
    pauses(w, "periodic", r, steps, logu(rng, 0.8, 8), rng.uniform(0, 0.15))
    return w


@scenario("two: a slow disk of one rank, and a script that does much between the steps")
def _(rng):
    w = base(rng, bet=logu(rng, 0.55, 1.5))
    w.effects.append(Effect("between", (), None, None, zero_bet=True, least=0.30))
    s = None if rng.random() < 0.4 else draw_since(w)
    wait_for_loader(
        w, some_ranks(w, 1), np.arange(s or 0, w.K), logu(rng, 0.12, 1.5), rng.uniform(0.05, 0.3), s
    )
    return w


# ---------------------------------------------------------------------------------------------- scenarios without a cause


@healthy("normal noise")
def _(rng):
    return base(rng, shape="normal")


@healthy("lognormal noise, strong")
def _(rng):
    return base(rng, shape="lognormal", sd=rng.uniform(0.04, 0.08))


@healthy("noise with a heavy tail of up to 10 %")
def _(rng):
    return base(rng, shape="heavy", sd=rng.uniform(0.008, 0.025))


@healthy("very little noise")
def _(rng):
    return base(rng, sd=rng.uniform(0.0005, 0.004))


@healthy("very many ranks")
def _(rng):
    return base(rng, int(rng.choice([512, 768, 1024])), per=8)


@healthy("four ranks")
def _(rng):
    return base(rng, 4, per=int(rng.choice([1, 2, 4])))


@healthy("uneven sizes, balanced by a quadratic cost")
def _(rng):
    return base(rng, dist=str(rng.choice(DISTS[1:])), cost="squares", balance="cost")


@healthy("uneven sizes, balanced by padded cost")
def _(rng):
    return base(rng, dist=str(rng.choice(DISTS[1:])), cost="padded", balance="cost")


@healthy("machines that differ by less than 2 %")
def _(rng):
    W = draw_w(rng)
    per = int(rng.choice([1, 2, 4, 8]))
    each = rng.uniform(-0.008, 0.008, -(-W // per))
    return base(
        rng,
        W,
        per=per,
        speed=1 + np.repeat(each, per)[:W] + rng.uniform(-0.001, 0.001, W),
        sd=logu(rng, 0.004, 0.05),
    )


@healthy("a constant small loader time")
def _(rng):
    return base(rng, loader=rng.uniform(0.01, 0.03))


@healthy("a short reduction in all steps")
def _(rng):
    return base(rng, red=rng.uniform(0.08, 0.17))


@healthy("a small constant time between steps")
def _(rng):
    return base(rng, bet=rng.uniform(0.04, 0.15))


@healthy("the global size varies a lot from step to step")
def _(rng):
    return base(rng, gsd=rng.uniform(0.3, 0.6))


@healthy("one fast rank")
def _(rng):
    W = draw_w(rng)
    speed = 1 + rng.uniform(-0.005, 0.005, W)
    speed[whole(rng, 0, W - 1)] = rng.uniform(0.65, 0.9)
    return base(rng, W, speed=speed)


@healthy("few steps")
def _(rng):
    return base(rng, K=whole(rng, 12, 50), seg=whole(rng, 5, 20), plan=0.0)


@healthy("ranks that sit out some steps")
def _(rng):
    return base(rng, draw_w(rng, 5, 64), idle=True)


@healthy("a pause that costs next to nothing")
def _(rng):
    w = base(rng, K=whole(rng, 250, 600))
    e = pauses(
        w, "transient", some_ranks(w, 1), [whole(rng, 5, w.K - 5)], rng.uniform(0.3, 0.9), 0.0
    )
    e.truth = False
    return w


# ---------------------------------------------------------------------------------------------------------- checks


def check(c: Case, is_healthy: bool) -> list[str]:
    bad: list[str] = []

    def want(ok: bool, what: str) -> None:
        if not ok:
            bad.append(what)

    K, W = c.samples.shape
    for key in ("samples", "load", "squares", "longest", "data_s", "compute_s", "sync_s"):
        x = getattr(c, key)
        want(x.shape == (K, W) and x.dtype == np.float64, f"shape of {key}")
        want(bool(np.isfinite(x).all() and (x >= 0).all()), f"values of {key}")
    want(c.between_s.shape == (K,) and bool((c.between_s >= 0).all()), "between_s")
    want(c.first.shape == (K,) and c.first.dtype == bool and len(c.nodes) == W, "first, nodes")
    act = c.samples > 0
    want(bool(act.any(1).all()), "a step without ranks")
    for key in ("load", "squares", "longest", "compute_s"):
        want(bool(((getattr(c, key) > 0) == act).all()), f"{key} where a rank takes no part")
    want(bool(((c.sync_s == 0) & (c.data_s == 0))[~act].all()), "times where a rank takes no part")
    e = 1 + 1e-9
    want(bool((c.squares <= c.longest * c.load * e + 1e-12).all()), "squares > longest · load")
    want(bool((c.squares * c.samples * e >= c.load**2).all()), "squares < load² / samples")
    want(bool((c.longest <= c.load * e).all()), "longest > load")
    want(bool((c.samples == np.round(c.samples)).all()), "counts that are no whole numbers")
    # the wall time as documented; everyone ends at the same time, up to jitter
    end = np.where(act, c.data_s + c.compute_s + c.sync_s, np.nan)
    slowest = np.where(act, c.data_s + c.compute_s, -np.inf).max(1)
    red = np.where(act, c.sync_s, np.inf).min(1)
    step = slowest + red
    want(
        bool((np.nanmax(end, 1) - np.nanmin(end, 1) <= 0.005 * step + 1e-9).all()),
        "ranks end at different times",
    )
    want(
        bool((np.abs(np.nanmedian(end, 1) - step) <= 0.005 * step + 1e-9).all()),
        "wall time of a step",
    )
    wall = float((step + c.between_s).sum())
    want(
        abs(wall - wall_time(c.data_s, c.compute_s, c.sync_s, c.between_s, act)) < 1e-9 * wall,
        "wall time",
    )
    kinds = {"node", "transient", "periodic", "input", "data", "network", "between", "planning"}
    for t in c.truths:
        want(t.kind in kinds, "kind")
        want(0.02 <= t.cost_s / wall <= 0.61, f"{t.kind} costs {t.cost_s / wall:.3f}")
        want(t.since is None or 0 < t.since < K, "since")
        want(list(t.ranks) == sorted(set(t.ranks)) and all(0 <= r < W for r in t.ranks), "ranks")
        want(
            bool(t.ranks) == (t.kind in ("node", "transient", "periodic"))
            or t.kind in ("input", "data"),
            "ranks of the kind",
        )
        want(t.sigmas is None or (t.since is not None and t.sigmas > 0), "sigmas")
        if t.kind == "planning":
            want(
                (t.since is None and bool(c.first[0]))
                or (t.since is not None and bool(c.first[t.since])),
                "planning's since",
            )
    want(is_healthy == (not c.truths), "truths")
    if not is_healthy:
        return bad
    # no more than noise: each quantity by itself
    med = np.array(
        [
            np.median(c.compute_s[act[:, r], r] / np.median(c.compute_s, 1)[act[:, r]])
            for r in range(W)
        ]
    )
    want(med.max() < 1.05, f"a rank is {med.max():.3f} × slower")
    want(red.sum() < 0.2 * wall, "the reduction is long")
    want(
        np.maximum(red - 1.5 * np.median(red), 0).sum() < 0.004 * wall,
        "the reduction is long at times",
    )
    want(c.between_s.sum() < 0.2 * wall, "much time between steps")
    want(
        np.maximum(c.between_s - 2 * np.median(c.between_s), 0).sum() < 0.004 * wall,
        "between at times",
    )
    plain = c.data_s[~c.first]
    want(
        c.data_s[~c.first].max(1).sum() < 0.05 * wall or np.median(plain) * K < 0.04 * wall,
        "ranks wait for loaders",
    )
    typical = np.median(plain)
    want(
        np.maximum(np.median(c.data_s[c.first], 1) - typical, 0).sum() < 0.005 * wall,
        "ranks wait for plans",
    )
    per_rank = plain.mean(0)
    want((per_rank.max() - np.median(per_rank)) * K < 0.005 * wall, "a rank waits for its loader")
    with np.errstate(invalid="ignore"):
        mean = np.nanmean(np.where(act, c.compute_s, np.nan), 1, keepdims=True)
        late = np.where(act, c.compute_s / mean - 1, 0)
    want((np.maximum(late - 0.4, 0).max(1) * mean[:, 0]).sum() < 0.004 * wall, "pauses")
    half = K // 2
    cost = c.compute_s.sum(1) / c.load.sum(1)
    drift = abs(np.median(cost[:half]) / np.median(cost[half:]) - 1)
    want(drift < 0.06 or K < 60, f"all ranks change their speed by {drift:.3f}")
    return bad


def main() -> None:
    failed = 0
    for table, is_healthy in ((KINDS, False), (HEALTHY, True)):
        for name, make in table.items():
            lines = []
            for seed in range(3):
                c = make(np.random.default_rng([zlib.crc32(name.encode()), seed]), seed)
                bad = check(c, is_healthy)
                failed += bool(bad)
                act = c.samples > 0
                wall = wall_time(c.data_s, c.compute_s, c.sync_s, c.between_s, act)
                told = ", ".join(
                    f"{t.kind} {100 * t.cost_s / wall:.0f} % since {t.since}"
                    f" of {len(t.ranks)} σ {'-' if t.sigmas is None else format(t.sigmas, '.1f')}"
                    for t in c.truths
                )
                lines.append(
                    f"    W {c.samples.shape[1]:4} K {c.samples.shape[0]:3}  {told}"
                    + (f"  BAD: {bad}" if bad else "")
                )
            print(name, *lines, sep="\n")
    two = sum(n.startswith("two:") for n in KINDS)
    print(
        f"{len(KINDS)} kinds with causes, {two} of them with two, {len(HEALTHY)} healthy; {failed} bad cases"
    )
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
