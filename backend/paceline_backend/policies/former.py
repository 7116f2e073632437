"""Names of the release before that the modules at the new paths lack.

`moved` adds them to the modules at the old paths, for third parties' policies. Remove this file
with the release after 0.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from paceline.wire import Synchronisation
from paceline.wire.synchronisation import convert
from paceline_backend.policies.base import Allocator, Policy, Preset
from paceline_backend.policies.parameters import Parameters, PolicyParameterError, properties
from paceline_backend.policies.predict.table import StepTable
from paceline_backend.policies.presets import (
    adaptive,
    boa,
    bsp,
    chronica,
    dynamic_batching,
    ep4ddl,
    lbb,
    paceline,
    relaxed,
    rna_hierarchical,
    sata,
    static_batching,
)
from paceline_backend.policies.registry import make
from paceline_backend.policies.solve import counts, descent

_COMBINED = "bsp paceline chronica sata lbb static-batching dynamic-batching boa"


def _relaxed(name: str, batches: str, synchroniser: str, **parameters: Any) -> Policy:
    """The policy of a preset's batches with another synchroniser."""
    return replace(make(batches), name=name, synchroniser=convert(synchroniser, parameters))


def _policy(name: str, allocator: Allocator, parameters: Mapping[str, Any]) -> Policy:
    """The policy of an allocator."""
    return counts.policy(name, allocator, _counted(parameters))


def _scheduler(parameters: Mapping[str, Any]) -> counts.CountedScheduler:
    """The scheduler that the parameters ask for."""
    return counts.scheduler(_counted(parameters))


def _counted(parameters: Mapping[str, Any]) -> counts.CountsParameters:
    return counts.CountsParameters(which=parameters["which"], window=parameters["window"])


def _schema(kind: type[Parameters], name: str) -> Mapping[str, Any]:
    return properties(kind)[name]


_CAPACITY = _schema(static_batching.StaticBatchingParameters, "capacity")
_STALENESS = _schema(relaxed.RnaParameters, "staleness")
_BATCHES = {**_schema(relaxed.RnaParameters, "batches"), "enum": _COMBINED.split()}

_PRESETS: tuple[Preset[Any], ...] = (
    *(module.preset for module in (adaptive, boa, bsp, chronica, dynamic_batching, ep4ddl, lbb)),
    *(module.preset for module in (paceline, rna_hierarchical, sata, static_batching)),
    *(value for value in vars(relaxed).values() if isinstance(value, Preset)),
)

# For each module that was in `paceline_backend.policies`: what its successor lacks. Each preset was
# in a module of its own, with a `make` that took a mapping.
NAMES: dict[str, dict[str, Any]] = {
    **{
        preset.name.replace("-", "_"): {"make": partial(make, preset.name), "preset": preset}
        for preset in _PRESETS
    },
    "_balance": {"hand_over": descent.hand_over, "linked": descent.linked},
    "_base": {"Synchronisation": Synchronisation},
    "_registry": {"PolicyParameterError": PolicyParameterError},
    "_relaxed": {"BATCHES": _BATCHES, "STALENESS": _STALENESS, "relaxed": _relaxed},
    "counted": {
        "PARAMETERS": properties(counts.CountsParameters),
        "PER_RANK": {key: value for key, value in _CAPACITY.items() if key != "description"},
        "Told": StepTable,
        "policy": _policy,
        "scheduler": _scheduler,
        "told": StepTable.of,
    },
    "linear": {
        "COST": _schema(paceline.PacelineParameters, "cost"),
        "WINDOW": _schema(paceline.PacelineParameters, "window"),
    },
}
NAMES["static_batching"]["CAPACITY"] = _CAPACITY
