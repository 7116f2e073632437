"""Capacities: the relative speeds of ranks, estimated from their devices alone.

The method is that of "Taming Resource Heterogeneity In Distributed ML Training With Dynamic
Batching", §III-B ("Estimating throughput"): a CPU rank's speed is its number of cores, and any
other rank's speed is its half-precision FLOP/s. FLOP/s are from vendors' data sheets or, if a sheet
is missing, from a trial when the process group starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.wire import RankDevice

# For each device name that PyTorch returns: dense half-precision TFLOP/s (tensor cores that
# accumulate in single precision, without sparsity), from the data sheets and white papers of NVIDIA
# and AMD: "Tesla P100", "Tesla V100", "Tesla T4", "A2", "A10", "A30", "A40", "A100", "L4", "L40",
# "L40S", "H100", "H200", "DGX B200"; "NVIDIA Ampere GA102 GPU Architecture" and "NVIDIA Ada GPU
# Architecture" for RTX; "AMD Instinct MI300X". Data sheets that count sparsity list twice these
# values. Partitions of a GPU (MIG) and virtual GPUs have names of their own and are not in the
# table.
HALF_PRECISION_TFLOPS = {
    "Tesla P100-PCIE-12GB": 18.7,
    "Tesla P100-PCIE-16GB": 18.7,
    "Tesla P100-SXM2-16GB": 21.2,
    "Tesla V100-PCIE-16GB": 112.0,
    "Tesla V100-PCIE-32GB": 112.0,
    "Tesla V100-SXM2-16GB": 125.0,
    "Tesla V100-SXM2-32GB": 125.0,
    "Tesla T4": 65.0,
    "NVIDIA A2": 18.0,
    "NVIDIA A10": 125.0,
    "NVIDIA A30": 165.0,
    "NVIDIA A40": 149.7,
    "NVIDIA A100-PCIE-40GB": 312.0,
    "NVIDIA A100-SXM4-40GB": 312.0,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA A100 80GB PCIe": 312.0,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA GeForce RTX 3090": 71.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA L4": 121.0,
    "NVIDIA L40": 181.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H200": 989.0,
    "NVIDIA B200": 2250.0,
    "AMD Instinct MI300X": 1307.4,
}


class Capacities(NamedTuple):
    """Speeds of the ranks relative to each other, and the measure that they come from."""

    # The relative speed of each rank, above 0; empty: unknown.
    values: tuple[float, ...]
    # The measure: "cores", "FLOP/s" (of data sheets), "trial", "equal devices", or empty.
    by: str


UNKNOWN = Capacities((), "")


def capacities(devices: Sequence[RankDevice]) -> Capacities:
    """Return the ranks' capacities, from one measure; `UNKNOWN` if no measure covers all ranks."""
    if not devices:
        return UNKNOWN
    trials = [device.flops for device in devices if device.flops is not None]
    if len(trials) == len(devices):
        return Capacities(tuple(trials), "trial")
    if all(device.kind == "cpu" for device in devices):
        return Capacities(tuple(float(device.used_cores) for device in devices), "cores")
    if len({(device.kind, device.name) for device in devices}) == 1:
        return Capacities((1.0,) * len(devices), "equal devices")
    known = [HALF_PRECISION_TFLOPS.get(device.name) for device in devices]
    tflops = [each for each in known if each is not None]
    if len(tflops) == len(devices) and not any(device.kind == "cpu" for device in devices):
        return Capacities(tuple(1e12 * each for each in tflops), "FLOP/s")
    return UNKNOWN


def need_trial(devices: Sequence[RankDevice]) -> bool:
    """Return True if only a trial can measure these ranks' capacities.

    A trial is needed if ranks have different kinds of devices, or if their devices differ and the
    table lacks one of them. Ranks with equal devices never need a trial.
    """
    return bool(devices) and not capacities(devices).values


def summary(devices: Sequence[RankDevice]) -> str:
    """Return the names of a run's devices, each once, in the order of the ranks; empty: unknown.

    Every CPU is called "cpu", whatever its model.
    """
    names = ["cpu" if device.kind == "cpu" else device.name for device in devices]
    text = " + ".join(dict.fromkeys(names))
    return f"{text} (emulated)" if any(device.emulated for device in devices) else text
