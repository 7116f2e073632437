"""`static-batching` on ranks of different kinds: capacities that nobody has typed.

Real ranks train PLAID on emulated devices, whose kinds, names and cores are emulated as well. How
fast they are follows what the paper goes by: cores, half-precision FLOP/s of data sheets, or what a
trial of a second finds. The policy gets no capacity. Its kind of plan has fixed counts of samples,
so the limit is the least time that any whole counts of the global batch would take. Of a run under
`local-sgd` with these batches the counts must be the same.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import Check, finish, parser
from real import GLOBAL_BATCH, per_sample
from switch import effective, wait

from paceline.core.amounts.devices import HALF_PRECISION_TFLOPS, capacities
from paceline.core.emulation import EmulatedDevice, Emulation
from paceline.wire import RankDevice
from paceline_backend.demo import example
from paceline_backend.server.stack import Stack

GIB = 2**30
STEP_S = 0.3  # of the limit; steps that are much shorter would be hidden by real work
FIXED_S = 0.005
FIRST, COUNT = 8, 16  # steps of the beginning that do not count, then steps that do
T4, L4, A10 = "Tesla T4", "NVIDIA L4", "NVIDIA A10"


@dataclass(frozen=True)
class Mixture:
    """Ranks of one run.

    Args:
        name: of the row.
        devices: of each rank.
        speeds: samples a second of each rank, relative to each other.
        by: what must tell the capacities.
    """

    name: str
    devices: tuple[EmulatedDevice, ...]
    speeds: tuple[float, ...]
    by: str

    def emulation(self) -> Emulation:
        """Devices with which a step at the limit takes about `STEP_S`."""
        sample_s = [STEP_S * sum(self.speeds) / GLOBAL_BATCH / speed for speed in self.speeds]
        made = per_sample(sample_s, [FIXED_S] * len(sample_s))
        return Emulation(**{**_fields(made), "devices": list(self.devices)})


def _fields(emulation: Emulation) -> dict[str, Any]:
    return {name: getattr(emulation, name) for name in ("a_s", "b_s", "c_s")}


def cpu(cores: int) -> EmulatedDevice:
    """A CPU rank."""
    return EmulatedDevice("cpu", "an emulated CPU", cores, 16 * GIB)


def gpu(name: str) -> EmulatedDevice:
    """A GPU rank."""
    return EmulatedDevice("cuda", name, 4, 16 * GIB)


SHEET = tuple(HALF_PRECISION_TFLOPS[name] for name in (T4, L4, A10))
MIXTURES = (
    Mixture("CPUs of 3, 5 and 12 cores", (cpu(3), cpu(5), cpu(12)), (3, 5, 12), "cores"),
    Mixture("T4, L4 and A10", (gpu(T4), gpu(L4), gpu(A10)), SHEET, "FLOP/s"),
    Mixture("T4 and a GPU of no sheet", (gpu(T4), gpu("NVIDIA X9")), (1, 2.5), "trial"),
    # The paper's GPU is 4.3 times as fast as its CPU (0.813 : 0.187).
    Mixture("CPUs and GPUs", (cpu(8), cpu(8), gpu(T4), gpu(T4)), (1, 1, 4.3, 4.3), "trial"),
)


def limit_of(c_s: Sequence[float], b_s: Sequence[float], samples: int) -> float:
    """The least time of a step over all whole counts that are fixed.

    Ranks take as many samples as a step of that time allows; the time is the least of those that
    let all samples be taken.

    Args:
        c_s, b_s: seconds of each rank for a sample, and for a batch besides.
        samples: of the global batch.
    """
    sample_s, fixed_s = np.array(c_s), np.array(b_s)
    times = np.unique(np.arange(1, samples + 1)[:, None] * sample_s + fixed_s)
    return next(
        float(time_s)
        for time_s in times
        if np.floor((time_s - fixed_s) / sample_s + 1e-9).clip(0).sum() >= samples
    )


def measure(stack: Stack, mixture: Mixture) -> dict[str, Any]:
    """Trains one run under `static-batching`, `local-sgd` with its batches, and `bsp`."""
    devices = mixture.emulation()
    run = stack.api(
        "POST",
        "/runs",
        {
            "name": "devices",
            "script": str(example("plaid") / "train.py"),
            "args": ["--epochs", "1000"],
            "nproc": len(mixture.devices),
            "policy": "static-batching",
            "env": {"PACELINE_EMULATE": json.dumps(devices.as_dict())},
        },
    )["id"]
    static = _steps(stack, run, FIRST)
    workers = stack.api("GET", f"/runs/{run}/workers")
    ranks = [RankDevice(**worker["device"]) for worker in workers]
    relaxed = _switch(stack, run, "local-sgd", {"batches": "static-batching"})
    plain = _switch(stack, run, "bsp", {})
    stack.api("POST", f"/runs/{run}/stop", {"force": True})
    wait(stack.api, run, lambda now: now["ended_at"] is not None)
    least_s = limit_of(devices.c_s, devices.b_s, GLOBAL_BATCH)
    return {
        "devices": [worker["device"] for worker in workers],
        "by": capacities(ranks).by,
        "right": capacities(ranks).by == mixture.by and all(device.emulated for device in ranks),
        "limit_s": least_s,
        "step_s": static["step_s"],
        "share_of_limit": least_s / static["step_s"],
        "speedup": plain["step_s"] / static["step_s"],
        "samples": static["samples"],
        "samples_relaxed": relaxed["samples"],
        "samples_bsp": plain["samples"],
    }


def _switch(stack: Stack, run: str, policy: str, parameters: dict[str, Any]) -> dict[str, Any]:
    body = {"policy": policy, "parameters": parameters, "by": "benchmark"}
    version = stack.api("POST", f"/runs/{run}/policy", body)["version"]
    return _steps(stack, run, effective(stack.api, run, version) + FIRST)


def _steps(stack: Stack, run: str, first: int) -> dict[str, Any]:
    """Samples of each rank in most steps from one on, and the median of the slowest rank's time.

    An epoch's last step has fewer samples, and does not count. Steps that the leader plans itself,
    while the controller is late, may have a sample more or less for a rank.
    """
    last = first + COUNT - 1
    wait(stack.api, run, lambda now: (now["step"] or 0) > last, timeout_s=180.0)
    rows = stack.api("GET", f"/runs/{run}/worker-steps?from={first}&to={last}&points=2000")
    samples, compute_s = (np.array(rows[name], float) for name in ("samples", "compute_s"))
    whole = samples.sum(axis=0) == GLOBAL_BATCH
    counts = statistics.mode(map(tuple, samples[:, whole].T.astype(int).tolist()))
    return {
        "step_s": statistics.median(compute_s[:, whole].max(axis=0).tolist()),
        "samples": list(counts),
    }


def main() -> None:
    """Runs the benchmark."""
    options = parser(__doc__).parse_args()
    mixtures = MIXTURES[-1:] if options.quick else MIXTURES
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), 0) as stack:
        results = {mixture.name: measure(stack, mixture) for mixture in mixtures}
    checks = list(
        itertools.chain.from_iterable(
            (
                Check(f"{name}: capacities found as they should be", float(row["right"]), 1, ">="),
                Check(f"{name}: throughput over the limit's", row["share_of_limit"], 0.95, ">="),
                Check(
                    f"{name}: the same batches under local-sgd",
                    float(row["samples"] == row["samples_relaxed"]),
                    1,
                    ">=",
                ),
            )
            for name, row in results.items()
        )
    )
    lines = [f"{'':<28}{'by':<9}{'samples':<20}{'of the limit':>12}{'over bsp':>10}"]
    lines += [
        f"{name:<28}{row['by']:<9}{row['samples']!s:<20}{row['share_of_limit']:>12.3f}"
        f"{row['speedup']:>9.2f}x"
        for name, row in results.items()
    ]
    finish(options, {"global_batch": GLOBAL_BATCH}, results, checks, "\n".join(lines))


if __name__ == "__main__":
    main()
