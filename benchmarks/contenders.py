"""The contenders of `synchronisers.py`, and the scenarios that they train in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trainings import RATE, WARM

from paceline.core.emulation import Emulation

WORLD, EVEN_WORLD, LONG_WORLD = 8, 4, 4
AUTO_WARM = 1_200  # steps: a forecast takes a few hundred of them on two busy cores


@dataclass(frozen=True)
class Contender:
    """How to train.

    Args:
        preset: a preset of Paceline; None: PyTorch's own means.
        parameters: the preset's parameters.
        how: see `trainings.Work`.
        rate: learning rate.
        auto: `auto` switches from the preset to others, relaxed ones too.
        warm: steps before the first step that counts; None: as many as the scenario has.
    """

    preset: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    how: str = "paceline"
    rate: float = RATE
    auto: bool = False
    warm: int | None = None


CONTENDERS = {
    "bsp": Contender("bsp"),
    "rna": Contender("rna"),
    # RNA's own rule (a spread of 1) would put ranks that are 50 ms apart into one group.
    "rna-hierarchical": Contender("rna-hierarchical", {"spread": 0.7}),
    "eager-sgd": Contender("eager-sgd"),
    "eager-sgd, solo": Contender("eager-sgd", {"mode": "solo"}),
    "n-soft": Contender("n-soft"),
    "ssp": Contender("ssp"),
    "backup-workers": Contender("backup-workers"),
    "local-sgd": Contender("local-sgd"),
    "diloco": Contender("diloco"),
    "osa": Contender("osa"),
    "ad-psgd": Contender("ad-psgd"),
    "flexrr": Contender("flexrr"),
    "torch DDP": Contender(how="ddp"),
    "torch Join": Contender(how="join"),
    "torch PostLocalSGD": Contender(how="post-local"),
}
# Stale gradients need lower learning rates. These contenders show what a higher rate costs.
FASTER = {
    f"{name}, 4 times the rate": Contender(name, rate=4 * RATE)
    for name in ("bsp", "rna", "eager-sgd")
}
# These contenders need a control plane: their policies learn how fast ranks are.
SCHEDULERS = ("paceline", "lbb")
COMPOSED = ("rna", "local-sgd")
OWN = "paceline-relaxed"
PLANNED = {
    "bsp": Contender("bsp"),
    **{name: Contender(name) for name in SCHEDULERS + COMPOSED},
    **{f"{y} on {s}": Contender(y, {"batches": s}) for s in SCHEDULERS for y in COMPOSED},
    "ad-psgd": Contender("ad-psgd"),
    OWN: Contender(OWN),
}
AUTO = "auto, relaxed presets allowed"
# Beside it all presets that `auto` may choose and that had the target first in some setting.
CHOSEN = {
    **{name: PLANNED[name] for name in ("bsp", "paceline", "local-sgd", "ad-psgd", OWN)},
    AUTO: Contender("bsp", auto=True, warm=AUTO_WARM),
}


def _chosen_from_start(rate: float) -> dict[str, Contender]:
    """`CHOSEN` with another learning rate, where the steps before `auto` decides count, too."""
    return {name: replace(each, rate=rate, warm=None) for name, each in CHOSEN.items()}


@dataclass(frozen=True)
class Scenario:
    """What is learnt on which devices, and by whom.

    Args:
        name: the scenario's name in tables.
        task: what is learnt.
        steps: how many steps count.
        devices: seed → what ranks compute on.
        contenders: name → contender.
        warm: steps before the first step that counts.
        planned: whether a control plane plans the trainings.
        foretold: whether the simulator's step times are compared with the measured ones.
    """

    name: str
    task: str
    steps: int
    devices: Callable[[int], Emulation]
    contenders: Mapping[str, Contender] = field(default_factory=lambda: CONTENDERS)
    warm: int = WARM
    planned: bool = False
    foretold: bool = True

    @property
    def world(self) -> int:
        """Ranks."""
        return len(self.devices(0).b_s)


def _steps(
    *b_s: float, most_s: float = 0.0, sample_s: Sequence[float] = ()
) -> Callable[[int], Emulation]:
    """Devices on which rank j's step takes `b_s[j]`, and 0 to `most_s` longer at random."""
    nothing = [0.0] * len(b_s)
    return lambda seed: Emulation(
        nothing, list(b_s), list(sample_s), delay_s=(0.0, most_s), seed=seed
    )


def _one_slow(times: int, steps: int, long: bool = False, step_s: float = 0.02) -> Scenario:
    """One slow rank, as in SATA. Other ranks' steps take 20 ms, the least that two cores manage.

    Eight ranks' real work on two cores is a part of that time, and is not simulated. With longer
    steps the part is smaller.
    """
    devices = _steps(*[step_s] * (WORLD - 1), step_s * times)
    name = f"one {times}x slower{', long' if long else ''}"
    if step_s > 0.02:
        name += f", steps of {1e3 * step_s:.0f} ms"
    contenders = {each: CONTENDERS[each] for each in _BOUND} if long else CONTENDERS
    return Scenario(name, "digits", steps, devices, contenders, foretold=times < 10 and not long)


def _groups(apart_ms: int, contenders: Mapping[str, Contender], times: int = 1) -> Scenario:
    """Half of the ranks are `apart_ms` slower; RNA's section 8.2 has 50 ms.

    With `times` above 1 all takes so many times as long, see `_one_slow`.
    """
    fast_s, apart_s = 0.005 * times, apart_ms * times / 1e3
    devices = _steps(*[fast_s] * 4, *[fast_s + apart_s] * 4, most_s=0.05 * times)
    name = f"two groups, {apart_ms} ms apart{f', {times} times as long' if times > 1 else ''}"
    return Scenario(name, "digits", 64, devices, contenders, foretold=apart_ms == 50)


def _planned(
    name: str, devices: Callable[[int], Emulation], task: str = "digits", steps: int = 192
) -> Scenario:
    """A setting in which a control plane plans, as it does where people train.

    Counting begins with a segment, so up to a segment's steps are not counted in addition.
    """
    return Scenario(
        f"{name}, planned", task, steps, devices, PLANNED, warm=96, planned=True, foretold=False
    )


def _from_start(
    name: str,
    devices: Callable[[int], Emulation],
    task: str = "long digits",
    steps: int = 2_500,
    rate: float = 0.02,
) -> Scenario:
    """A task of 2,000 steps, of which those count, too, that `auto` trains under `bsp` at first."""
    return Scenario(
        f"{name}, from the start",
        task,
        steps,
        devices,
        _chosen_from_start(rate),
        warm=0,
        planned=True,
        foretold=False,
    )


SPEECH = "uneven lengths, speeds 1, 1, 1.5 and 3"
DELAYS, GROUPS = "0-50 ms at random", [f"two groups, {ms} ms apart" for ms in (50, 100, 200)]
MIXED = "one 5x slower, and 0-50 ms at random"
EVEN, EVEN_LARGE = "no stragglers", "no stragglers, 1.1 M parameters"
# Of these, bounds are asked where one rank is slow for good.
_BOUND = ("bsp", "rna", "ad-psgd", "n-soft", "local-sgd", "flexrr", "torch Join")
_FEW = {name: CONTENDERS[name] for name in ("bsp", "rna", "torch DDP")}
_NO_ALLREDUCE = ("rna", "rna-hierarchical", "eager-sgd", "eager-sgd, solo", "n-soft", "ad-psgd")
_FURTHER = {name: CONTENDERS[name] for name in ("bsp", *_NO_ALLREDUCE)}
_SLOW_AND_DELAYED = _steps(*[0.005] * 8, most_s=0.05, sample_s=[*[0.002] * 7, 0.01])

SCENARIOS = {
    # As in RNA, section 8.1.
    "delays": Scenario(
        DELAYS, "digits", 192, _steps(*[0.005] * WORLD, most_s=0.05), {**CONTENDERS, **FASTER}
    ),
    "even": Scenario(EVEN, "digits", 256, _steps(*[0.02] * EVEN_WORLD), _FEW, foretold=False),
    "even-large": Scenario(
        EVEN_LARGE, "wide digits", 64, _steps(*[0.1] * EVEN_WORLD), _FEW, foretold=False
    ),
    "groups": _groups(50, CONTENDERS),
    "groups-slowly": _groups(50, CONTENDERS, 3),
    "groups-100": _groups(100, _FURTHER),
    "groups-200": _groups(200, _FURTHER),
    "mixed": Scenario(
        MIXED,
        "digits",
        96,
        _SLOW_AND_DELAYED,
        PLANNED,
        warm=96,
        planned=True,
        foretold=False,
    ),
    # A mean recording of PLAID has 324 points, and a batch has four recordings.
    "lengths": Scenario(
        "uneven lengths",
        "plaid",
        96,
        lambda seed: Emulation([5e-5] * WORLD, [0.005] * WORLD, seed=seed),
    ),
    "2x": _one_slow(2, 64),
    "5x": _one_slow(5, 48),
    "5x-slowly": _one_slow(5, 48, step_s=0.06),
    "10x": _one_slow(10, 48),
    "planned-delays": _planned(DELAYS, _steps(*[0.005] * WORLD, most_s=0.05)),
    "planned-5x": _planned(
        "one 5x slower", _steps(*[0.005] * WORLD, sample_s=[*[0.002] * 7, 0.01])
    ),
    "planned-groups": _planned(
        "two groups, 4x apart, and 0-50 ms at random",
        _steps(*[0.005] * WORLD, most_s=0.05, sample_s=[*[0.002] * 4, *[0.008] * 4]),
    ),
    "planned-lengths": _planned(
        "uneven lengths",
        lambda seed: Emulation([5e-5] * WORLD, [0.005] * WORLD, seed=seed),
        "plaid",
    ),
    "planned-even": _planned("no stragglers", _steps(*[0.005] * WORLD, sample_s=[0.002] * WORLD)),
    "5x-long": _one_slow(5, 512, long=True),
    "10x-long": _one_slow(10, 512, long=True),
    "planned-speech": _planned(
        SPEECH, lambda seed: Emulation([5e-5, 5e-5, 7.5e-5, 15e-5], [0.005] * 4, seed=seed), "plaid"
    ),
}
SCENARIOS |= {
    name.replace("planned", "auto"): replace(
        scenario, name=scenario.name.replace("planned", "chosen"), contenders=CHOSEN
    )
    for name, scenario in SCENARIOS.items()
    if name in ("planned-delays", "planned-5x", "planned-groups", "planned-lengths")
}
# A step takes about 0.1 s, so a forecast takes no more than some tens of steps. Hours in all.
FROM_START = {
    "start-delays": _from_start("0-80 ms at random", _steps(*[0.02] * LONG_WORLD, most_s=0.08)),
    "start-5x": _from_start(
        "one 5x slower", _steps(*[0.012] * LONG_WORLD, sample_s=[*[0.003] * 3, 0.015])
    ),
    "start-groups": _from_start(
        "two groups, 4x apart, and 0-80 ms at random",
        _steps(*[0.02] * LONG_WORLD, most_s=0.08, sample_s=[0.002, 0.002, 0.008, 0.008]),
    ),
    "start-lengths": _from_start(
        "uneven lengths",
        lambda seed: Emulation([5e-5] * LONG_WORLD, [0.005] * LONG_WORLD, seed=seed),
        "long plaid",
        steps=3_000,
        rate=0.015,
    ),
}
_QUICK = ("bsp", "rna", "eager-sgd", "local-sgd", "torch DDP")
QUICK = {
    "delays": Scenario(
        DELAYS,
        "digits",
        48,
        SCENARIOS["delays"].devices,
        {name: CONTENDERS[name] for name in _QUICK},
        foretold=False,
    ),
    "even": replace(SCENARIOS["even"], steps=64),
}
