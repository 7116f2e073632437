"""Measurements of LBB's rows."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from papers import LBB_SSGD_MS, scenario
from scipy.stats import pearsonr, spearmanr

from figures.learning import NETWORKS, by_samples, learn
from figures.recorded import mean, results, trainings
from figures.row import Chart, Line, Measured
from figures.simulated import Floats, Ints, Run, run, with_devices, with_sizes
from paceline.policies.presets.lbb import Cubic, fit_profile
from paceline_backend.simulator import Scenario
from paceline_backend.simulator.scenario import Change, Communication

WORKERS = ("GTX 1070", "GTX 1070, second", "Tesla M40", "GTX 750")
# ResNet-18's 11.2 M weights over PCIe 3.0 x4 with 985 MB/s a lane (Sec. 4.1).
PCIE = Communication(latency_s=5e-5, bytes=44.7e6, bandwidth=3.94e9)


def testbed(**changes: object) -> Scenario:
    """Return Table 2's machine with an all-reduce."""
    return scenario("lbb-table2", communication=PCIE, **changes)


def waiting() -> Measured:
    """Measure each worker's waiting as a share of the step (Figs. 1 and 2)."""
    ran = run(testbed(epochs=1), "bsp")
    share = (ran.wait_s / (ran.wait_s + ran.compute_s)).mean(axis=0)
    values = {
        f"{gpu} waits, %": 100 * float(each) for gpu, each in zip(WORKERS, share, strict=True)
    }
    values["straggler effect"] = float(
        (np.ptp(ran.compute_s, axis=1) / ran.compute_s.mean(axis=1)).mean()
    )
    compute = (1e3 * ran.compute_s.mean(axis=0)).tolist()
    wait = (1e3 * ran.wait_s.mean(axis=0)).tolist()
    lines = [Line("computing", WORKERS, compute), Line("waiting", WORKERS, wait)]
    return Measured(values, Chart("", "ms of a step", lines, bars=True))


def figure_3() -> Measured:
    """Compare the profile of each worker with the product's fit."""
    profiles = testbed().hello().profiles
    values: dict[str, float] = {}
    lines: list[Line] = []
    for gpu, trials in zip(WORKERS, profiles, strict=True):
        counts, seconds = (np.array(column, float) for column in zip(*trials, strict=True))
        fitted = Cubic(fit_profile(trials)[None])(counts.astype(np.int64))
        values[f"{gpu}: Pearson"] = float(pearsonr(seconds, fitted).statistic)
        values[f"{gpu}: Spearman"] = float(spearmanr(seconds, fitted).statistic)
        lines.append(Line(gpu, counts.tolist(), (1e3 * seconds).round(2).tolist()))
    lines.append(Line("Table 2, 128 samples", [128] * 4, LBB_SSGD_MS, paper=True))
    return Measured(values, Chart("samples", "ms", lines))


SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "SSGD": ("bsp", {}),
    "Local SGD, H 2": ("local-sgd", {"every": 2}),
    "Local SGD, H 4": ("local-sgd", {"every": 4}),
    "Local SGD, H 8": ("local-sgd", {"every": 8}),
    "OSA": ("osa", {}),
    "1-Soft": ("n-soft", {"n": 1}),
    "2-Soft": ("n-soft", {"n": 2}),
    "LBB": ("lbb", {}),
}


def figure_4() -> Measured:
    """Measure an epoch with equally many steps, and with fast workers taking over batches."""
    values: dict[str, float] = {}
    bars: dict[str, list[float]] = {"equally many steps": [], "fast workers take batches over": []}
    for label, (policy, parameters) in SYSTEMS.items():
        of = testbed(epochs=2)
        alike = run(of, policy, parameters, uneven_steps=False).ended_s / 2
        shared = run(of, policy, parameters).ended_s / 2
        bars["equally many steps"].append(alike)
        bars["fast workers take batches over"].append(shared)
        values[f"{label}, s"] = alike
        values[f"{label}, batches taken over, s"] = shared
    values |= {
        f"LBB less than {other}, %": 100 * (1 - values["LBB, s"] / values[f"{name}, s"])
        for other, name in (
            ("SSGD", "SSGD"),
            ("OSA", "OSA"),
            ("2-Soft", "2-Soft, batches taken over"),
        )
    }
    lines = [Line(label, list(SYSTEMS), seconds) for label, seconds in bars.items()]
    lines.append(Line("paper", ["SSGD", "LBB"], [62.44, 22.12], paper=True))
    return Measured(values, Chart("", "s per epoch", lines, bars=True))


def figure_5() -> Measured:
    """Measure held-out accuracy of SSGD and LBB, with the same samples on other workers."""
    of = with_sizes(testbed(epochs=12), samples=1198)
    of = msgspec.structs.replace(of, global_batch=128)
    runs = {"SSGD": run(of, "bsp"), "LBB": run(of, "lbb")}
    values: dict[str, float] = {}
    lines: list[Line] = []
    for network in NETWORKS:
        learnt = {label: learn(ran, by_samples, network, noise=0.0) for label, ran in runs.items()}
        for label, each in learnt.items():
            lines.append(Line(f"{label}, {network}", each.steps.tolist(), each.accuracy.tolist()))
        last = {label: 100 * float(each.accuracy[-1]) for label, each in learnt.items()}
        values[f"{network}, SSGD, %"] = last["SSGD"]
        values[f"{network}, LBB, %"] = last["LBB"]
        apart = np.abs(learnt["SSGD"].accuracy - learnt["LBB"].accuracy).max()
        values[f"{network}, furthest apart, points"] = 100 * float(apart)
    return Measured(values, Chart("step", "held-out accuracy", lines))


RELAXED = {"Local SGD, H 8": "local-sgd", "2-Soft": "n-soft", "SSGD": "bsp"}


def figure_6() -> Measured:
    """Measure SSGD and LBB over virtual time; relaxed methods are from a record of real ranks."""
    of = with_sizes(testbed(epochs=30), samples=1198)
    unit_s = [4 * each for each in of.devices.unit_s]  # type: ignore[union-attr]
    of = msgspec.structs.replace(with_devices(of, unit_s=unit_s), global_batch=128)
    values, lines, ended = {}, [], {}
    for label, policy in (("SSGD", "bsp"), ("LBB", "lbb")):
        ran = run(of, policy)
        learnt = learn(ran, by_samples, noise=0.0)
        clock = np.append(0.0, ran.step_s.cumsum())
        at = clock[learnt.steps].round(2).tolist()
        lines.append(Line(label, at, learnt.accuracy.tolist()))
        ended[label] = float(clock[-1])
        values[f"{label}, s for 30 epochs"] = ended[label]
        values[f"{label}, held-out accuracy, %"] = 100 * float(learnt.accuracy[-1])
    values["LBB less than SSGD, %"] = 100 * (1 - ended["LBB"] / ended["SSGD"])
    runs = trainings("synchronisers-5x-long", "one 5x slower, long")
    for label, preset in RELAXED.items():
        accuracy = 100 * mean(runs[preset], "accuracy")
        values[f"{label}, one of eight 5x slower, held-out accuracy, %"] = accuracy
        over = mean(runs[preset], "seconds") / mean(runs["bsp"], "seconds")
        values[f"{label}, one of eight 5x slower, time over SSGD's"] = over
    return Measured(values, Chart("virtual s", "held-out accuracy", lines))


def _effect(ran: Run) -> Floats:
    """Return the straggler effect of each step (Eq. 4), [S]."""
    return np.asarray(np.ptp(ran.compute_s, axis=1) / ran.compute_s.mean(axis=1))


def _changes(ran: Run) -> Ints:
    """Return the largest change of a worker's samples before each step, [S]."""
    samples = ran.features.samples.astype(np.int64)
    return np.asarray(np.abs(np.diff(samples, axis=0, prepend=samples[:1])).max(axis=1))


def figure_7() -> Measured:
    """Measure the straggler effect while workers are disturbed in turn.

    A rapid tuning changes a worker's batch by more than 8 samples.
    """
    values: dict[str, float] = {}
    lines: list[Line] = []
    of = scenario("lbb-disturbances")
    for label, policy in (("SSGD", "bsp"), ("LBB", "lbb"), ("paceline, exact", "paceline")):
        ran = run(of, policy)
        effect = _effect(ran)
        lines.append(Line(label, list(range(len(effect))), effect.round(3).tolist()))
        if policy == "lbb":
            values["LBB: steps above 0.1 before step 25"] = float((effect[:25] > 0.1).sum())
        for slow in of.devices.slowdowns:
            began = slow.first_step
            after = effect[began : began + (slow.steps or 0)]
            values[f"{label}: steps above 0.1 after step {began}"] = float((after > 0.1).sum())
            if policy == "lbb":
                tuned = began + int(np.flatnonzero(_changes(ran)[began:] > 8)[0])
                values[f"LBB: effect after the rapid tuning after step {began}"] = effect[tuned]
    return Measured(values, Chart("step", "straggler effect", lines))


def table_2() -> Measured:
    """Read the record of `benchmarks/papers.py`."""
    ours = results("papers")["lbb_table_2"]["ours"]
    values = {}
    for label, name in (("equal", "SSGD"), ("balanced", "LBB, profiled")):
        of = ours[name]
        for worker in range(4):
            values[f"{label}, worker {worker + 1}, samples"] = of["samples"][worker]
            values[f"{label}, worker {worker + 1}, ms"] = of["worker_ms"][worker]
        values[f"{label}, cluster, ms"] = of["step_ms"]
    return Measured(values)


def table_3() -> Measured:
    """Measure batch sizes by a profile and by a rapid tuning, and errors of expected times.

    Rapid tuning starts from equal batches, and takes a0 from the profile, as in the paper.
    """
    of = testbed(epochs=None, steps=120)
    profiled = run(of, "lbb")
    later = msgspec.structs.replace(of, switches=[Change(16, "lbb")])
    tuned, cold = (run(msgspec.structs.replace(later, profile=of_), "bsp") for of_ in (True, False))
    values: dict[str, float] = {}
    for label, ran in (("profile", profiled), ("rapid", tuned), ("rapid without a profile", cold)):
        samples = ran.features.samples
        at = 0 if ran is profiled else int(np.flatnonzero(_changes(ran))[0])
        for worker in range(4):
            values[f"{label}, worker {worker + 1}, samples"] = float(samples[at, worker])
        values[f"{label}, cluster, ms"] = 1e3 * float(ran.compute_s[at].max())
        values[f"{label}, straggler effect"] = float(_effect(ran)[at])
        if ran is profiled:
            terms = np.array([fit_profile(each) for each in of.hello().profiles])
            error = Cubic(terms)(samples[at].astype(np.int64)) / ran.compute_s[at] - 1
            values["profile, largest error of an expected time, %"] = 100 * float(abs(error).max())
        else:
            above = (_effect(ran)[at:] > 0.1) & (samples[at:].sum(axis=1) == of.global_batch)
            values[f"{label}, steps above 0.1"] = float(above.sum())
    return Measured(values)
