"""The simulated runs whose plans are recorded: each preset with several parameters and settings."""

from __future__ import annotations

from typing import Any

Plain = dict[str, Any]

VARIANTS: dict[str, list[Plain]] = {
    "ad-psgd": [{}, {"batches": "chronica"}],
    "backup-workers": [{}, {"spare": 2, "batches": "static-batching"}],
    "boa": [{}, {"which": "levelled", "window": 8}],
    "bsp": [{}],
    "chronica": [{}, {"ett": "per-sample", "picks": "paper"}, {"picks": "paper", "window": 16}],
    "dynamic-batching": [
        {},
        {"smoothing": 1.0, "dead_band": 0.0, "every_steps": 1, "b_min": 2, "which": "levelled"},
    ],
    "eager-sgd": [{}, {"mode": "solo", "staleness": 0, "batches": "sata"}],
    "ep4ddl": [{"most_threads": 8, "cores": 16, "serial": 0.3}],
    "flexrr": [{}, {"staleness": 1, "batches": "dynamic-batching"}],
    "lbb": [{}, {"fine_threshold": 0.02, "step": 2, "window_steps": 4, "which": "levelled"}],
    "local-sgd": [{}, {"every": 3, "batches": "lbb"}],
    "n-soft": [{}, {"n": 3, "staleness": 1, "batches": "boa"}],
    "osa": [{}, {"batches": "paceline"}],
    "paceline": [{}, {"mode": "free"}, {"cost": "padded"}, {"mode": "free", "cost": "sum"}],
    "rna": [{}, {"probes": 1, "staleness": 2, "batches": "paceline"}],
    "rna-hierarchical": [{}, {"spread": 0.3, "every": 2, "probes": 1}],
    "sata": [{}, {"tolerance": 0.1, "every_steps": 8, "which": "levelled"}],
    "ssp": [{}, {"staleness": 0}, {"staleness": 1, "batches": "static-batching"}],
    "static-batching": [{}, {"which": "levelled"}],
}

_BASE: Plain = {
    "name": "golden",
    "workers": 4,
    "global_batch": 32,
    "sizes": {"distribution": "lognormal", "mean": 45, "dif": 30, "samples": 700},
    "devices": {"unit_s": 3e-4, "step_s": 0.005},
    "communication": {"latency_s": 1e-4, "bytes": 1e6, "bandwidth": 1e9, "fixed_s": 0.003},
}
_HEAVY_TAILED = {"distribution": "lognormal", "mean": 45, "dif": 110, "samples": 523}
_UNEVEN = {"unit_s": 3e-4, "step_s": 0.005, "factors": [1, 1, 1.5, 3], "noise": 0.05}

SETTINGS: dict[str, Plain] = {
    # All ranks alike; two epochs with a smaller last step in each.
    "even": {"epochs": 2, "seed": 1},
    # Ranks of different speeds that are slow at times, and a few samples much larger than others.
    "uneven": {
        "sizes": _HEAVY_TAILED,
        "devices": {
            **_UNEVEN,
            "sample_s": 1e-4,
            "data_s": [0.0, 0.002, 0.0, 0.001],
            "delay_s": [0.0, 0.004],
            "slowdowns": [
                {"ranks": [0, 1], "factor": 4.0, "first_step": 12, "steps": 2, "every": 9},
                {"ranks": [2], "factor": 2.0, "first_step": 20, "chance": 0.5},
            ],
        },
        "epochs": 2,
        "seed": 2,
    },
    # Each batch costs as much as if all samples were as long as its longest; memory is limited.
    "padded": {
        "sizes": {**_HEAVY_TAILED, "dif": 60},
        "devices": {**_UNEVEN, "cost": {"padded": True, "kappa": 0.002}},
        "limits": [12, 10, 9, 16],
        "profile": True,
        "loss_mean": "size",
        "drop_last": True,
        "steps": 40,
        "epochs": 3,
        "seed": 3,
    },
    # A rank dies; the next attempt has one rank less, and a second one has as many again.
    "failing": {
        "devices": _UNEVEN,
        "epochs": 2,
        "seed": 4,
        "failures": [
            {"rank": 1, "step": 13, "restart_s": 2.0, "world": 3},
            {"rank": 0, "step": 27, "restart_s": 1.0},
        ],
    },
}
# Six ranks of about the same speed and two that take far longer, for presets that let ranks run
# ahead of each other; long enough for choices to change.
GROUPED: Plain = {
    "workers": 8,
    "sizes": {**_BASE["sizes"], "samples": 3000},
    "devices": {
        "unit_s": 3e-4,
        "step_s": 0.01,
        "factors": [{"workers": 6, "factor": 1.0}, {"workers": 2, "factor": 5.0}],
        "delay_s": [0.0, 0.01],
        "slowdowns": [{"ranks": [0, 1, 2, 3], "factor": 6.0, "first_step": 50, "chance": 0.2}],
    },
    "steps": 150,
    "epochs": 2,
    "seed": 6,
}
RELAXED = (
    "ad-psgd",
    "backup-workers",
    "eager-sgd",
    "flexrr",
    "local-sgd",
    "n-soft",
    "osa",
    "rna",
    "rna-hierarchical",
    "ssp",
)
SLOW = {"ep4ddl": ("uneven", "padded")}  # its neural network takes long to fit: few, short cases
_SLOW_STEPS = 16
_OTHER = ("uneven", "padded")  # settings of parameters other than a preset's first ones


def switching(name: str, parameters: Plain) -> Plain:
    """Settings in which a preset comes into force in mid-run, leaves and comes back."""
    other = "chronica" if name != "chronica" else "lbb"
    return {
        "devices": _UNEVEN,
        "sizes": {**_BASE["sizes"], "dif": 45},
        "steps": 56,
        "epochs": 4,
        "seed": 5,
        "policy": "bsp",
        "parameters": {},
        "switches": [
            {"step": 9, "policy": name, "parameters": parameters},
            {"step": 29, "policy": other},
            {"step": 38, "policy": name, "parameters": parameters},
        ],
    }


def _capacities() -> dict[str, Plain]:
    """Presets that take a number for each rank, in settings whose number of ranks stays."""
    capacity = {"capacity": [1.0, 1.0, 0.7, 0.4]}
    return {
        f"{name} capacity, {setting}": {
            **_BASE,
            **SETTINGS[setting],
            "policy": name,
            "parameters": capacity,
        }
        for name in ("static-batching", "dynamic-batching")
        for setting in ("uneven", "padded")
    }


def scenarios() -> dict[str, Plain]:
    """All recorded cases, by names that begin with the preset's."""
    cases = {}
    for name, variants in VARIANTS.items():
        for number, parameters in enumerate(variants):
            of_preset = {"policy": name, "parameters": parameters}
            settings = dict(SETTINGS)
            if name in SLOW:
                settings = {key: {**SETTINGS[key], "steps": _SLOW_STEPS} for key in SLOW[name]}
            elif number:
                settings = {key: SETTINGS[key] for key in _OTHER}
            elif name in RELAXED:
                settings["grouped"] = GROUPED
            for setting, fields in settings.items():
                cases[f"{name} {number}, {setting}"] = {**_BASE, **fields, **of_preset}
            if name not in SLOW and not number:
                cases[f"{name} {number}, switching"] = {**_BASE, **switching(name, parameters)}
    return {**cases, **_capacities()}
