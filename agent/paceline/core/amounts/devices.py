"""What ranks can do relative to each other, by their devices alone: capacities.

Taming Resource Heterogeneity In Distributed ML Training With Dynamic Batching, §III-B ("Estimating
throughput"): of CPU ranks by their cores, else by half-precision FLOP/s. These come from vendors'
data sheets; where those do not tell, from a trial that the ranks make when they meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.wire import RankDevice

# Names as PyTorch gives them → dense half-precision TFLOP/s (tensor cores that add up in single
# precision, without sparsity), from the data sheets and white papers of NVIDIA and AMD:
# "Tesla P100", "Tesla V100", "Tesla T4", "A2", "A10", "A30", "A40", "A100", "L4", "L40", "L40S",
# "H100", "H200", "DGX B200"; "NVIDIA Ampere GA102 GPU Architecture" and "NVIDIA Ada GPU
# Architecture" for RTX; "AMD Instinct MI300X". Sheets that count sparsity say twice as much.
# A part of a GPU (MIG) and a virtual GPU have names of their own, and are not here.
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
    """What each rank can do relative to the others, and what says so."""

    values: tuple[float, ...]  # [W] above 0; empty: nothing tells
    by: str  # "cores", "FLOP/s" of data sheets, "trial", "equal devices", or empty


UNKNOWN = Capacities((), "")


def capacities(devices: Sequence[RankDevice]) -> Capacities:
    """The ranks' capacities; all of them rest on the same measure.

    Args:
        devices: of all ranks; empty: unknown.
    """
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
    """Whether only a trial tells what these ranks can do.

    So it is where their kinds differ, or where some have a device that the table does not know and
    that not all have. Ranks with equal devices never need one.
    """
    return bool(devices) and not capacities(devices).values


def summary(devices: Sequence[RankDevice]) -> str:
    """Names of the devices of a run, each once, in the order of the ranks; empty: unknown.

    CPUs are "cpu", whatever their model.
    """
    names = ["cpu" if device.kind == "cpu" else device.name for device in devices]
    text = " + ".join(dict.fromkeys(names))
    return f"{text} (emulated)" if any(device.emulated for device in devices) else text
