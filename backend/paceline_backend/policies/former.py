"""Names of the release before that its documentation and example show, and the new modules lack.

`moved` adds them to the modules at the old paths, for third parties' policies. Remove this file
with the release after 0.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from paceline.wire import Synchronisation
from paceline_backend.policies.base import Parameters, Preset
from paceline_backend.policies.parameters import properties
from paceline_backend.policies.presets import (
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
from paceline_backend.policies.solve import counts


def _schema(kind: type[Parameters], name: str) -> Mapping[str, Any]:
    return properties(kind)[name]


_CAPACITY = _schema(static_batching.StaticBatchingParameters, "capacity")
_PRESETS: tuple[Preset[Any], ...] = (
    *(module.preset for module in (boa, bsp, chronica, dynamic_batching, ep4ddl, lbb)),
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
    "_base": {"Synchronisation": Synchronisation},
    "counted": {
        "PARAMETERS": properties(counts.CountsParameters),
        "PER_RANK": {key: value for key, value in _CAPACITY.items() if key != "description"},
    },
    "linear": {
        "COST": _schema(paceline.PacelineParameters, "cost"),
        "WINDOW": _schema(paceline.PacelineParameters, "window"),
    },
}
