"""A table of the devices of a run's ranks; ranks with equal devices share a row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline.commands.printing import spans

DEVICES = ("ranks", "device", "cores", "threads", "memory", "trial")


def devices_of(ranks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows for `DEVICES` from the ascending ranks of ``GET devices``."""
    numbers: dict[tuple[Any, ...], list[int]] = {}
    for each in ranks:
        if device := each["device"]:
            numbers.setdefault(tuple(_row(device).items()), []).append(each["rank"])
    return [{"ranks": spans(of), **dict(row)} for row, of in numbers.items()]


def _row(device: Mapping[str, Any]) -> dict[str, Any]:
    flops = device["flops"]
    return {
        "device": device["name"] + (" (emulated)" if device["emulated"] else ""),
        "cores": device["cores"],
        "threads": device["threads"] or device["cores"],
        "memory": f"{device['memory_bytes'] / 2**30:.1f} GiB",
        "trial": None if flops is None else f"{flops / 1e9:,.4g} GFLOP/s",
    }
