"""The papers' clusters with real ranks: PLAID on emulated devices, one run through all policies."""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from switch import effective, wait

from paceline.core.emulation import Emulation
from paceline_backend import policies
from paceline_backend.demo import example
from paceline_backend.server.stack import Stack

GLOBAL_BATCH = 64  # the example's global batch
LEARN, COUNT = 16, 16  # steps after a switch that do not count, then steps that do


@dataclass(frozen=True)
class Cluster:
    """Devices like a paper's, and the policies to compare on them, after bsp.

    Args:
        name: name of the row.
        devices: the ranks' devices, whose step times are the paper's.
        runs: label → preset and parameters.
    """

    name: str
    devices: Emulation
    runs: dict[str, tuple[str, dict[str, Any]]]


def per_sample(times_s: list[float], fixed_s: list[float] | None = None) -> Emulation:
    """Devices on which a sample takes rank j `times_s[j]`, whatever the sample's size."""
    world = len(times_s)
    return Emulation(a_s=[0.0] * world, b_s=fixed_s or [0.005] * world, c_s=times_s)


EXACT = ("paceline", {"mode": "exact"})
CLUSTERS = (
    Cluster(
        # Times of Table 2's rows. One sample here stands for eight of the 512 there.
        "LBB, Table 2",
        per_sample(
            [8 * s for s in (0.59308e-3, 0.58077e-3, 0.60233e-3, 2.67139e-3)],
            [5.896e-3, 7.152e-3, 8.291e-3, 50.982e-3],
        ),
        {"LBB": ("lbb", {}), "exact": EXACT},
    ),
    Cluster(
        "SATA, one of 4 5x slower",
        per_sample([4e-3, 4e-3, 4e-3, 20e-3]),
        {"SATA": ("sata", {"every_steps": 8}), "exact": EXACT},
    ),
    Cluster(
        "dynamic batching, H 10",
        per_sample([0.1 / 2, 0.1 / 17, 0.1 / 20]),
        {"dynamic": ("dynamic-batching", {}), "exact": EXACT},
    ),
    Cluster(
        "CHRONICA, 4 equal, DIF of PLAID",
        Emulation(a_s=[36e-6] * 4, b_s=[0.005] * 4),
        {
            "CHRONICA": ("chronica", {"picks": "paper", "ett": "per-sample"}),
            "exact": EXACT,
            "free": ("paceline", {"mode": "free"}),
        },
    ),
)


def train(stack: Stack, cluster: Cluster) -> dict[str, Any]:
    """Trains one run under all policies in turn; their speed-ups over bsp."""
    run = stack.api(
        "POST",
        "/runs",
        {
            "name": "papers",
            "script": str(example("plaid") / "train.py"),
            "args": ["--epochs", "1000"],
            "nproc": len(cluster.devices.a_s),
            "policy": "bsp",
            "env": {"PACELINE_EMULATE": json.dumps(cluster.devices.as_dict())},
        },
    )["id"]
    times = {"bsp": _per_work(stack, run, LEARN, cluster)}
    for label, (policy, parameters) in cluster.runs.items():
        if policy not in policies.names():
            continue
        body = {"policy": policy, "parameters": parameters, "by": "benchmark"}
        version = stack.api("POST", f"/runs/{run}/policy", body)["version"]
        begun = effective(stack.api, run, version)
        times[label] = _per_work(stack, run, begun + LEARN, cluster)
    stack.api("POST", f"/runs/{run}/stop", {"force": True})
    wait(stack.api, run, lambda now: now["ended_at"] is not None)
    return {"speedup": {label: times["bsp"] / spent for label, spent in times.items()}}


def _per_work(stack: Stack, run: str, first: int, cluster: Cluster) -> float:
    """Median of step time over the step's work, from step `first` on.

    Work is counted in size units, or in samples where sizes cost nothing.
    """
    last = first + COUNT - 1
    wait(stack.api, run, lambda now: (now["step"] or 0) > last, timeout_s=120.0)
    rows = stack.api("GET", f"/runs/{run}/worker-steps?from={first}&to={last}&points=2000")
    spent = np.array(rows["compute_s"], float).max(axis=0)
    column = "load" if any(cluster.devices.a_s) else "samples"
    work = np.array(rows[column], float).sum(axis=0)
    return statistics.median((spent / work).tolist())


def real_clusters() -> dict[str, Any]:
    """All clusters, one after the other on one embedded stack."""
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), 0) as stack:
        return {cluster.name: train(stack, cluster) for cluster in CLUSTERS}
