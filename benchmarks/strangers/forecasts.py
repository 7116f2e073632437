"""Held-out cases for what-if forecasts: plausible trainings on clusters, each with the step at which the forecast is made.

`KINDS` maps a plain sentence to `make(rng, seed)`, which returns `{"scenario": {...}, "at": int}`. Nothing new begins after `at`: a slowdown
is over before it, or lasts from before it to the end, or comes back by a rule that has shown itself several times before it.
"""

import numpy as np

KINDS = {}


def kind(sentence):
    """Register a function under the sentence that says what happens."""

    def register(make):
        assert sentence not in KINDS, sentence
        KINDS[sentence] = make
        return make

    return register


# Small draws, as plain Python types


def whole(rng, low, high):
    """A whole number from low to high, both included."""
    return int(rng.integers(low, high + 1))


def between(rng, low, high):
    """A number, uniform between low and high."""
    return float(rng.uniform(low, high))


def scaled(rng, low, high):
    """A number, uniform in its logarithm between low and high."""
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def pick(rng, *options):
    """One of the options."""
    return options[int(rng.integers(len(options)))]


def chosen(rng, workers, count):
    """Some ranks, in ascending order."""
    return sorted(
        int(rank) for rank in rng.choice(workers, size=min(count, workers), replace=False)
    )


def noise_of(rng, high=0.06):
    """Noise of a step: none in a fifth of cases, else up to `high`."""
    return 0.0 if rng.random() < 0.2 else round(between(rng, 0.003, high), 4)


def lottery(rng, workers, spread):
    """Factors of nominally equal devices, which differ by a few per cent."""
    return [
        round(float(f), 4)
        for f in np.clip(rng.normal(1, spread, workers), 1 - 2.5 * spread, 1 + 2.5 * spread)
    ]


# Sizes


def spread_sizes(rng, distribution, mean, relative_dif, batch, **bounds):
    """Sizes by a named distribution; the data set lasts 15 to 150 steps."""
    spec = {"distribution": distribution, "mean": float(mean), "samples": data_set(rng, batch)}
    if distribution != "constant":
        spec["dif"] = float(mean * relative_dif)
    spec.update(bounds)
    return spec


def data_set(rng, batch, low=15, high=150):
    """How many samples a data set has; seldom a multiple of the global batch."""
    return whole(rng, max(600, low * batch), max(900, high * batch))


def listed(values, digits=2):
    """Sizes as a plain list."""
    return {"values": [round(float(value), digits) for value in values]}


def listed_count(rng, batch):
    """How many sizes to list: some twenty steps or more, but no more than 45,000."""
    return whole(rng, max(1500, 16 * batch), max(6000, 22 * batch))


def pareto_sizes(rng, batch, scale, alpha, most):
    """Pareto sizes from `scale` on, cut off at `most`."""
    return listed(np.minimum(scale * (1 + rng.pareto(alpha, listed_count(rng, batch))), most))


def utterances(rng, batch):
    """Seconds of speech: short commands and read sentences, cut off at 15 to 35 s."""
    count = listed_count(rng, batch)
    short = rng.random(count) < between(rng, 0.15, 0.6)
    commands = rng.gamma(4.0, between(rng, 0.4, 0.8), count)
    sentences = rng.normal(between(rng, 11, 15), between(rng, 2, 4), count)
    return listed(np.clip(np.where(short, commands, sentences), 0.5, between(rng, 15, 35)), 3)


def texts(rng, batch, longest):
    """Tokens of text: messages, paragraphs and documents that are cut off at the context's length."""
    count = listed_count(rng, batch)
    shares = rng.dirichlet([4.0, 3.0, 1.5])
    what = rng.choice(3, size=count, p=shares)
    medians = np.array([between(rng, 15, 40), between(rng, 90, 200), between(rng, 500, 900)])
    tokens = medians[what] * np.exp(rng.normal(0, np.array([0.6, 0.5, 0.7])[what]))
    return listed(np.clip(np.ceil(tokens), 4, longest), 0)


def two_lengths(rng, batch, short, long, share_long, spread=0.1):
    """Two clear kinds of samples, each with a small spread."""
    count = listed_count(rng, batch)
    means = np.where(rng.random(count) < share_long, long, short)
    return listed(np.maximum(means * (1 + spread * rng.standard_normal(count)), short * 0.2))


def mean_cost(sizes, kappa=0.0):
    """What a sample costs on average, without padding."""
    if "values" in sizes:
        values = np.array(sizes["values"])
        return float((values + kappa * values**2).mean())
    return sizes["mean"] + kappa * (sizes["mean"] ** 2 + sizes.get("dif", 0.0) ** 2)


# Devices, networks, cases


def devices_for(
    rng, workers, batch, sizes, seconds, cost=None, fixed=(0.01, 0.15), noise=None, **more
):
    """Devices on which an equal share takes about `seconds` with a factor of 1, of which a part is the same for each step."""
    part = between(rng, *fixed)
    kappa = (cost or {}).get("kappa", 0.0)
    devices = {
        "unit_s": seconds * (1 - part) / (mean_cost(sizes, kappa) * batch / workers),
        "step_s": seconds * part,
        "noise": noise_of(rng) if noise is None else noise,
    }
    if cost:
        devices["cost"] = cost
    devices.update(more)
    return devices


def network(rng, workers, seconds, low=0.02, high=0.25):
    """A network on which an all-reduce takes from `low` to `high` of `seconds`; its bandwidth and the model's size are drawn."""
    total = seconds * between(rng, low, high)
    latency = min(scaled(rng, 3e-6, 8e-5), 0.3 * total / (2 * (workers - 1)))
    transfer = total - 2 * (workers - 1) * latency
    messages = 2 * (workers - 1) / workers
    size = min(max(transfer * scaled(rng, 1e8, 4e10) / messages, 2e6), 4e9)
    return {"latency_s": latency, "bytes": size, "bandwidth": messages * size / transfer}


def generations(rng, workers, factors):
    """Devices in groups, one group for each factor, of at least one worker each."""
    cuts = sorted(
        int(c) for c in rng.choice(np.arange(1, workers), size=len(factors) - 1, replace=False)
    )
    counts = np.diff([0, *cuts, workers])
    return [
        {"workers": int(count), "factor": round(float(factor), 3)}
        for count, factor in zip(counts, factors, strict=True)
    ]


def moment(rng, low=60, high=250):
    """The step at which the forecast is made."""
    return whole(rng, low, high)


def length(at):
    """Steps of a run of which a forecast is made at `at`."""
    return at + 330


def case(
    rng,
    seed,
    name,
    at,
    workers,
    batch,
    sizes,
    devices,
    communication,
    policy="bsp",
    parameters=None,
    **more,
):
    """Put a case together."""
    scenario = {
        "name": name,
        "workers": workers,
        "global_batch": batch,
        "steps": length(at),
        "seed": int(seed),
        "drop_last": bool(rng.random() < 0.5),
        "sizes": sizes,
        "devices": devices,
        "communication": communication,
        "policy": policy,
        **more,
    }
    if parameters:
        scenario["parameters"] = parameters
    return {"scenario": scenario, "at": at}


def images(rng, batch):
    """Samples of equal size."""
    return spread_sizes(rng, "constant", 1.0, 0.0, batch)


def lasting(ranks, factor, first_step, at):
    """A slowdown from `first_step` to the end of the run."""
    return {
        "ranks": ranks,
        "factor": factor,
        "first_step": first_step,
        "steps": length(at) - first_step,
    }


def heating(ranks, factor, first_step, climb, at):
    """A device that gets slower in three stages, of which the last one stays."""
    half = climb // 2
    return [
        {
            "ranks": ranks,
            "factor": round(1 + (factor - 1) * 0.35, 4),
            "first_step": first_step,
            "steps": half,
        },
        {
            "ranks": ranks,
            "factor": round(1 + (factor - 1) * 0.7, 4),
            "first_step": first_step + half,
            "steps": half,
        },
        lasting(ranks, factor, first_step + 2 * half, at),
    ]


# Equal ranks


@kind("Equal ranks train on equal images, with little or no noise: there is nothing to gain")
def equal_and_quiet(rng, seed):
    """Nothing differs."""
    workers, at = whole(rng, 4, 32), moment(rng)
    batch = max(16, workers * whole(rng, 4, 64))
    sizes, seconds = images(rng, batch), scaled(rng, 0.03, 0.6)
    devices = devices_for(rng, workers, batch, sizes, seconds, noise=pick(rng, 0.0, 0.002, 0.005))
    return case(
        rng, seed, "equal-quiet", at, workers, batch, sizes, devices, network(rng, workers, seconds)
    )


@kind("Equal ranks train on equal images, but each step's time varies by 4 to 10 % by chance")
def equal_and_noisy(rng, seed):
    """Waiting that no preset can balance."""
    workers, at = whole(rng, 4, 64), moment(rng)
    batch = max(16, workers * whole(rng, 4, 30))
    sizes, seconds = images(rng, batch), scaled(rng, 0.03, 0.6)
    devices = devices_for(rng, workers, batch, sizes, seconds, noise=between(rng, 0.04, 0.1))
    return case(
        rng, seed, "equal-noisy", at, workers, batch, sizes, devices, network(rng, workers, seconds)
    )


@kind("Equal ranks, and sizes that hardly differ: little to gain")
def narrow_sizes(rng, seed):
    """Crops of about the same size."""
    workers, at = whole(rng, 4, 48), moment(rng)
    batch = max(16, workers * whole(rng, 2, 24))
    sizes = spread_sizes(
        rng, pick(rng, "normal", "uniform"), between(rng, 10, 400), between(rng, 0.02, 0.12), batch
    )
    seconds = scaled(rng, 0.05, 1.0)
    devices = devices_for(rng, workers, batch, sizes, seconds)
    return case(
        rng,
        seed,
        "narrow-sizes",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )


@kind("Nominally equal GPUs that differ by a few per cent, as bought, and equal samples")
def silicon_lottery(rng, seed):
    """Small lasting differences under noise of about the same size."""
    workers, at = whole(rng, 4, 32), moment(rng)
    batch = workers * whole(rng, 8, 50)
    sizes, seconds = images(rng, batch), scaled(rng, 0.05, 0.8)
    devices = devices_for(
        rng, workers, batch, sizes, seconds, factors=lottery(rng, workers, between(rng, 0.01, 0.06))
    )
    return case(
        rng, seed, "lottery", at, workers, batch, sizes, devices, network(rng, workers, seconds)
    )


# Kinds of data


@kind(
    "Speech of short commands and long sentences on equal ranks; a batch costs the sum of its seconds"
)
def speech(rng, seed):
    """Packed utterances."""
    workers, at = whole(rng, 4, 24), moment(rng)
    batch = max(16, workers * whole(rng, 2, 16))
    sizes, seconds = utterances(rng, batch), scaled(rng, 0.1, 1.2)
    devices = devices_for(rng, workers, batch, sizes, seconds)
    return case(
        rng, seed, "speech", at, workers, batch, sizes, devices, network(rng, workers, seconds)
    )


@kind(
    "Speech that is padded to the longest utterance of each local batch, on slightly different ranks"
)
def padded_speech(rng, seed):
    """Padding makes a batch cost as much as its longest sample says."""
    workers, at = whole(rng, 4, 24), moment(rng)
    batch = max(16, workers * whole(rng, 3, 20))
    sizes, seconds = utterances(rng, batch), scaled(rng, 0.1, 1.0)
    devices = devices_for(
        rng,
        workers,
        batch,
        sizes,
        seconds,
        cost={"kappa": 0.0, "padded": True},
        factors=lottery(rng, workers, between(rng, 0.01, 0.08)),
    )
    return case(
        rng,
        seed,
        "speech-padded",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )


@kind(
    "Text of messages, paragraphs and documents, with attention that costs the square of the length"
)
def quadratic_text(rng, seed):
    """Packed text: the sum of lengths and of their squares."""
    workers, at = whole(rng, 4, 32), moment(rng)
    batch, longest = max(16, workers * whole(rng, 2, 16)), pick(rng, 1024, 2048, 4096)
    sizes, seconds = texts(rng, batch, longest), scaled(rng, 0.1, 2.0)
    cost = {"kappa": scaled(rng, 0.1, 2.0) / longest, "padded": False}
    devices = devices_for(rng, workers, batch, sizes, seconds, cost=cost)
    return case(
        rng,
        seed,
        "text-quadratic",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )


@kind(
    "Text padded to the longest of each local batch, with quadratic attention, on two generations of GPUs"
)
def padded_quadratic_text(rng, seed):
    """The dearest combination of costs."""
    workers, at = whole(rng, 4, 20), moment(rng)
    batch, longest = max(16, workers * whole(rng, 4, 16)), pick(rng, 512, 1024)
    sizes, seconds = texts(rng, batch, longest), scaled(rng, 0.1, 1.0)
    cost = {"kappa": scaled(rng, 0.1, 1.0) / longest, "padded": True}
    factors = generations(rng, workers, [1, between(rng, 1.2, 2.2)])
    devices = devices_for(rng, workers, batch, sizes, seconds, cost=cost, factors=factors)
    return case(
        rng, seed, "text-padded", at, workers, batch, sizes, devices, network(rng, workers, seconds)
    )


@kind("Video clips of very different lengths, few per rank, on two generations of GPUs")
def video(rng, seed):
    """Gamma sizes with a DIF near or above the mean."""
    workers, at = whole(rng, 4, 32), moment(rng)
    batch = max(16, workers * whole(rng, 2, 6))
    sizes = spread_sizes(rng, "gamma", between(rng, 30, 300), between(rng, 0.5, 1.4), batch)
    seconds = scaled(rng, 0.3, 3.0)
    factors = generations(rng, workers, [1, between(rng, 1.3, 2.5)])
    devices = devices_for(rng, workers, batch, sizes, seconds, factors=factors)
    return case(
        rng, seed, "video", at, workers, batch, sizes, devices, network(rng, workers, seconds)
    )


@kind("Point clouds of a lidar, with one rank whose GPU is slower for good")
def point_clouds(rng, seed):
    """Sizes in thousands of points."""
    workers, at = whole(rng, 4, 16), moment(rng)
    batch = max(16, workers * whole(rng, 4, 12))
    sizes = spread_sizes(
        rng, "normal", between(rng, 20, 120), between(rng, 0.15, 0.4), batch, max=250.0
    )
    seconds = scaled(rng, 0.1, 1.5)
    factors = [1.0] * workers
    factors[whole(rng, 0, workers - 1)] = round(between(rng, 1.2, 2.2), 3)
    devices = devices_for(rng, workers, batch, sizes, seconds, factors=factors)
    return case(
        rng,
        seed,
        "point-clouds",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )


@kind(
    "A recommender with Pareto histories of its users and a large batch, so that loads are nearly even"
)
def recommender(rng, seed):
    """Large local batches average heavy tails away, but not wholly."""
    workers, at = pick(rng, 4, 8, 12, 16), moment(rng)
    batch = whole(rng, 1000, 2048)
    sizes = pareto_sizes(rng, batch, between(rng, 3, 10), between(rng, 1.3, 2.5), 2000.0)
    seconds = scaled(rng, 0.02, 0.2)
    devices = devices_for(rng, workers, batch, sizes, seconds, fixed=(0.1, 0.4))
    return case(
        rng,
        seed,
        "recommender",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds, 0.1, 0.6),
    )


@kind(
    "A recommender that spends most of its time on a slow network, and whose samples all cost the same"
)
def embedding_exchange(rng, seed):
    """Communication outweighs computing."""
    workers, at = whole(rng, 4, 48), moment(rng)
    batch = whole(rng, 512, 2048)
    sizes, seconds = images(rng, batch), scaled(rng, 0.01, 0.1)
    devices = devices_for(
        rng,
        workers,
        batch,
        sizes,
        seconds,
        fixed=(0.1, 0.4),
        factors=lottery(rng, workers, between(rng, 0.01, 0.1)),
    )
    return case(
        rng,
        seed,
        "embeddings",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds, 1.0, 5.0),
    )


@kind("Graphs with a heavy tail of sizes and only one to four in each local batch")
def heavy_tailed_graphs(rng, seed):
    """Single samples decide a step's time; some are larger than a fair share."""
    workers, at = whole(rng, 8, 32), moment(rng)
    batch = max(16, workers * whole(rng, 1, 4))
    sizes = pareto_sizes(rng, batch, between(rng, 10, 50), between(rng, 1.4, 2.6), 5000.0)
    seconds = scaled(rng, 0.05, 0.8)
    devices = devices_for(rng, workers, batch, sizes, seconds)
    return case(
        rng, seed, "graphs", at, workers, batch, sizes, devices, network(rng, workers, seconds)
    )


@kind("Scans of two resolutions, one of them several times as dear, on slightly different ranks")
def two_resolutions(rng, seed):
    """Bimodal sizes."""
    workers, at = whole(rng, 4, 24), moment(rng)
    batch = max(16, workers * whole(rng, 2, 10))
    sizes = two_lengths(
        rng, batch, 64.0, 64.0 * between(rng, 3, 12), between(rng, 0.05, 0.5), between(rng, 0, 0.1)
    )
    seconds = scaled(rng, 0.2, 2.0)
    devices = devices_for(
        rng,
        workers,
        batch,
        sizes,
        seconds,
        factors=lottery(rng, workers, between(rng, 0.005, 0.05)),
    )
    return case(
        rng,
        seed,
        "two-resolutions",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )


@kind("Samples cost a fixed amount each, such as decoding, beside what their length costs")
def decoding(rng, seed):
    """Costs per sample and per unit are of the same order."""
    workers, at = whole(rng, 4, 24), moment(rng)
    batch = max(16, workers * whole(rng, 4, 24))
    sizes = spread_sizes(rng, "lognormal", between(rng, 20, 200), between(rng, 0.4, 1.2), batch)
    seconds = scaled(rng, 0.1, 1.0)
    devices = devices_for(
        rng,
        workers,
        batch,
        sizes,
        seconds,
        factors=generations(rng, workers, [1, between(rng, 1.1, 1.8)]),
    )
    devices["sample_s"] = seconds * between(rng, 0.2, 1.0) * workers / batch
    return case(
        rng, seed, "decoding", at, workers, batch, sizes, devices, network(rng, workers, seconds)
    )


@kind(
    "Each step's fixed cost outweighs what its samples cost, so even an uneven load matters little"
)
def fixed_costs(rng, seed):
    """Kernel launches and Python dominate."""
    workers, at = whole(rng, 4, 32), moment(rng)
    batch = max(16, workers * whole(rng, 2, 8))
    sizes = spread_sizes(rng, "gamma", between(rng, 10, 100), between(rng, 0.4, 1.0), batch)
    seconds = scaled(rng, 0.03, 0.3)
    devices = devices_for(rng, workers, batch, sizes, seconds, fixed=(0.55, 0.85))
    return case(
        rng, seed, "fixed-costs", at, workers, batch, sizes, devices, network(rng, workers, seconds)
    )


@kind("A small data set that is trained many times over, with short last steps of its epochs")
def small_data_set(rng, seed):
    """Epochs of 8 to 20 steps, each of which ends with a smaller step."""
    workers, at = whole(rng, 4, 16), moment(rng)
    batch = max(16, workers * whole(rng, 4, 16))
    sizes = spread_sizes(
        rng, pick(rng, "lognormal", "gamma"), between(rng, 20, 80), between(rng, 0.3, 0.8), batch
    )
    sizes["samples"] = batch * whole(rng, 8, 20) + whole(rng, batch // 4, batch - 1)
    seconds = scaled(rng, 0.05, 0.6)
    devices = devices_for(rng, workers, batch, sizes, seconds)
    made = case(
        rng,
        seed,
        "small-data-set",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )
    made["scenario"]["drop_last"] = False
    return made


# Clusters


@kind("One rank of several is three to ten times slower than the others, on equal samples")
def far_slower(rng, seed):
    """A rank on a CPU or on a very old GPU."""
    workers, at = whole(rng, 4, 16), moment(rng)
    batch = workers * whole(rng, 16, 64)
    sizes, seconds = images(rng, batch), scaled(rng, 0.05, 0.4)
    factors = [1.0] * workers
    factors[whole(rng, 0, workers - 1)] = round(between(rng, 3, 10), 3)
    devices = devices_for(rng, workers, batch, sizes, seconds, factors=factors)
    return case(
        rng, seed, "far-slower", at, workers, batch, sizes, devices, network(rng, workers, seconds)
    )


@kind("Three generations of GPUs in groups, on equal samples")
def three_generations(rng, seed):
    """Lasting differences only."""
    workers, at = whole(rng, 6, 48), moment(rng)
    batch = min(2048, workers * whole(rng, 8, 40))
    sizes, seconds = images(rng, batch), scaled(rng, 0.05, 0.6)
    factors = generations(rng, workers, [1, between(rng, 1.2, 1.8), between(rng, 2, 4)])
    devices = devices_for(rng, workers, batch, sizes, seconds, factors=factors)
    return case(
        rng,
        seed,
        "three-generations",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )


@kind(
    "Devices that differ in each cost of their own, in no groups: speeds and fixed costs are unrelated"
)
def unrelated_costs(rng, seed):
    """A fast GPU may sit in a slow host."""
    workers, at = whole(rng, 4, 16), moment(rng)
    batch = workers * whole(rng, 6, 30)
    sizes = spread_sizes(rng, "lognormal", between(rng, 20, 100), between(rng, 0.2, 0.7), batch)
    seconds = scaled(rng, 0.1, 0.8)
    devices = devices_for(rng, workers, batch, sizes, seconds)
    devices["unit_s"] = [devices["unit_s"] * scaled(rng, 0.7, 1.6) for _ in range(workers)]
    devices["step_s"] = [seconds * between(rng, 0.02, 0.3) for _ in range(workers)]
    return case(
        rng,
        seed,
        "unrelated-costs",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )


@kind("Mixed GPUs whose memory is limited, with trial batches before training")
def limited_memory(rng, seed):
    """The slower GPUs are also the smaller ones."""
    workers, at = whole(rng, 4, 12), moment(rng)
    local = whole(rng, 8, 48)
    batch = workers * local
    sizes, seconds = images(rng, batch), scaled(rng, 0.05, 0.5)
    fast = whole(rng, 1, workers - 1)
    factors = [
        {"workers": fast, "factor": 1.0},
        {"workers": workers - fast, "factor": round(between(rng, 1.4, 3), 3)},
    ]
    limits = [int(local * between(rng, 1.3, 2.2)) for _ in range(fast)] + [
        int(local * between(rng, 1.05, 1.5)) for _ in range(workers - fast)
    ]
    devices = devices_for(rng, workers, batch, sizes, seconds, factors=factors)
    return case(
        rng,
        seed,
        "limited-memory",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
        limits=limits,
        profile=True,
    )


@kind("Up to 256 ranks of two or three speeds, with lognormal sizes")
def large_mixed_cluster(rng, seed):
    """Many ranks: the slowest of many decides."""
    workers, at = whole(rng, 96, 256), moment(rng, 60, 160)
    batch = min(2048, workers * whole(rng, 3, 8))
    sizes = spread_sizes(rng, "lognormal", between(rng, 30, 300), between(rng, 0.3, 0.9), batch)
    seconds = scaled(rng, 0.2, 1.5)
    factors = generations(
        rng, workers, [1, between(rng, 1.1, 1.5), between(rng, 1.5, 2.2)][: pick(rng, 2, 3)]
    )
    devices = devices_for(rng, workers, batch, sizes, seconds, factors=factors)
    return case(
        rng, seed, "large-mixed", at, workers, batch, sizes, devices, network(rng, workers, seconds)
    )


@kind("Up to 256 equal ranks, of which now and then one is slow for a few steps")
def large_cluster_with_hiccups(rng, seed):
    """Each rank is slow seldom, but of so many some rank often is."""
    workers, at = whole(rng, 96, 256), moment(rng, 80, 160)
    batch = min(2048, workers * whole(rng, 2, 8))
    sizes, seconds = images(rng, batch), scaled(rng, 0.1, 0.8)
    span = whole(rng, 1, 4)
    hiccups = {
        "ranks": list(range(workers)),
        "factor": round(between(rng, 1.3, 2.5), 3),
        "first_step": 0,
        "steps": span,
        "every": span,
        "chance": scaled(rng, 0.2, 2.0) / workers,
    }
    devices = devices_for(
        rng, workers, batch, sizes, seconds, noise=noise_of(rng, 0.03), slowdowns=[hiccups]
    )
    return case(
        rng,
        seed,
        "large-hiccups",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )


@kind("A large model on a slow network: the all-reduce takes about as long as computing")
def slow_network(rng, seed):
    """Ten gigabits a second, or less."""
    workers, at = whole(rng, 4, 24), moment(rng)
    batch = max(16, workers * whole(rng, 2, 16))
    sizes = spread_sizes(
        rng, pick(rng, "gamma", "lognormal"), between(rng, 20, 500), between(rng, 0.2, 0.8), batch
    )
    seconds = scaled(rng, 0.2, 1.5)
    devices = devices_for(
        rng, workers, batch, sizes, seconds, factors=lottery(rng, workers, between(rng, 0.01, 0.12))
    )
    communication = network(rng, workers, seconds, 0.5, 1.6)
    communication["fixed_s"] = seconds * between(rng, 0, 0.1)
    return case(rng, seed, "slow-network", at, workers, batch, sizes, devices, communication)


@kind("Some ranks load their batches from slow disks, and others from fast ones")
def slow_disks(rng, seed):
    """Loading does not shrink when a rank gets fewer samples."""
    workers, at = whole(rng, 4, 24), moment(rng)
    batch = max(16, workers * whole(rng, 4, 24))
    sizes = spread_sizes(rng, "lognormal", between(rng, 50, 200), between(rng, 0.1, 0.6), batch)
    seconds = scaled(rng, 0.1, 1.0)
    slow = set(chosen(rng, workers, whole(rng, 1, max(1, workers // 3))))
    data = [
        seconds * (between(rng, 0.15, 0.6) if rank in slow else between(rng, 0.005, 0.03))
        for rank in range(workers)
    ]
    devices = devices_for(
        rng, workers, batch, sizes, seconds, data_s=data, factors=lottery(rng, workers, 0.02)
    )
    return case(
        rng, seed, "slow-disks", at, workers, batch, sizes, devices, network(rng, workers, seconds)
    )


@kind("All ranks load slowly from shared storage, alike, and computing differs by rank")
def shared_storage(rng, seed):
    """The loading that all have in common cannot be won back."""
    workers, at = whole(rng, 4, 16), moment(rng)
    batch = workers * whole(rng, 8, 32)
    sizes, seconds = images(rng, batch), scaled(rng, 0.05, 0.5)
    factors = generations(rng, workers, [1, between(rng, 1.2, 2)])
    devices = devices_for(
        rng,
        workers,
        batch,
        sizes,
        seconds,
        data_s=seconds * between(rng, 0.2, 0.8),
        factors=factors,
    )
    return case(
        rng,
        seed,
        "shared-storage",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )


# Slowness in time, in training under plain data parallelism


@kind("One to three ranks got hotter, slower in stages, and have been at their plateau for a while")
def throttled(rng, seed):
    """Thermal throttling that ended at a plateau before the forecast."""
    workers, at = whole(rng, 4, 24), moment(rng, 110)
    batch = workers * whole(rng, 8, 40)
    sizes, seconds = images(rng, batch), scaled(rng, 0.05, 0.6)
    slowdowns = []
    for rank in chosen(rng, workers, whole(rng, 1, 3)):
        climb = 2 * whole(rng, 5, 15)
        start = whole(rng, 5, at - climb - 40)
        slowdowns += heating([rank], round(between(rng, 1.2, 2.0), 3), start, climb, at)
    devices = devices_for(rng, workers, batch, sizes, seconds, slowdowns=slowdowns)
    return case(
        rng, seed, "throttled", at, workers, batch, sizes, devices, network(rng, workers, seconds)
    )


@kind("A rank became slower long before the forecast and stays so, with sizes that differ")
def slow_for_long(rng, seed):
    """The slowness covers all recent steps."""
    workers, at = whole(rng, 4, 32), moment(rng, 120)
    batch = max(16, workers * whole(rng, 4, 16))
    sizes = spread_sizes(
        rng,
        pick(rng, "gamma", "lognormal", "uniform"),
        between(rng, 20, 200),
        between(rng, 0.2, 0.5),
        batch,
    )
    seconds = scaled(rng, 0.1, 1.0)
    ranks = chosen(rng, workers, whole(rng, 1, max(1, workers // 8)))
    slowdowns = [lasting(ranks, round(between(rng, 1.3, 4), 3), whole(rng, 5, at - 80), at)]
    devices = devices_for(rng, workers, batch, sizes, seconds, slowdowns=slowdowns)
    return case(
        rng,
        seed,
        "slow-for-long",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )


@kind("A rank became slower shortly before the forecast and stays so")
def slow_since_lately(rng, seed):
    """Older steps show the rank as it no longer is."""
    workers, at = whole(rng, 4, 24), moment(rng)
    batch = workers * whole(rng, 6, 32)
    sizes = pick(
        rng, images(rng, batch), spread_sizes(rng, "gamma", 50.0, between(rng, 0.2, 0.6), batch)
    )
    seconds = scaled(rng, 0.1, 0.8)
    slowdowns = [
        lasting(
            chosen(rng, workers, whole(rng, 1, 2)),
            round(between(rng, 1.4, 3), 3),
            at - whole(rng, 16, 45),
            at,
        )
    ]
    devices = devices_for(rng, workers, batch, sizes, seconds, slowdowns=slowdowns)
    return case(
        rng,
        seed,
        "slow-since-lately",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )


@kind("A rank was slow for a while, which was over long before the forecast")
def slow_long_ago(rng, seed):
    """All recent steps are normal."""
    workers, at = whole(rng, 4, 24), moment(rng, 140)
    batch = workers * whole(rng, 6, 32)
    sizes = spread_sizes(rng, "lognormal", between(rng, 20, 100), between(rng, 0.1, 0.6), batch)
    seconds = scaled(rng, 0.1, 0.8)
    steps = whole(rng, 15, 45)
    passed = {
        "ranks": chosen(rng, workers, whole(rng, 1, 3)),
        "factor": round(between(rng, 1.5, 5), 3),
        "first_step": whole(rng, 0, at - 75 - steps),
        "steps": steps,
    }
    devices = devices_for(rng, workers, batch, sizes, seconds, slowdowns=[passed])
    return case(
        rng,
        seed,
        "slow-long-ago",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )


@kind("A rank was slow for a while, which was over shortly before the forecast")
def slow_until_lately(rng, seed):
    """The recent steps hold both the slowness and its end."""
    workers, at = whole(rng, 4, 24), moment(rng, 80)
    batch = workers * whole(rng, 6, 32)
    sizes = pick(
        rng, images(rng, batch), spread_sizes(rng, "uniform", 50.0, between(rng, 0.1, 0.5), batch)
    )
    seconds = scaled(rng, 0.1, 0.8)
    steps = whole(rng, 10, 35)
    passed = {
        "ranks": chosen(rng, workers, whole(rng, 1, 2)),
        "factor": round(between(rng, 1.4, 3), 3),
        "first_step": at - whole(rng, 16, 40) - steps,
        "steps": steps,
    }
    devices = devices_for(rng, workers, batch, sizes, seconds, slowdowns=[passed])
    return case(
        rng,
        seed,
        "slow-until-lately",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )


@kind("All ranks alike were slow for a while, as from a fault of the storage, and it has passed")
def all_were_slow(rng, seed):
    """A slowness in common, which says nothing about balance."""
    workers, at = whole(rng, 4, 16), moment(rng, 100)
    batch = max(16, workers * whole(rng, 4, 16))
    sizes = spread_sizes(rng, "gamma", between(rng, 20, 100), between(rng, 0.3, 0.8), batch)
    seconds = scaled(rng, 0.1, 0.8)
    steps = whole(rng, 10, 30)
    passed = {
        "ranks": list(range(workers)),
        "factor": round(between(rng, 1.3, 3), 3),
        "first_step": whole(rng, 0, at - 25 - steps),
        "steps": steps,
    }
    devices = devices_for(rng, workers, batch, sizes, seconds, slowdowns=[passed])
    return case(
        rng,
        seed,
        "all-were-slow",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )


@kind("Noisy neighbours: on a few ranks other jobs come and go by chance, for some steps each")
def noisy_neighbours(rng, seed):
    """Random spans of slowness on ranks that are known for it."""
    workers, at = whole(rng, 4, 24), moment(rng, 100)
    batch = workers * whole(rng, 6, 32)
    sizes, seconds = images(rng, batch), scaled(rng, 0.1, 0.8)
    span = whole(rng, 3, 10)
    neighbour = {
        "ranks": chosen(rng, workers, whole(rng, 1, max(2, workers // 4))),
        "factor": round(between(rng, 1.2, 2.2), 3),
        "first_step": 0,
        "steps": span,
        "every": span,
        "chance": round(between(rng, 0.15, 0.6), 3),
    }
    devices = devices_for(rng, workers, batch, sizes, seconds, slowdowns=[neighbour])
    return case(
        rng,
        seed,
        "noisy-neighbours",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )


@kind("All ranks are slow in turn, by chance, for one or two steps each")
def slow_in_turn(rng, seed):
    """No allocation of samples helps against it."""
    workers, at = whole(rng, 4, 32), moment(rng)
    batch = max(16, workers * whole(rng, 4, 24))
    sizes, seconds = images(rng, batch), scaled(rng, 0.05, 0.6)
    span = whole(rng, 1, 2)
    turns = {
        "ranks": list(range(workers)),
        "factor": round(between(rng, 1.5, 4), 3),
        "first_step": 0,
        "steps": span,
        "every": span,
        "chance": round(between(rng, 0.02, 0.15), 3),
    }
    devices = devices_for(rng, workers, batch, sizes, seconds, slowdowns=[turns])
    return case(
        rng,
        seed,
        "slow-in-turn",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )


@kind("Rank 0 writes a checkpoint every so many steps, which takes it several times a step's time")
def checkpoints(rng, seed):
    """Regular pauses of one rank."""
    workers, at = whole(rng, 4, 24), moment(rng, 120)
    batch = max(16, workers * whole(rng, 4, 24))
    sizes = spread_sizes(rng, "gamma", between(rng, 20, 100), between(rng, 0.2, 0.7), batch)
    seconds, every = scaled(rng, 0.1, 0.8), whole(rng, 10, 30)
    pause = {
        "ranks": [0],
        "factor": round(between(rng, 2, 8), 3),
        "first_step": every - 1,
        "steps": 1,
        "every": every,
    }
    devices = devices_for(rng, workers, batch, sizes, seconds, slowdowns=[pause])
    return case(
        rng, seed, "checkpoints", at, workers, batch, sizes, devices, network(rng, workers, seconds)
    )


@kind("All ranks pause together at regular steps, as for logging or the collection of garbage")
def common_pauses(rng, seed):
    """Regular pauses that all have in common, and devices of two speeds."""
    workers, at = whole(rng, 4, 24), moment(rng, 100)
    batch = workers * whole(rng, 6, 32)
    sizes, seconds, every = images(rng, batch), scaled(rng, 0.05, 0.6), whole(rng, 8, 25)
    pause = {
        "ranks": list(range(workers)),
        "factor": round(between(rng, 1.5, 5), 3),
        "first_step": every // 2,
        "steps": 1,
        "every": every,
    }
    factors = generations(rng, workers, [1, between(rng, 1.1, 1.7)])
    devices = devices_for(rng, workers, batch, sizes, seconds, factors=factors, slowdowns=[pause])
    return case(
        rng,
        seed,
        "common-pauses",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )


@kind("A job on one node's ranks runs at regular times, for a quarter to a half of each period")
def co_tenant(rng, seed):
    """Ranks of a node are slow together, periodically."""
    workers, at = pick(rng, 8, 12, 16, 24), moment(rng, 120)
    batch = workers * whole(rng, 6, 24)
    sizes = spread_sizes(rng, "lognormal", between(rng, 20, 100), between(rng, 0.1, 0.5), batch)
    seconds, every = scaled(rng, 0.1, 0.8), whole(rng, 16, 30)
    node = 4 * whole(rng, 0, workers // 4 - 1)
    tenant = {
        "ranks": list(range(node, node + 4)),
        "factor": round(between(rng, 1.2, 2), 3),
        "first_step": whole(rng, 0, 15),
        "steps": whole(rng, every // 4, every // 2),
        "every": every,
    }
    devices = devices_for(rng, workers, batch, sizes, seconds, slowdowns=[tenant])
    return case(
        rng, seed, "co-tenant", at, workers, batch, sizes, devices, network(rng, workers, seconds)
    )


@kind("Each rank's step is delayed by a random time, up to half a step")
def random_delays(rng, seed):
    """Jitter of the operating system or of a simulator that makes the samples."""
    workers, at = whole(rng, 4, 32), moment(rng)
    batch = workers * whole(rng, 8, 32)
    sizes, seconds = images(rng, batch), scaled(rng, 0.05, 0.5)
    low = seconds * between(rng, 0, 0.05)
    delays = [low, low + seconds * between(rng, 0.1, 0.5)]
    devices = devices_for(
        rng,
        workers,
        batch,
        sizes,
        seconds,
        delay_s=delays,
        factors=lottery(rng, workers, between(rng, 0.005, 0.06)),
    )
    return case(
        rng,
        seed,
        "random-delays",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
    )


@kind(
    "Everything at once: mixed GPUs, uneven text, a throttled rank and passing slowdowns by chance"
)
def everything(rng, seed):
    """A busy cluster on an ordinary day."""
    workers, at = whole(rng, 8, 32), moment(rng, 120)
    batch = max(16, workers * whole(rng, 3, 12))
    sizes, seconds = texts(rng, batch, 1024), scaled(rng, 0.2, 1.2)
    hot, span = chosen(rng, workers, 1), whole(rng, 1, 3)
    slowdowns = heating(
        hot, round(between(rng, 1.2, 1.6), 3), whole(rng, 5, 20), 2 * whole(rng, 5, 10), at
    )
    others = [rank for rank in range(workers) if rank not in hot]
    slowdowns.append(
        {
            "ranks": others,
            "factor": round(between(rng, 1.3, 2.5), 3),
            "first_step": 0,
            "steps": span,
            "every": span,
            "chance": round(between(rng, 0.005, 0.04), 4),
        }
    )
    factors = generations(rng, workers, [1, between(rng, 1.1, 1.8)])
    devices = devices_for(
        rng,
        workers,
        batch,
        sizes,
        seconds,
        cost={"kappa": scaled(rng, 5e-5, 5e-4), "padded": False},
        factors=factors,
        slowdowns=slowdowns,
    )
    return case(
        rng, seed, "everything", at, workers, batch, sizes, devices, network(rng, workers, seconds)
    )


# Other presets in force


@kind("Paceline, by default, in force on mixed GPUs with uneven video")
def paceline_video(rng, seed):
    """The forecast looks from a balanced run at worse presets."""
    workers, at = whole(rng, 4, 24), moment(rng)
    batch = max(16, workers * whole(rng, 3, 12))
    sizes = spread_sizes(rng, "gamma", between(rng, 30, 200), between(rng, 0.3, 1.0), batch)
    seconds = scaled(rng, 0.2, 1.5)
    devices = devices_for(
        rng,
        workers,
        batch,
        sizes,
        seconds,
        factors=generations(rng, workers, [1, between(rng, 1.2, 2.2)]),
    )
    return case(
        rng,
        seed,
        "paceline-video",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
        "paceline",
    )


@kind(
    "Paceline in free mode in force with speech, and a rank that throttled and reached its plateau"
)
def paceline_free_speech(rng, seed):
    """Composed batches hide how uneven random ones would be."""
    workers, at = whole(rng, 4, 16), moment(rng, 100)
    batch = max(16, workers * whole(rng, 3, 12))
    sizes, seconds = utterances(rng, batch), scaled(rng, 0.1, 1.0)
    climb = 2 * whole(rng, 5, 12)
    slowdowns = heating(
        chosen(rng, workers, 1),
        round(between(rng, 1.2, 1.9), 3),
        whole(rng, 5, at - climb - 40),
        climb,
        at,
    )
    devices = devices_for(rng, workers, batch, sizes, seconds, slowdowns=slowdowns)
    parameters = {"mode": "free", "window": pick(rng, 32, 64, 128)}
    return case(
        rng,
        seed,
        "paceline-free",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
        "paceline",
        parameters,
    )


@kind("Paceline in force with its cost set to padded, on padded text")
def paceline_padded_text(rng, seed):
    """Exact mode, with the cost that is true."""
    workers, at = whole(rng, 4, 16), moment(rng)
    batch = max(16, workers * whole(rng, 4, 16))
    sizes, seconds = texts(rng, batch, 512), scaled(rng, 0.1, 1.0)
    devices = devices_for(
        rng,
        workers,
        batch,
        sizes,
        seconds,
        cost={"kappa": 0.0, "padded": True},
        factors=lottery(rng, workers, between(rng, 0.01, 0.1)),
    )
    parameters = {"mode": "exact", "cost": "padded"}
    return case(
        rng,
        seed,
        "paceline-padded",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
        "paceline",
        parameters,
    )


@kind(
    "Paceline in force while all ranks are slow in turn by chance and a slowness of one rank has passed"
)
def paceline_after_slowness(rng, seed):
    """What remains cannot be balanced."""
    workers, at = whole(rng, 4, 16), moment(rng, 110)
    batch = workers * whole(rng, 6, 24)
    sizes = spread_sizes(rng, "lognormal", between(rng, 20, 100), between(rng, 0.2, 0.6), batch)
    seconds, steps = scaled(rng, 0.1, 0.8), whole(rng, 15, 40)
    slow = whole(rng, 0, workers - 1)
    slowdowns = [
        {
            "ranks": [slow],
            "factor": round(between(rng, 1.5, 3), 3),
            "first_step": whole(rng, 5, at - 30 - steps),
            "steps": steps,
        },
        {
            "ranks": [rank for rank in range(workers) if rank != slow],
            "factor": round(between(rng, 1.3, 2.5), 3),
            "first_step": 0,
            "steps": 1,
            "every": 1,
            "chance": round(between(rng, 0.01, 0.08), 3),
        },
    ]
    devices = devices_for(rng, workers, batch, sizes, seconds, slowdowns=slowdowns)
    return case(
        rng,
        seed,
        "paceline-after",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
        "paceline",
    )


@kind("Chronica in force on two generations of GPUs, with video of very different lengths")
def chronica_video(rng, seed):
    """Chronica's own ground."""
    workers, at = whole(rng, 4, 32), moment(rng)
    batch = max(16, workers * whole(rng, 3, 8))
    sizes = spread_sizes(rng, "gamma", between(rng, 30, 100), between(rng, 0.4, 1.4), batch)
    seconds = scaled(rng, 0.2, 1.5)
    devices = devices_for(
        rng,
        workers,
        batch,
        sizes,
        seconds,
        factors=generations(rng, workers, [1, between(rng, 1.3, 2)]),
    )
    return case(
        rng,
        seed,
        "chronica-video",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
        "chronica",
    )


@kind("Chronica in force with the paper's picks, on equal ranks with point clouds")
def chronica_as_printed(rng, seed):
    """Representative batches by the paper's algorithms."""
    workers, at = whole(rng, 4, 16), moment(rng)
    batch = max(16, workers * whole(rng, 3, 10))
    sizes = spread_sizes(rng, "normal", between(rng, 20, 120), between(rng, 0.1, 0.35), batch)
    seconds = scaled(rng, 0.1, 1.0)
    devices = devices_for(
        rng,
        workers,
        batch,
        sizes,
        seconds,
        factors=lottery(rng, workers, between(rng, 0.005, 0.05)),
    )
    parameters = {"picks": "paper", "ett": pick(rng, "per-step", "per-sample")}
    return case(
        rng,
        seed,
        "chronica-paper",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
        "chronica",
        parameters,
    )


@kind("SATA in force, once an epoch, on a small data set, with one rank that is slower for good")
def sata_epochs(rng, seed):
    """Several epochs are over before the forecast."""
    workers, at = whole(rng, 4, 16), moment(rng, 80)
    batch = workers * whole(rng, 16, 64)
    sizes, seconds = images(rng, batch), scaled(rng, 0.05, 0.4)
    sizes["samples"] = batch * whole(rng, 10, 20) + whole(rng, 0, batch - 1)
    factors = [1.0] * workers
    factors[whole(rng, 0, workers - 1)] = round(between(rng, 1.5, 8), 3)
    devices = devices_for(rng, workers, batch, sizes, seconds, factors=factors)
    return case(
        rng,
        seed,
        "sata-epochs",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
        "sata",
    )


@kind(
    "SATA in force every few steps, with a rank that became slower before the forecast and stays so"
)
def sata_steps(rng, seed):
    """Shares have followed the slowness."""
    workers, at = whole(rng, 4, 12), moment(rng, 120)
    batch = workers * whole(rng, 16, 48)
    sizes, seconds = images(rng, batch), scaled(rng, 0.05, 0.4)
    slowdowns = [
        lasting(
            chosen(rng, workers, 1), round(between(rng, 1.4, 3), 3), whole(rng, 10, at - 60), at
        )
    ]
    devices = devices_for(
        rng,
        workers,
        batch,
        sizes,
        seconds,
        factors=lottery(rng, workers, 0.05),
        slowdowns=slowdowns,
    )
    parameters = {"every_steps": pick(rng, 10, 20, 30)}
    return case(
        rng,
        seed,
        "sata-steps",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
        "sata",
        parameters,
    )


@kind("LBB in force on a few mixed GPUs with trial batches before training")
def lbb_profiled(rng, seed):
    """Counts that fit nearly from the start."""
    workers, at = whole(rng, 4, 8), moment(rng)
    batch = pick(rng, 256, 512, 1024)
    sizes, seconds = images(rng, batch), scaled(rng, 0.05, 0.3)
    factors = [round(scaled(rng, 0.7, 3.0), 3) for _ in range(workers)]
    devices = devices_for(
        rng,
        workers,
        batch,
        sizes,
        seconds,
        fixed=(0.05, 0.2),
        noise=noise_of(rng, 0.03),
        factors=factors,
    )
    return case(
        rng,
        seed,
        "lbb-profiled",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
        "lbb",
        profile=True,
    )


@kind("LBB in force without trial batches, on uneven samples that it deals out by their load")
def lbb_levelled(rng, seed):
    """Counts by time, samples by size."""
    workers, at = whole(rng, 4, 12), moment(rng, 90)
    batch = workers * whole(rng, 10, 30)
    sizes = spread_sizes(rng, "lognormal", between(rng, 20, 100), between(rng, 0.2, 0.7), batch)
    seconds = scaled(rng, 0.1, 0.8)
    devices = devices_for(
        rng,
        workers,
        batch,
        sizes,
        seconds,
        factors=generations(rng, workers, [1, between(rng, 1.3, 2.5)]),
    )
    parameters = {"which": "levelled", "step": pick(rng, 1, 2)}
    return case(
        rng,
        seed,
        "lbb-levelled",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
        "lbb",
        parameters,
    )


@kind("BOA in force on mixed GPUs, with sizes that it does not know")
def boa_mixed(rng, seed):
    """Sizes are noise to the preset in force."""
    workers, at = whole(rng, 4, 24), moment(rng)
    batch = max(16, workers * whole(rng, 4, 20))
    sizes = spread_sizes(
        rng, pick(rng, "gamma", "uniform"), between(rng, 20, 100), between(rng, 0.1, 0.5), batch
    )
    seconds = scaled(rng, 0.1, 0.8)
    factors = generations(rng, workers, [1, between(rng, 1.2, 1.6), between(rng, 1.7, 2.6)])
    devices = devices_for(rng, workers, batch, sizes, seconds, factors=factors)
    return case(
        rng,
        seed,
        "boa-mixed",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
        "boa",
    )


@kind(
    "Dynamic batching in force on CPU workers with different numbers of cores, with large batches"
)
def dynamic_batching_cores(rng, seed):
    """As the paper's testbed, with more workers."""
    workers, at = whole(rng, 4, 10), moment(rng)
    batch = workers * whole(rng, 32, 128)
    sizes, seconds = images(rng, batch), scaled(rng, 0.2, 1.5)
    factors = [round(12 / whole(rng, 3, 24), 4) for _ in range(workers)]
    devices = devices_for(rng, workers, batch, sizes, seconds, factors=factors)
    return case(
        rng,
        seed,
        "dynamic-cores",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
        "dynamic-batching",
    )


@kind("Dynamic batching in force on noisy workers, with neighbours that come and go by chance")
def dynamic_batching_noisy(rng, seed):
    """A closed loop that has much to follow."""
    workers, at = whole(rng, 4, 16), moment(rng, 90)
    batch = workers * whole(rng, 16, 48)
    sizes, seconds, span = images(rng, batch), scaled(rng, 0.1, 0.6), whole(rng, 4, 12)
    neighbour = {
        "ranks": chosen(rng, workers, whole(rng, 1, 2)),
        "factor": round(between(rng, 1.2, 1.8), 3),
        "first_step": 0,
        "steps": span,
        "every": span,
        "chance": round(between(rng, 0.2, 0.5), 3),
    }
    devices = devices_for(
        rng,
        workers,
        batch,
        sizes,
        seconds,
        noise=between(rng, 0.02, 0.08),
        factors=lottery(rng, workers, 0.08),
        slowdowns=[neighbour],
    )
    parameters = {"smoothing": pick(rng, 0.2, 0.3, 0.5), "dead_band": pick(rng, 0.05, 0.1)}
    return case(
        rng,
        seed,
        "dynamic-noisy",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
        "dynamic-batching",
        parameters,
    )


@kind("Static batching in force with capacities that are about right, on mixed devices")
def static_batching(rng, seed):
    """Counts from a data sheet, which is wrong by up to a quarter."""
    workers, at = whole(rng, 4, 16), moment(rng)
    batch = workers * whole(rng, 10, 40)
    sizes = pick(
        rng, images(rng, batch), spread_sizes(rng, "gamma", 40.0, between(rng, 0.1, 0.5), batch)
    )
    seconds = scaled(rng, 0.1, 0.8)
    factors = [round(scaled(rng, 0.7, 2.5), 3) for _ in range(workers)]
    capacity = [round(10 / factor * between(rng, 0.8, 1.25), 2) for factor in factors]
    devices = devices_for(rng, workers, batch, sizes, seconds, factors=factors)
    return case(
        rng,
        seed,
        "static",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds),
        "static-batching",
        {"capacity": capacity},
    )


@kind("Local SGD in force on a slow network, with ranks that are slow in turn by chance")
def local_sgd(rng, seed):
    """Replicas meet every few steps only."""
    workers, at = whole(rng, 4, 16), moment(rng)
    batch = workers * whole(rng, 8, 32)
    sizes, seconds = images(rng, batch), scaled(rng, 0.1, 0.6)
    turns = {
        "ranks": list(range(workers)),
        "factor": round(between(rng, 1.5, 3), 3),
        "first_step": 0,
        "steps": 1,
        "every": 1,
        "chance": round(between(rng, 0.03, 0.15), 3),
    }
    devices = devices_for(rng, workers, batch, sizes, seconds, slowdowns=[turns])
    communication = network(rng, workers, seconds, 0.3, 1.0)
    parameters = {"every": pick(rng, 4, 8, 16)}
    return case(
        rng,
        seed,
        "local-sgd",
        at,
        workers,
        batch,
        sizes,
        devices,
        communication,
        "local-sgd",
        parameters,
    )


@kind("RNA in force while each rank's step is delayed by a random time")
def rna(rng, seed):
    """RNA's own ground."""
    workers, at = whole(rng, 4, 16), moment(rng)
    batch = workers * whole(rng, 8, 64)
    sizes, seconds = images(rng, batch), scaled(rng, 0.04, 0.3)
    delays = [0.0, seconds * between(rng, 0.2, 1.2)]
    devices = devices_for(rng, workers, batch, sizes, seconds, delay_s=delays)
    return case(
        rng,
        seed,
        "rna",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds, 0.02, 0.15),
        "rna",
    )


@kind("AD-PSGD in force on two groups of ranks whose speeds last, with uneven samples")
def ad_psgd(rng, seed):
    """No rank waits for slower ones before the epoch ends."""
    workers, at = 2 * whole(rng, 2, 8), moment(rng)
    batch = max(16, workers * whole(rng, 4, 16))
    sizes = spread_sizes(rng, "lognormal", between(rng, 20, 100), between(rng, 0.2, 0.6), batch)
    seconds = scaled(rng, 0.1, 0.8)
    devices = devices_for(
        rng,
        workers,
        batch,
        sizes,
        seconds,
        factors=generations(rng, workers, [1, between(rng, 1.3, 2.5)]),
    )
    return case(
        rng,
        seed,
        "ad-psgd",
        at,
        workers,
        batch,
        sizes,
        devices,
        network(rng, workers, seconds, 0.05, 0.3),
        "ad-psgd",
    )
