"""Scenarios for forecasts of step times under other presets.

KINDS: what happens, in a sentence -> make(rng, seed), which gives {"scenario": ..., "at": ...}. Each seed is another case of the same kind.
After `at` nothing begins that was not there before: what lasts goes on, what recurs recurs, what is over stays over.
Run this file to check all kinds against the documentation of scenarios.
"""

import json
import math

import numpy as np

KINDS = {}
AFTER = 300  # steps that a scenario has after `at`, at least
MOST_VALUES = 40_000  # of sizes drawn here

# ---- drawing -------------------------------------------------------------------------------------------------------------------------------


def kind(sentence):
    """Enters a function into KINDS."""

    def enter(make):
        assert sentence not in KINDS, sentence
        KINDS[sentence] = make
        return make

    return enter


def real(rng, low, high):
    """A float between low and high."""
    return neat(rng.uniform(low, high))


def wide(rng, low, high):
    """A float between low and high, evenly on a logarithmic scale."""
    return neat(math.exp(rng.uniform(math.log(low), math.log(high))))


def whole(rng, low, high):
    """An int from low to high, both included."""
    return int(rng.integers(low, high + 1))


def one_of(rng, *values):
    """One of the values."""
    return values[int(rng.integers(len(values)))]


def some(rng, workers, count):
    """That many ranks, sorted."""
    return sorted(int(r) for r in rng.choice(workers, count, replace=False))


def neat(x):
    """A plain float of five significant digits."""
    return float(f"{float(x):.5g}")


def neats(xs):
    """Plain floats of five significant digits."""
    return [neat(x) for x in xs]


def when(rng, low=60, high=250):
    """The step of the forecast."""
    return whole(rng, low, high)


# ---- sizes ---------------------------------------------------------------------------------------------------------------------------------


def samples_for(rng, batch, short=25, long=700):
    """How many samples a data set has: from `short` to `long` steps of an epoch, seldom a whole number of them."""
    steps = min(wide(rng, short, long), max(short, MOST_VALUES / batch))
    return int(steps * batch) + whole(rng, 0, batch - 1)


def by(distribution, mean, samples, dif=None, least=None, most=None):
    """Sizes by distribution, as a scenario names them."""
    sizes = {"distribution": distribution, "mean": neat(mean), "samples": int(samples)}
    if dif is not None:
        sizes["dif"] = neat(dif)
    if least is not None:
        sizes["min"] = neat(least)
    if most is not None:
        sizes["max"] = neat(most)
    return sizes


def constant(rng, batch):
    """Samples of equal size."""
    return by("constant", one_of(rng, 1, 1, 10, 224), samples_for(rng, batch, 25, 700))


def lognormal(rng, batch, low, high):
    """Lognormal sizes, whose DIF is `low` to `high` times their mean."""
    mean = wide(rng, 10, 500)
    return by("lognormal", mean, samples_for(rng, batch), mean * rng.uniform(low, high))


def pareto(rng, batch, low=1.3, high=2.8):
    """Pareto sizes: most are small, some very large, up to a cut as data sets have it."""
    shape, least = rng.uniform(low, high), wide(rng, 2, 50)
    values = least * (1 + rng.pareto(shape, samples_for(rng, batch)))
    return {"values": neats(np.minimum(values, least * rng.uniform(60, 200)))}


def bimodal(rng, batch):
    """Short samples and long ones, with little in between."""
    count = samples_for(rng, batch)
    short = wide(rng, 5, 50)
    long = short * rng.uniform(3, 15)
    is_long = rng.random(count) < rng.uniform(0.05, 0.5)
    values = np.where(is_long, long * rng.normal(1, 0.1, count), short * rng.normal(1, 0.15, count))
    return {"values": neats(np.maximum(values, short / 10))}


def text(rng, batch, most=None):
    """Lengths of texts in tokens: mostly sentences, some paragraphs, and documents that are cut at the longest length allowed."""
    count = samples_for(rng, batch)
    most = most or one_of(rng, 128, 256, 512, 1024)
    parts = rng.dirichlet([6, 3, 1])
    which = rng.choice(3, count, p=parts)
    medians = np.array([most / 20, most / 6, most / 1.2])[which]
    values = medians * np.exp(rng.normal(0, np.array([0.5, 0.6, 0.5])[which]))
    return {"values": [float(v) for v in np.clip(np.rint(values), 3, most)]}


def speech(rng, batch):
    """Seconds of utterances: a hump with a tail to the left, and a heap at the cut."""
    count = samples_for(rng, batch)
    most = rng.uniform(12, 25)
    return {
        "values": neats(
            most
            * np.minimum(rng.beta(rng.uniform(2, 6), rng.uniform(1.2, 2.5), count) * 1.08 + 0.02, 1)
        )
    }


def few_values(rng, batch):
    """Sizes that take only a few values, such as images of some fixed resolutions."""
    levels = np.array([64, 128, 224, 384]) ** 2 / 224**2
    return {
        "values": neats(rng.choice(levels, samples_for(rng, batch), p=rng.dirichlet([2, 3, 3, 1])))
    }


def drawn(sizes):
    """Some sizes of these, to scale times by."""
    if "values" in sizes:
        return np.asarray(sizes["values"])
    rng, mean, dif = np.random.default_rng(1), sizes["mean"], sizes.get("dif", 0)
    name = sizes["distribution"]
    if name == "constant" or not dif:
        values = np.full(1000, mean)
    elif name == "uniform":
        values = rng.uniform(mean - dif * 3**0.5, mean + dif * 3**0.5, 5000)
    elif name == "normal":
        values = rng.normal(mean, dif, 5000)
    elif name == "gamma":
        values = rng.gamma((mean / dif) ** 2, dif**2 / mean, 5000)
    else:
        spread = math.log(1 + (dif / mean) ** 2)
        values = np.exp(rng.normal(math.log(mean) - spread / 2, spread**0.5, 5000))
    return np.clip(values, sizes.get("min", mean / 100), sizes.get("max", np.inf))


def load(sizes, samples, kappa=0.0, padded=False):
    """The mean effective load of a batch of that many samples."""
    values = drawn(sizes)
    if padded:
        longest = np.random.default_rng(2).choice(values, (400, max(1, round(samples)))).max(axis=1)
        return float(samples * (longest + kappa * longest**2).mean())
    return float(samples * (values + kappa * values**2).mean())


# ---- devices -------------------------------------------------------------------------------------------------------------------------------


def devices(
    rng,
    sizes,
    workers,
    batch,
    compute_s=None,
    kappa=0.0,
    padded=False,
    per_sample=None,
    per_step=None,
    noise=None,
):
    """Devices that compute an equal share in about compute_s: `per_sample` and `per_step` of it for samples and steps, the rest for the load."""
    compute_s = wide(rng, 0.03, 1.0) if compute_s is None else compute_s
    per_sample = rng.choice([0.0, rng.uniform(0.02, 0.2)]) if per_sample is None else per_sample
    per_step = rng.uniform(0.03, 0.25) if per_step is None else per_step
    samples = batch / workers
    made = {
        "unit_s": neat(
            compute_s * (1 - per_sample - per_step) / load(sizes, samples, kappa, padded)
        ),
        "step_s": neat(compute_s * per_step),
        "noise": real(rng, 0.005, 0.05) if noise is None else neat(noise),
    }
    if per_sample:
        made["sample_s"] = neat(compute_s * per_sample / samples)
    if kappa or padded:
        made["cost"] = {"kappa": neat(kappa), "padded": bool(padded)}
    return made


def quadratic(rng, sizes, low=0.1, high=1.5):
    """A kappa with which a sample of mean size costs 1 + low to 1 + high times its size."""
    return neat(rng.uniform(low, high) / drawn(sizes).mean())


def slow(workers, ranks, factor):
    """Factors of which those of some ranks are larger."""
    return [neat(factor) if r in set(ranks) else 1.0 for r in range(workers)]


def seconds(made, sizes, workers, batch):
    """About what an equal share takes on a device of factor 1."""
    cost = made.get("cost", {})
    n = batch / workers
    mean = {k: float(np.mean(made.get(k, 0.0))) for k in ("unit_s", "sample_s", "step_s")}
    return (
        mean["unit_s"] * load(sizes, n, cost.get("kappa", 0.0), cost.get("padded", False))
        + mean["sample_s"] * n
        + mean["step_s"]
    )


def ring(rng, workers, seconds_):
    """A network whose all-reduce takes about so many seconds."""
    bandwidth = one_of(rng, 1.25e8, 1.25e9, 3.1e9, 12.5e9, 50e9)
    latency = min(wide(rng, 5e-6, 1e-4), 0.3 * seconds_ / (2 * (workers - 1)))
    made = {"latency_s": neat(latency), "bandwidth": bandwidth}
    made["bytes"] = float(
        max(
            1e5,
            round(
                (seconds_ - 2 * (workers - 1) * latency) * bandwidth * workers / (2 * (workers - 1))
            ),
        )
    )
    if rng.random() < 0.2:
        made["fixed_s"] = real(rng, 1e-4, 2e-3)
    return made


def case(
    rng, seed, workers, batch, sizes, made, at, policy="bsp", parameters=None, exchange=None, **more
):
    """A scenario and its step of the forecast. `exchange`: the share of computing that the all-reduce takes."""
    exchange = wide(rng, 0.02, 0.4) if exchange is None else exchange
    scenario = {
        "name": f"forecast-{policy}-{seed}",
        "workers": int(workers),
        "global_batch": int(batch),
        "steps": int(at + AFTER + whole(rng, 0, 60)),
        "seed": int(seed),
        "sizes": sizes,
        "devices": made,
        "communication": ring(rng, workers, exchange * seconds(made, sizes, workers, batch)),
        "policy": policy,
    }
    if parameters:
        scenario["parameters"] = parameters
    if rng.random() < 0.25:
        scenario["drop_last"] = True
    scenario.update(more)
    return {"scenario": scenario, "at": int(at)}


def cluster(rng, low=4, high=64, per_rank=(2, 64), most=2048, least=16):
    """Workers and a global batch: usually divisible, sometimes not."""
    workers = one_of(
        rng,
        *[w for w in (4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 128, 192, 256) if low <= w <= high],
    )
    batch = workers * round(wide(rng, *per_rank))
    if rng.random() < 0.25:
        batch += whole(rng, 1, workers - 1)
    return workers, int(min(most, max(least, workers, batch)))


LASTING = 100_000  # steps of a slowdown that does not end


def lasting(ranks, factor, first_step):
    """A slowdown that began and goes on."""
    return {"ranks": ranks, "factor": neat(factor), "first_step": int(first_step), "steps": LASTING}


def passing(ranks, factor, first_step, steps):
    """A slowdown that comes once and is over."""
    return {
        "ranks": ranks,
        "factor": neat(factor),
        "first_step": int(first_step),
        "steps": int(steps),
    }


def recurring(ranks, factor, first_step, steps, every, chance=None):
    """A slowdown that comes again; with a chance: perhaps."""
    made = {
        "ranks": ranks,
        "factor": neat(factor),
        "first_step": int(first_step),
        "steps": int(steps),
        "every": int(every),
    }
    if chance is not None:
        made["chance"] = neat(chance)
    return made


def everyone(workers):
    """All ranks."""
    return list(range(workers))


# ---- under bsp: equal ranks, and what samples are like ----------------------------------------------------------------------------------------


@kind("bsp: all ranks are alike, all samples are equal, and there is next to no noise")
def quiet(rng, seed):
    """Nothing can be gained, and the forecast should say so."""
    workers, batch = cluster(rng)
    sizes = constant(rng, batch)
    made = devices(rng, sizes, workers, batch, noise=one_of(rng, 0.0, 0.0, 0.002, 0.005, 0.01))
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: all ranks are alike, samples are equal, and times are noisy, 5 to 10 %")
def noisy(rng, seed):
    """Only chance makes ranks wait."""
    workers, batch = cluster(rng)
    sizes = constant(rng, batch)
    made = devices(rng, sizes, workers, batch, noise=rng.uniform(0.05, 0.1))
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: all ranks are alike, and sizes are normal")
def normal_sizes(rng, seed):
    """Moderate imbalance by data."""
    workers, batch = cluster(rng, per_rank=(4, 64))
    mean = wide(rng, 10, 500)
    sizes = by("normal", mean, samples_for(rng, batch), mean * rng.uniform(0.05, 0.35))
    return case(rng, seed, workers, batch, sizes, devices(rng, sizes, workers, batch), when(rng))


@kind("bsp: all ranks are alike, and sizes are lognormal of a small spread")
def lognormal_narrow(rng, seed):
    """Sizes differ by some ten per cent."""
    workers, batch = cluster(rng, per_rank=(4, 64))
    sizes = lognormal(rng, batch, 0.1, 0.4)
    return case(rng, seed, workers, batch, sizes, devices(rng, sizes, workers, batch), when(rng))


@kind("bsp: all ranks are alike, and each has few samples of lognormal sizes of a large spread")
def lognormal_wide(rng, seed):
    """A large sample decides a step."""
    workers, batch = cluster(rng, low=8, per_rank=(1, 6))
    sizes = lognormal(rng, batch, 0.7, 2.0)
    return case(rng, seed, workers, batch, sizes, devices(rng, sizes, workers, batch), when(rng))


@kind("bsp: few ranks have very many samples each, so that sizes average out")
def many_samples(rng, seed):
    """Large batches."""
    workers = one_of(rng, 4, 4, 6, 8)
    batch = one_of(rng, 1000, 1024, 1536, 2048)
    sizes = lognormal(rng, batch, 0.3, 1.2)
    return case(rng, seed, workers, batch, sizes, devices(rng, sizes, workers, batch), when(rng))


@kind("bsp: each of many ranks has one or two samples of gamma sizes")
def one_or_two(rng, seed):
    """Videos or volumes that hardly fit into memory; the batch often cannot be divided evenly."""
    workers = one_of(rng, 16, 24, 32, 48, 64)
    batch = whole(rng, workers, 2 * workers)
    mean = wide(rng, 20, 100)
    sizes = by("gamma", mean, samples_for(rng, batch, 40, 700), mean * rng.uniform(0.4, 1.4))
    made = devices(rng, sizes, workers, batch, compute_s=wide(rng, 0.1, 2))
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: sizes are Pareto, so that single samples are as large as a batch")
def pareto_sizes(rng, seed):
    """A heavy tail."""
    workers, batch = cluster(rng, per_rank=(3, 40))
    sizes = pareto(rng, batch)
    return case(rng, seed, workers, batch, sizes, devices(rng, sizes, workers, batch), when(rng))


@kind("bsp: samples are short or long, with nothing in between")
def bimodal_sizes(rng, seed):
    """Two heaps of sizes."""
    workers, batch = cluster(rng, per_rank=(3, 40))
    sizes = bimodal(rng, batch)
    return case(rng, seed, workers, batch, sizes, devices(rng, sizes, workers, batch), when(rng))


@kind("bsp: images have a few fixed resolutions")
def resolutions(rng, seed):
    """Sizes of few values."""
    workers, batch = cluster(rng, per_rank=(4, 40))
    sizes = few_values(rng, batch)
    return case(rng, seed, workers, batch, sizes, devices(rng, sizes, workers, batch), when(rng))


@kind("bsp: texts are padded to the longest of a batch")
def padded_text(rng, seed):
    """A long text makes all of its batch long."""
    workers, batch = cluster(rng, high=32, per_rank=(4, 64))
    sizes = text(rng, batch)
    return case(
        rng,
        seed,
        workers,
        batch,
        sizes,
        devices(rng, sizes, workers, batch, padded=True),
        when(rng),
    )


@kind("bsp: texts are padded, and attention makes long ones cost more than their length")
def padded_attention(rng, seed):
    """Padding and a quadratic part."""
    workers, batch = cluster(rng, high=32, per_rank=(4, 48))
    sizes = text(rng, batch)
    made = devices(rng, sizes, workers, batch, kappa=quadratic(rng, sizes, 0.05, 0.8), padded=True)
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: sequences are packed, and long ones cost more than their length")
def packed_attention(rng, seed):
    """A quadratic part without padding."""
    workers, batch = cluster(rng, per_rank=(2, 32))
    sizes = one_of(rng, text, lambda r, b: lognormal(r, b, 0.4, 1.2))(rng, batch)
    made = devices(rng, sizes, workers, batch, kappa=quadratic(rng, sizes))
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: utterances of speech are padded on ranks of which one is somewhat slower")
def padded_speech(rng, seed):
    """Little padding, because most are about as long."""
    workers, batch = cluster(rng, high=16, per_rank=(4, 32))
    sizes = speech(rng, batch)
    made = devices(rng, sizes, workers, batch, padded=True)
    made["factors"] = slow(workers, some(rng, workers, 1), rng.uniform(1.1, 1.6))
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: a small data set is gone through many times, in epochs of few steps")
def short_epochs(rng, seed):
    """Each epoch ends with a smaller step, if it is not dropped."""
    workers, batch = cluster(rng, high=16, per_rank=(4, 32))
    mean = wide(rng, 10, 300)
    samples = batch * whole(rng, 8, 30) + whole(rng, 0, batch - 1)
    sizes = by("lognormal", mean, samples, mean * rng.uniform(0.2, 1.0))
    made = devices(rng, sizes, workers, batch)
    if rng.random() < 0.5:
        made["factors"] = slow(workers, some(rng, workers, 1), rng.uniform(1.2, 2.5))
    return case(rng, seed, workers, batch, sizes, made, when(rng))


# ---- under bsp: what a step costs --------------------------------------------------------------------------------------------------------------


@kind("bsp: each sample costs the same, whatever its size says")
def per_sample(rng, seed):
    """Images resized to one resolution, with sizes of files that mean next to nothing."""
    workers, batch = cluster(rng, per_rank=(4, 64))
    sizes = lognormal(rng, batch, 0.3, 1.0)
    made = devices(rng, sizes, workers, batch, per_sample=rng.uniform(0.8, 0.93), per_step=0.05)
    if rng.random() < 0.5:
        made["factors"] = slow(
            workers, some(rng, workers, max(1, workers // 4)), rng.uniform(1.2, 2)
        )
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: most of a step is a fixed cost, and little depends on the batch")
def per_step(rng, seed):
    """A small model that waits for launches of kernels."""
    workers, batch = cluster(rng, per_rank=(2, 16))
    sizes = lognormal(rng, batch, 0.3, 1.2)
    made = devices(
        rng, sizes, workers, batch, compute_s=wide(rng, 0.02, 0.2), per_step=rng.uniform(0.5, 0.8)
    )
    if rng.random() < 0.5:
        made["factors"] = slow(
            workers, some(rng, workers, max(1, workers // 8)), rng.uniform(1.3, 2.5)
        )
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: ranks differ in the fixed cost of a step and not in their speed")
def uneven_step_cost(rng, seed):
    """Slow hosts with equal accelerators."""
    workers, batch = cluster(rng, high=32, per_rank=(4, 32))
    sizes = one_of(rng, constant, lambda r, b: lognormal(r, b, 0.1, 0.6))(rng, batch)
    made = devices(rng, sizes, workers, batch, per_step=0.15)
    made["step_s"] = neats(made["step_s"] * np.exp(rng.uniform(-0.7, 1.4, workers)))
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: each rank has its own cost of a unit, of a sample and of a step")
def three_costs(rng, seed):
    """Machines of several makes."""
    workers, batch = cluster(rng, high=16, per_rank=(6, 48))
    sizes = lognormal(rng, batch, 0.3, 1.0)
    made = devices(
        rng,
        sizes,
        workers,
        batch,
        per_sample=rng.uniform(0.1, 0.4),
        per_step=rng.uniform(0.05, 0.2),
    )
    for name, spread in (("unit_s", 0.4), ("sample_s", 0.5), ("step_s", 0.5)):
        made[name] = neats(made[name] * np.exp(rng.uniform(-spread, spread, workers)))
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: the network takes longer than computing")
def network_bound(rng, seed):
    """What could be gained in computing is a small part of a step."""
    workers, batch = cluster(rng, low=4, high=64, per_rank=(2, 32))
    sizes = lognormal(rng, batch, 0.2, 1.0)
    made = devices(rng, sizes, workers, batch, compute_s=wide(rng, 0.03, 0.4))
    if rng.random() < 0.5:
        made["factors"] = slow(workers, some(rng, workers, 1), rng.uniform(1.2, 2))
    return case(rng, seed, workers, batch, sizes, made, when(rng), exchange=rng.uniform(1.2, 5))


@kind("bsp: all ranks wait for their input longer than they compute")
def slow_input(rng, seed):
    """Too few loading processes."""
    workers, batch = cluster(rng, high=32, per_rank=(2, 48))
    sizes = lognormal(rng, batch, 0.2, 0.9)
    made = devices(rng, sizes, workers, batch)
    made["data_s"] = neat(seconds(made, sizes, workers, batch) * rng.uniform(0.8, 2.5))
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: some ranks wait for their input, because their storage is slow")
def slow_storage(rng, seed):
    """Computing is alike, loading is not."""
    workers, batch = cluster(rng, high=32, per_rank=(2, 48))
    sizes = one_of(rng, constant, lambda r, b: lognormal(r, b, 0.2, 0.8))(rng, batch)
    made = devices(rng, sizes, workers, batch)
    own = seconds(made, sizes, workers, batch)
    slow_ranks = some(rng, workers, whole(rng, 1, max(1, workers // 4)))
    usual, bad = own * rng.uniform(0.01, 0.05), own * rng.uniform(0.3, 1.2)
    made["data_s"] = [neat(bad if r in slow_ranks else usual) for r in range(workers)]
    return case(rng, seed, workers, batch, sizes, made, when(rng))


# ---- under bsp: ranks that differ ---------------------------------------------------------------------------------------------------------------


@kind("bsp: one rank is slow from the beginning")
def one_slow(rng, seed):
    """The usual straggler."""
    workers, batch = cluster(rng, per_rank=(4, 64))
    sizes = one_of(rng, constant, lambda r, b: lognormal(r, b, 0.1, 0.5))(rng, batch)
    made = devices(rng, sizes, workers, batch)
    made["factors"] = slow(workers, some(rng, workers, 1), wide(rng, 1.15, 6))
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: one rank is much faster than all others")
def one_fast(rng, seed):
    """A new machine among old ones."""
    workers, batch = cluster(rng, high=16, per_rank=(8, 64))
    sizes = one_of(rng, constant, lambda r, b: lognormal(r, b, 0.1, 0.7))(rng, batch)
    made = devices(rng, sizes, workers, batch)
    made["factors"] = slow(workers, some(rng, workers, 1), rng.uniform(0.3, 0.7))
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: half of the ranks are slow")
def half_slow(rng, seed):
    """Two makes of machines."""
    workers, batch = cluster(rng, per_rank=(4, 48))
    sizes = lognormal(rng, batch, 0.1, 1.0)
    made = devices(rng, sizes, workers, batch)
    half = workers // 2
    made["factors"] = [
        {"workers": workers - half, "factor": 1.0},
        {"workers": half, "factor": real(rng, 1.3, 3)},
    ]
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: half of the ranks are slow, and batches of uniform sizes are padded")
def half_slow_padded(rng, seed):
    """Speeds and padding at once."""
    workers, batch = cluster(rng, high=32, per_rank=(4, 32))
    mean = wide(rng, 20, 300)
    sizes = by("uniform", mean, samples_for(rng, batch), mean * rng.uniform(0.1, 0.5))
    made = devices(rng, sizes, workers, batch, padded=True)
    made["factors"] = slow(workers, some(rng, workers, workers // 2), rng.uniform(1.3, 2.5))
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: all ranks have different speeds")
def all_different(rng, seed):
    """No two machines are alike."""
    workers, batch = cluster(rng, per_rank=(6, 64))
    sizes = lognormal(rng, batch, 0.05, 0.8)
    made = devices(rng, sizes, workers, batch)
    made["factors"] = neats(np.exp(rng.uniform(0, rng.uniform(0.4, 1.4), workers)))
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: the ranks of some nodes are slow together")
def slow_nodes(rng, seed):
    """Nodes of four or eight ranks, of which one or two are throttled."""
    on_node = one_of(rng, 4, 8)
    nodes = whole(rng, 2, 6)
    workers = on_node * nodes
    batch = min(2048, workers * whole(rng, 3, 32))
    sizes = one_of(rng, lambda r, b: lognormal(r, b, 0.1, 0.9), bimodal)(rng, batch)
    made = devices(rng, sizes, workers, batch)
    bad = some(rng, nodes, whole(rng, 1, max(1, nodes // 3)))
    factor = real(rng, 1.2, 2.5)
    made["factors"] = [
        {"workers": on_node, "factor": factor if n in bad else 1.0} for n in range(nodes)
    ]
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: 96 to 256 ranks, of which some are slow, and sizes differ")
def large_cluster(rng, seed):
    """Many ranks with few samples each."""
    workers = one_of(rng, 96, 128, 192, 256)
    batch = min(2048, workers * whole(rng, 2, 8))
    sizes = lognormal(rng, batch, 0.2, 1.0)
    made = devices(rng, sizes, workers, batch)
    made["factors"] = slow(
        workers, some(rng, workers, whole(rng, 1, workers // 10)), rng.uniform(1.2, 2.5)
    )
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: the slow ranks have less memory, and limits say how many samples fit")
def limited_memory(rng, seed):
    """Fast ranks cannot take all that they could compute either."""
    workers, batch = cluster(rng, high=16, per_rank=(8, 48))
    sizes = lognormal(rng, batch, 0.1, 0.6)
    made = devices(rng, sizes, workers, batch)
    slow_ranks = some(rng, workers, max(1, workers // 3))
    made["factors"] = slow(workers, slow_ranks, rng.uniform(1.5, 3))
    equal = math.ceil(batch / workers)
    limits = [math.ceil(equal * (1.1 if r in slow_ranks else 1.35)) for r in range(workers)]
    return case(rng, seed, workers, batch, sizes, made, when(rng), limits=limits, profile=True)


# ---- under bsp: slowness that comes and goes ----------------------------------------------------------------------------------------------------


@kind("bsp: a rank became slow before the forecast and stays slow")
def became_slow(rng, seed):
    """The forecast must take it to go on."""
    workers, batch = cluster(rng, per_rank=(4, 64))
    sizes = one_of(rng, constant, lambda r, b: lognormal(r, b, 0.1, 0.7))(rng, batch)
    made = devices(rng, sizes, workers, batch)
    at = when(rng)
    made["slowdowns"] = [
        lasting(some(rng, workers, 1), wide(rng, 1.3, 4), at - whole(rng, 15, at // 2 + 10))
    ]
    return case(rng, seed, workers, batch, sizes, made, at)


@kind("bsp: some ranks became slow together only a few steps before the forecast and stay slow")
def just_became_slow(rng, seed):
    """Few steps tell of it, but they do so clearly."""
    workers, batch = cluster(rng, low=8, high=32, per_rank=(6, 48))
    sizes = one_of(rng, constant, lambda r, b: lognormal(r, b, 0.1, 0.4))(rng, batch)
    made = devices(rng, sizes, workers, batch, noise=rng.uniform(0.005, 0.03))
    at = when(rng)
    first = whole(rng, 0, workers - workers // 4)
    made["slowdowns"] = [
        lasting(
            list(range(first, first + workers // 4)), rng.uniform(1.6, 3), at - whole(rng, 8, 16)
        )
    ]
    return case(rng, seed, workers, batch, sizes, made, at)


@kind("bsp: a rank was slow for a while, and that was over before the forecast")
def was_slow(rng, seed):
    """The forecast must not take it to go on."""
    workers, batch = cluster(rng, per_rank=(4, 64))
    sizes = one_of(rng, constant, lambda r, b: lognormal(r, b, 0.1, 0.7))(rng, batch)
    made = devices(rng, sizes, workers, batch)
    at = when(rng, 70)
    over = at - whole(rng, 15, 30)
    steps = whole(rng, 15, min(60, over - 5))
    made["slowdowns"] = [
        passing(some(rng, workers, whole(rng, 1, 2)), wide(rng, 1.4, 5), over - steps, steps)
    ]
    return case(rng, seed, workers, batch, sizes, made, at)


@kind("bsp: all ranks were slow at the beginning, and that is long over")
def slow_beginning(rng, seed):
    """Caches were cold, or another job shared the cluster."""
    workers, batch = cluster(rng, high=32, per_rank=(4, 48))
    sizes = lognormal(rng, batch, 0.1, 0.8)
    made = devices(rng, sizes, workers, batch)
    at = when(rng, 80)
    made["slowdowns"] = [
        passing(everyone(workers), rng.uniform(1.3, 3), 0, whole(rng, 10, at // 3))
    ]
    return case(rng, seed, workers, batch, sizes, made, at)


@kind("bsp: one rank's slowness was over before another rank's began, which lasts")
def slowness_moved(rng, seed):
    """The other job moved from one node to the next."""
    workers, batch = cluster(rng, high=32, per_rank=(4, 48))
    sizes = one_of(rng, constant, lambda r, b: lognormal(r, b, 0.1, 0.6))(rng, batch)
    made = devices(rng, sizes, workers, batch)
    at = when(rng, 90)
    first, second = (int(r) for r in rng.permutation(workers)[:2])
    change = at - whole(rng, 15, 40)
    factor = rng.uniform(1.4, 3)
    made["slowdowns"] = [
        passing([first], factor, change - whole(rng, 20, 45), 15),
        lasting([second], factor * rng.uniform(0.8, 1.2), change),
    ]
    return case(rng, seed, workers, batch, sizes, made, at)


@kind("bsp: a rank grew slower in stages, and the last stage lasts")
def stages(rng, seed):
    """A device that heats up until its clock is at its least."""
    workers, batch = cluster(rng, high=32, per_rank=(4, 48))
    sizes = lognormal(rng, batch, 0.05, 0.5)
    made = devices(rng, sizes, workers, batch)
    at = when(rng, 100)
    ranks = some(rng, workers, whole(rng, 1, max(1, workers // 4)))
    last = at - whole(rng, 20, 40)
    long = whole(rng, 8, 18)
    top = rng.uniform(0.5, 1.5)
    made["slowdowns"] = [
        passing(ranks, 1 + top / 3, last - 2 * long, long),
        passing(ranks, 1 + top * 2 / 3, last - long, long),
        lasting(ranks, 1 + top, last),
    ]
    return case(rng, seed, workers, batch, sizes, made, at)


@kind("bsp: one rank pauses for a step or two every so many steps")
def one_pauses(rng, seed):
    """Garbage is collected, or logs are written."""
    workers, batch = cluster(rng, high=32, per_rank=(4, 48))
    sizes = one_of(rng, constant, lambda r, b: lognormal(r, b, 0.1, 0.6))(rng, batch)
    made = devices(rng, sizes, workers, batch)
    at = when(rng, 80)
    every = whole(rng, 6, min(30, at // 5))
    made["slowdowns"] = [
        recurring(
            some(rng, workers, 1),
            rng.uniform(2, 8),
            whole(rng, 0, every - 1),
            whole(rng, 1, 2),
            every,
        )
    ]
    return case(rng, seed, workers, batch, sizes, made, at)


@kind("bsp: all ranks pause together every so many steps")
def all_pause(rng, seed):
    """A checkpoint is written, and no preset can do anything about it."""
    workers, batch = cluster(rng, high=32, per_rank=(4, 48))
    sizes = lognormal(rng, batch, 0.1, 0.8)
    made = devices(rng, sizes, workers, batch)
    at = when(rng, 100)
    every = whole(rng, 10, min(40, at // 4))
    made["slowdowns"] = [recurring(everyone(workers), rng.uniform(2, 6), every - 1, 1, every)]
    return case(rng, seed, workers, batch, sizes, made, at)


@kind("bsp: some ranks are slow for some steps, then as fast as others again, over and over")
def duty_cycle(rng, seed):
    """Throttling and cooling, many times before the forecast and after it."""
    workers, batch = cluster(rng, high=32, per_rank=(4, 48))
    sizes = lognormal(rng, batch, 0.05, 0.5)
    made = devices(rng, sizes, workers, batch)
    at = when(rng, 100)
    every = whole(rng, 8, min(24, at // 5))
    ranks = some(rng, workers, whole(rng, 1, max(1, workers // 4)))
    made["slowdowns"] = [
        recurring(
            ranks,
            rng.uniform(1.3, 2.5),
            whole(rng, 0, every - 1),
            max(2, round(every * rng.uniform(0.3, 0.6))),
            every,
        )
    ]
    return case(rng, seed, workers, batch, sizes, made, at)


@kind("bsp: two ranks take turns in being slow, in a fixed rhythm")
def in_turn(rng, seed):
    """A background task goes round."""
    workers, batch = cluster(rng, high=16, per_rank=(6, 48))
    sizes = one_of(rng, constant, lambda r, b: lognormal(r, b, 0.1, 0.4))(rng, batch)
    made = devices(rng, sizes, workers, batch)
    at = when(rng, 100)
    steps = whole(rng, 3, min(10, at // 12))
    first, second = (int(r) for r in rng.permutation(workers)[:2])
    factor = rng.uniform(1.5, 3)
    made["slowdowns"] = [
        recurring([first], factor, 0, steps, 2 * steps),
        recurring([second], factor, steps, steps, 2 * steps),
    ]
    return case(rng, seed, workers, batch, sizes, made, at)


@kind("bsp: in each step each rank is slow by chance")
def by_chance(rng, seed):
    """Passing disturbances that no batches can level."""
    workers, batch = cluster(rng, high=32, per_rank=(2, 48))
    sizes = one_of(rng, constant, lambda r, b: lognormal(r, b, 0.1, 0.8))(rng, batch)
    made = devices(rng, sizes, workers, batch)
    made["slowdowns"] = [
        recurring(everyone(workers), rng.uniform(1.5, 5), 0, 1, 1, rng.uniform(0.3, 1.5) / workers)
    ]
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind("bsp: by chance ranks are slow for a few steps at a time")
def by_chance_longer(rng, seed):
    """Other jobs come and go."""
    workers, batch = cluster(rng, high=32, per_rank=(4, 48))
    sizes = one_of(rng, constant, lambda r, b: lognormal(r, b, 0.1, 0.6))(rng, batch)
    made = devices(rng, sizes, workers, batch)
    at = when(rng, 120)
    steps = whole(rng, 3, 8)
    made["slowdowns"] = [
        recurring(
            everyone(workers), rng.uniform(1.5, 3), 0, steps, steps, rng.uniform(0.4, 1.5) / workers
        )
    ]
    return case(rng, seed, workers, batch, sizes, made, at)


@kind("bsp: random delays come on top of each rank's step")
def delays(rng, seed):
    """As in RNA's experiments."""
    workers, batch = cluster(rng, high=32, per_rank=(4, 64))
    sizes = one_of(rng, constant, lambda r, b: lognormal(r, b, 0.1, 0.8))(rng, batch)
    made = devices(rng, sizes, workers, batch)
    own = seconds(made, sizes, workers, batch)
    low = one_of(rng, 0.0, own * rng.uniform(0.02, 0.2))
    made["delay_s"] = [neat(low), neat(low + own * rng.uniform(0.1, 1.2))]
    return case(rng, seed, workers, batch, sizes, made, when(rng))


@kind(
    "bsp: everything at once: all speeds, uneven sizes, noise, chance, loading and a lasting slowdown"
)
def everything(rng, seed):
    """An old cluster that many share."""
    workers, batch = cluster(rng, low=6, high=24, per_rank=(4, 32))
    sizes = one_of(rng, lambda r, b: lognormal(r, b, 0.3, 0.9), bimodal, pareto)(rng, batch)
    made = devices(rng, sizes, workers, batch, noise=rng.uniform(0.03, 0.08))
    own = seconds(made, sizes, workers, batch)
    at = when(rng, 100)
    made["factors"] = neats(np.exp(rng.uniform(0, 0.6, workers)))
    made["data_s"] = neats(own * rng.uniform(0.02, 0.2, workers))
    made["slowdowns"] = [
        recurring(
            everyone(workers), rng.uniform(1.5, 2.5), 0, 1, 1, rng.uniform(0.2, 0.6) / workers
        ),
        lasting(some(rng, workers, 1), rng.uniform(1.3, 2), at - whole(rng, 20, 50)),
    ]
    return case(rng, seed, workers, batch, sizes, made, at)


# ---- under other presets ------------------------------------------------------------------------------------------------------------------------


@kind("chronica: half of the ranks are slow, and videos differ in length")
def chronica_half_slow(rng, seed):
    """The paper's own case."""
    workers, batch = cluster(rng, high=32, per_rank=(4, 16))
    mean = wide(rng, 20, 100)
    sizes = by("gamma", mean, samples_for(rng, batch, 40, 700), mean * rng.uniform(0.3, 1.4))
    made = devices(rng, sizes, workers, batch, noise=rng.uniform(0.01, 0.04))
    made["factors"] = slow(workers, some(rng, workers, workers // 2), rng.uniform(1.2, 2.5))
    return case(rng, seed, workers, batch, sizes, made, when(rng), "chronica")


@kind("chronica as printed: texts are padded, and a rank became slow before the forecast")
def chronica_paper(rng, seed):
    """It knows nothing of padding."""
    workers, batch = cluster(rng, high=16, per_rank=(4, 32))
    sizes = text(rng, batch)
    made = devices(rng, sizes, workers, batch, padded=True)
    at = when(rng)
    made["slowdowns"] = [
        lasting(some(rng, workers, 1), rng.uniform(1.3, 2.5), at - whole(rng, 20, at // 2 + 10))
    ]
    parameters = {
        "ett": one_of(rng, "per-step", "per-sample"),
        "picks": "paper",
        "window": one_of(rng, 32, 64, 128),
    }
    return case(rng, seed, workers, batch, sizes, made, at, "chronica", parameters)


@kind("sata: one rank is slow, and shares change at each of many epochs")
def sata_one_slow(rng, seed):
    """Epochs are short enough for it to learn before the forecast."""
    workers, batch = cluster(rng, high=16, per_rank=(8, 64))
    at = when(rng, 80)
    sizes = by("constant", 1, batch * whole(rng, 10, at // 4))
    made = devices(rng, sizes, workers, batch)
    made["factors"] = slow(workers, some(rng, workers, 1), rng.uniform(1.5, 8))
    return case(rng, seed, workers, batch, sizes, made, at, "sata")


@kind("sata with shares that change every few steps: speeds differ, and sizes too")
def sata_often(rng, seed):
    """What sizes do looks like speeds to it."""
    workers, batch = cluster(rng, high=16, per_rank=(6, 48))
    sizes = lognormal(rng, batch, 0.1, 0.7)
    made = devices(rng, sizes, workers, batch)
    made["factors"] = neats(np.exp(rng.uniform(0, 0.9, workers)))
    parameters = {"every_steps": whole(rng, 10, 40), "tolerance": one_of(rng, 0.01, 0.05)}
    return case(rng, seed, workers, batch, sizes, made, when(rng), "sata", parameters)


@kind("lbb: four to eight machines of several makes that were profiled")
def lbb_profiled(rng, seed):
    """As in the paper's tables."""
    workers = whole(rng, 4, 8)
    batch = one_of(rng, 256, 512, 1024)
    sizes = by("constant", 1, samples_for(rng, batch, 60, 150))
    made = devices(rng, sizes, workers, batch, noise=rng.uniform(0.005, 0.02))
    made["unit_s"] = neats(made["unit_s"] * np.exp(rng.uniform(0, 1.4, workers)))
    made["step_s"] = neats(made["step_s"] * np.exp(rng.uniform(-0.3, 1.0, workers)))
    return case(rng, seed, workers, batch, sizes, made, when(rng), "lbb", profile=True)


@kind("lbb: two disturbances were over before the forecast, and speeds differ")
def lbb_disturbed(rng, seed):
    """Counts have been to and fro, and are settled again."""
    workers, batch = cluster(rng, high=8, per_rank=(16, 128))
    sizes = by("constant", 1, samples_for(rng, batch))
    made = devices(rng, sizes, workers, batch, noise=rng.uniform(0.005, 0.03))
    made["factors"] = neats(np.exp(rng.uniform(0, 0.7, workers)))
    at = when(rng, 130)
    first, second = (int(r) for r in rng.permutation(workers)[:2])
    factor = rng.uniform(1.4, 2)
    made["slowdowns"] = [
        passing([first], factor, 20, whole(rng, 15, 25)),
        passing([second], factor, 55, whole(rng, 15, at - 95)),
    ]
    return case(rng, seed, workers, batch, sizes, made, at, "lbb")


@kind("boa: all ranks have different speeds, and samples are equal")
def boa_different(rng, seed):
    """A linear model is right here."""
    workers, batch = cluster(rng, high=24, per_rank=(8, 64))
    sizes = constant(rng, batch)
    made = devices(rng, sizes, workers, batch)
    made["factors"] = neats(np.exp(rng.uniform(0, 1.2, workers)))
    return case(rng, seed, workers, batch, sizes, made, when(rng), "boa")


@kind("boa, levelled: some ranks pause, and sizes are bimodal")
def boa_pauses(rng, seed):
    """Neither is in its model."""
    workers, batch = cluster(rng, high=16, per_rank=(4, 32))
    sizes = bimodal(rng, batch)
    made = devices(rng, sizes, workers, batch)
    at = when(rng, 80)
    every = whole(rng, 6, min(20, at // 5))
    made["slowdowns"] = [
        recurring(some(rng, workers, 2), rng.uniform(2, 4), whole(rng, 0, every - 1), 1, every)
    ]
    return case(
        rng,
        seed,
        workers,
        batch,
        sizes,
        made,
        at,
        "boa",
        {"which": "levelled", "window": one_of(rng, 32, 64)},
    )


@kind("dynamic-batching: CPU workers with different numbers of cores")
def dynamic_cores(rng, seed):
    """As in the paper."""
    workers = whole(rng, 4, 8)
    batch = workers * one_of(rng, 16, 32, 64, 128)
    sizes = by("constant", 1, samples_for(rng, batch))
    cores = rng.integers(2, 25, workers)
    made = devices(rng, sizes, workers, batch, compute_s=wide(rng, 0.2, 1.5))
    made["factors"] = neats(cores.mean() / cores)
    return case(rng, seed, workers, batch, sizes, made, when(rng), "dynamic-batching")


@kind(
    "dynamic-batching with parameters: a group became slow before the forecast, and the network is slow"
)
def dynamic_group(rng, seed):
    """The controller had time to follow."""
    workers, batch = cluster(rng, low=8, high=24, per_rank=(8, 48))
    sizes = lognormal(rng, batch, 0.05, 0.5)
    made = devices(rng, sizes, workers, batch)
    at = when(rng, 80)
    made["slowdowns"] = [
        lasting(list(range(workers // 4)), rng.uniform(1.4, 2.5), at - whole(rng, 30, at // 2 + 10))
    ]
    parameters = {
        "dead_band": one_of(rng, 0.05, 0.1),
        "smoothing": one_of(rng, 0.1, 0.3, 0.5),
        "every_steps": one_of(rng, 2, 4, 8),
    }
    return case(
        rng,
        seed,
        workers,
        batch,
        sizes,
        made,
        at,
        "dynamic-batching",
        parameters,
        exchange=rng.uniform(0.5, 1.5),
    )


@kind("static-batching: capacities are known, and nearly right")
def static_right(rng, seed):
    """The open loop as it is meant."""
    workers, batch = cluster(rng, high=16, per_rank=(8, 64))
    sizes = lognormal(rng, batch, 0.05, 0.6)
    made = devices(rng, sizes, workers, batch)
    factors = np.exp(rng.uniform(0, 1, workers))
    made["factors"] = neats(factors)
    capacity = neats(np.exp(rng.normal(0, 0.05, workers)) / factors)
    return case(
        rng, seed, workers, batch, sizes, made, when(rng), "static-batching", {"capacity": capacity}
    )


@kind("static-batching: capacities were right until a rank became slow before the forecast")
def static_wrong(rng, seed):
    """The open loop does not notice; other presets would."""
    workers, batch = cluster(rng, high=16, per_rank=(8, 48))
    sizes = constant(rng, batch)
    made = devices(rng, sizes, workers, batch)
    factors = np.exp(rng.uniform(0, 0.8, workers))
    made["factors"] = neats(factors)
    at = when(rng)
    made["slowdowns"] = [
        lasting(some(rng, workers, 1), rng.uniform(1.4, 3), at - whole(rng, 15, at // 2 + 10))
    ]
    return case(
        rng,
        seed,
        workers,
        batch,
        sizes,
        made,
        at,
        "static-batching",
        {"capacity": neats(1 / factors)},
    )


@kind("paceline by default: sizes are Pareto, and half of the ranks are slow")
def paceline_default(rng, seed):
    """What it levels would be seen under other presets."""
    workers, batch = cluster(rng, high=48, per_rank=(4, 32))
    sizes = pareto(rng, batch, 1.5, 2.8)
    made = devices(rng, sizes, workers, batch)
    made["factors"] = slow(workers, some(rng, workers, workers // 2), rng.uniform(1.2, 2.5))
    return case(rng, seed, workers, batch, sizes, made, when(rng), "paceline")


@kind("paceline by default: texts are padded with attention, and ranks are alike")
def paceline_text(rng, seed):
    """It has to find the cost out."""
    workers, batch = cluster(rng, high=32, per_rank=(4, 48))
    sizes = text(rng, batch)
    made = devices(rng, sizes, workers, batch, kappa=quadratic(rng, sizes, 0.05, 0.6), padded=True)
    return case(rng, seed, workers, batch, sizes, made, when(rng), "paceline")


@kind("paceline, free and padded: texts are padded, and some nodes are slow")
def paceline_free(rng, seed):
    """Batches are composed, so sizes are not spread as under plain DDP."""
    workers = one_of(rng, 8, 16, 32)
    batch = workers * whole(rng, 4, 32)
    sizes = one_of(rng, text, speech)(rng, batch)
    made = devices(rng, sizes, workers, batch, padded=True)
    quarter = workers // 4
    made["factors"] = [
        {"workers": workers - quarter, "factor": 1.0},
        {"workers": quarter, "factor": real(rng, 1.2, 2.2)},
    ]
    return case(
        rng,
        seed,
        workers,
        batch,
        sizes,
        made,
        when(rng),
        "paceline",
        {"mode": "free", "cost": "padded"},
    )


@kind(
    "paceline, exact and by sums: a rank became slow before the forecast, another was slow and is not any more"
)
def paceline_sum(rng, seed):
    """The one must be forecast to go on, the other must not."""
    workers, batch = cluster(rng, high=32, per_rank=(4, 48))
    sizes = lognormal(rng, batch, 0.2, 1.2)
    made = devices(rng, sizes, workers, batch)
    at = when(rng, 90)
    first, second = (int(r) for r in rng.permutation(workers)[:2])
    made["slowdowns"] = [
        passing([first], rng.uniform(1.5, 3), whole(rng, 5, 20), whole(rng, 15, at - 70)),
        lasting([second], rng.uniform(1.3, 2.5), at - whole(rng, 20, 45)),
    ]
    parameters = {"mode": "exact", "cost": "sum", "window": one_of(rng, 32, 64, 128)}
    return case(rng, seed, workers, batch, sizes, made, at, "paceline", parameters)


@kind("paceline: 128 to 256 ranks in two halves of different speed")
def paceline_large(rng, seed):
    """A large cluster of two makes."""
    workers = one_of(rng, 128, 192, 256)
    batch = min(2048, workers * whole(rng, 4, 8))
    mean = wide(rng, 50, 500)
    sizes = by("gamma", mean, samples_for(rng, batch), mean * rng.uniform(0.3, 1.3))
    made = devices(rng, sizes, workers, batch)
    made["factors"] = [
        {"workers": workers // 2, "factor": 1.0},
        {"workers": workers // 2, "factor": real(rng, 1.2, 2.2)},
    ]
    return case(
        rng,
        seed,
        workers,
        batch,
        sizes,
        made,
        when(rng),
        "paceline",
        {"mode": one_of(rng, "exact", "free")},
    )


@kind("local-sgd: ranks are slow in turn, by chance")
def local_sgd(rng, seed):
    """Waits are seldom, so they do not show what an all-reduce would wait for."""
    workers, batch = cluster(rng, high=16, per_rank=(8, 48))
    sizes = one_of(rng, constant, lambda r, b: lognormal(r, b, 0.1, 0.6))(rng, batch)
    made = devices(rng, sizes, workers, batch)
    made["slowdowns"] = [
        recurring(everyone(workers), rng.uniform(1.5, 4), 0, 1, 1, rng.uniform(0.5, 2) / workers)
    ]
    return case(
        rng,
        seed,
        workers,
        batch,
        sizes,
        made,
        when(rng),
        "local-sgd",
        {"every": one_of(rng, 4, 8, 16)},
    )


@kind("rna: random delays come on top of each rank's step")
def rna_delays(rng, seed):
    """The paper's own case, with and without a measured time of a round."""
    workers, batch = cluster(rng, high=16, per_rank=(8, 128))
    sizes = constant(rng, batch)
    made = devices(rng, sizes, workers, batch, compute_s=wide(rng, 0.05, 0.4))
    own = seconds(made, sizes, workers, batch)
    made["delay_s"] = [0.0, neat(own * rng.uniform(0.3, 1.2))]
    made_case = case(
        rng, seed, workers, batch, sizes, made, when(rng), "rna", exchange=rng.uniform(0.03, 0.3)
    )
    if rng.random() < 0.4:
        made_case["scenario"]["communication"]["round_s"] = neat(own * rng.uniform(0.05, 0.3))
    return made_case


@kind("ad-psgd: ranks are in two halves of lasting speeds, and sizes differ")
def ad_psgd(rng, seed):
    """Fast ranks take over batches of slow ones."""
    workers = one_of(rng, 4, 6, 8, 12, 16)
    batch = workers * whole(rng, 4, 48)
    sizes = lognormal(rng, batch, 0.1, 0.8)
    made = devices(rng, sizes, workers, batch)
    made["factors"] = slow(workers, some(rng, workers, workers // 2), rng.uniform(1.3, 2.5))
    return case(
        rng,
        seed,
        workers,
        batch,
        sizes,
        made,
        when(rng),
        "ad-psgd",
        exchange=rng.uniform(0.05, 0.5),
    )


# ---- checks -------------------------------------------------------------------------------------------------------------------------------------

FIELDS = {
    "name",
    "workers",
    "global_batch",
    "steps",
    "epochs",
    "seed",
    "drop_last",
    "loss_mean",
    "sizes",
    "devices",
    "communication",
    "policy",
    "parameters",
    "limits",
    "profile",
}
DEVICE_FIELDS = {
    "unit_s",
    "sample_s",
    "step_s",
    "data_s",
    "factors",
    "cost",
    "slowdowns",
    "noise",
    "delay_s",
    "serial",
}
SLOWDOWN_FIELDS = {"ranks", "factor", "first_step", "steps", "every", "chance"}


def plain(x):
    """Whether x is of plain types throughout, with finite numbers."""
    if type(x) is dict:
        return all(type(k) is str and plain(v) for k, v in x.items())
    if type(x) is list:
        return all(plain(v) for v in x)
    return type(x) in (int, bool, str) or type(x) is float and math.isfinite(x)


def check(made):
    """Refuses what the documentation, or sense, does not allow."""
    assert set(made) == {"scenario", "at"} and plain(made)
    scenario, at = made["scenario"], made["at"]
    workers, batch, steps = scenario["workers"], scenario["global_batch"], scenario["steps"]
    assert set(scenario) <= FIELDS and "epochs" not in scenario
    assert 60 <= at <= 250 and steps >= at + AFTER
    assert 4 <= workers <= 256 and 16 <= batch <= 2048 and batch >= workers
    sizes = scenario["sizes"]
    if "values" in sizes:
        assert set(sizes) == {"values"} and min(sizes["values"]) > 0
        samples = len(sizes["values"])
    else:
        assert (
            set(sizes) <= {"distribution", "mean", "dif", "samples", "min", "max"}
            and sizes["mean"] > 0
            and sizes.get("dif", 0) >= 0
        )
        assert sizes["distribution"] in ("constant", "uniform", "normal", "lognormal", "gamma")
        samples = sizes["samples"]
    assert batch * 8 <= samples <= 70_000, samples
    hardware = scenario["devices"]
    assert set(hardware) <= DEVICE_FIELDS and 0 <= hardware["noise"] <= 0.1
    for name in ("unit_s", "sample_s", "step_s", "data_s"):
        values = hardware.get(name, 0.0)
        assert (
            type(values) is float
            and values >= 0
            or type(values) is list
            and len(values) == workers
            and min(values) > 0
        ), name
    factors = hardware.get("factors", [1.0] * workers)
    assert sum(f["workers"] if type(f) is dict else 1 for f in factors) == workers
    assert all(0.1 < (f["factor"] if type(f) is dict else f) <= 10 for f in factors)
    for s in hardware.get("slowdowns", []):
        assert set(s) <= SLOWDOWN_FIELDS and s["ranks"] and len(set(s["ranks"])) == len(s["ranks"])
        assert (
            all(0 <= r < workers for r in s["ranks"])
            and s["factor"] > 1
            and s["steps"] >= 1
            and s["first_step"] >= 0
        )
        assert 0 < s.get("chance", 1) <= 1
        if "every" in s:  # often enough before the forecast to be known
            assert (
                s["first_step"] <= s["every"] and s["steps"] <= s["every"] and 4 * s["every"] <= at
            ), (s, at)
        elif s["steps"] == LASTING:
            assert s["first_step"] <= at - 8, (s, at)
        else:
            assert s["first_step"] + s["steps"] <= at - 8, (s, at)
    low, high = hardware.get("delay_s", [0.0, 0.0])
    assert 0 <= low <= high
    own = seconds(hardware, sizes, workers, batch)
    assert 0.01 < own < 8, own
    network = scenario["communication"]
    assert (
        set(network) <= {"latency_s", "bytes", "bandwidth", "fixed_s", "round_s"}
        and network["latency_s"] > 0
    )
    exchange = (
        2 * (workers - 1) * network["latency_s"]
        + 2 * (workers - 1) / workers * network["bytes"] / network["bandwidth"]
    )
    assert 0 < exchange < 8 * own + 0.01, (exchange, own)
    if "limits" in scenario:
        assert len(scenario["limits"]) == workers and sum(scenario["limits"]) >= batch
    capacity = scenario.get("parameters", {}).get("capacity")
    assert capacity is None or len(capacity) == workers and min(capacity) > 0
    return own, exchange


if __name__ == "__main__":
    policies = {}
    for number, (sentence, make) in enumerate(KINDS.items()):
        assert make.__doc__, sentence
        spans, texts = [], set()
        for seed in range(40):
            made = make(np.random.default_rng([number, seed]), seed)
            spans.append(
                (
                    *check(made),
                    made["scenario"]["workers"],
                    made["scenario"]["global_batch"],
                    made["at"],
                )
            )
            texts.add(json.dumps(made))
            if seed < 3:
                assert json.dumps(make(np.random.default_rng([number, seed]), seed)) == json.dumps(
                    made
                ), "not the same again"
        assert len(texts) == 40
        policy = made["scenario"]["policy"]
        policies[policy] = policies.get(policy, 0) + 1
        a = np.array(spans)
        print(
            f"{a[:, 0].min():6.3f}-{a[:, 0].max():5.2f} s  net {a[:, 1].min():6.4f}-{a[:, 1].max():5.2f}  W {a[:, 2].min():3.0f}-{a[:, 2].max():3.0f}"
            f"  B {a[:, 3].min():4.0f}-{a[:, 3].max():4.0f}  at {a[:, 4].min():3.0f}-{a[:, 4].max():3.0f}  {sentence[:70]}"
        )
    print(len(KINDS), "kinds", policies)
