"""Emulated devices: how long a step takes on each rank. Used by ranks and by the simulator."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.cost import SUM, Cost, Features
from paceline.wire import RankDevice

Floats = npt.NDArray[np.float64]

_PER_RANK = ("a_s", "b_s", "c_s", "data_s")


class Slowdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule that multiplies some ranks' compute time by `factor` in some steps.

    The steps are [first_step, first_step + steps), repeated every `every` steps if `every` is above
    0. If `chance` is below 1, each rank is slow in each of these steps with this probability.
    """

    ranks: list[int]
    factor: float
    first_step: int = 0
    # Number of steps; None: all steps to the end of the run.
    steps: int | None = None
    every: int = 0
    chance: float = 1.0

    def covers(self, step: int) -> bool:
        """Return True if the slowdown applies to a step."""
        since = step - self.first_step
        if since < 0:
            return False
        if self.every:
            since %= self.every
        return self.steps is None or since < self.steps

    def hits(self, rank: int | None, world: int, drawn: Any) -> Any:
        """Return True if the slowdown applies to a rank.

        With `rank` None, return an array with True or False for each rank. `drawn` is the rank's
        random number from 0 to 1 or, with `rank` None, an array with a number for each rank.
        """
        if rank is not None:
            return rank in self.ranks and drawn < self.chance
        among = np.zeros(world, bool)
        among[self.ranks] = True
        return among & (drawn < self.chance)


class EmulatedDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The device that a rank reports instead of its own.

    For a field that is None, the rank reports the value of its real device.
    """

    # PyTorch's device type: "cpu", "cuda", …
    kind: str
    name: str
    cores: int | None = None
    memory_bytes: int | None = None

    def of(self, real: RankDevice) -> RankDevice:
        """Return the device that a rank reports if its own device is `real`."""
        return RankDevice(
            self.kind,
            self.name,
            real.cores if self.cores is None else self.cores,
            real.memory_bytes if self.memory_bytes is None else self.memory_bytes,
            emulated=True,
        )


_ANY_DEVICE = RankDevice("cpu", "any", cores=1, memory_bytes=0)


class Rates(NamedTuple):
    """The rates that determine how long a rank computes, as arrays with a value for each rank.

    A batch of n samples with effective load Λ' takes ``load_s · Λ' + sample_s · n + batch_s``
    seconds.
    """

    load_s: Floats  # seconds per unit of effective load
    sample_s: Floats  # seconds per sample
    batch_s: Floats  # seconds per batch


class Emulation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Emulated device speeds: rank j's step takes ``a_s[j]·Λ' + c_s[j]·n + b_s[j]`` seconds.

    Λ' is the effective load of the rank's local batch of n samples; `cost` computes Λ'. CPU threads
    shorten the first two terms by Amdahl's law. Then slowdowns, delays and noise are applied. A
    rank without samples takes no time. The same seed gives the same times.
    """

    # Seconds per size unit, for each rank.
    a_s: list[float]
    # Seconds per step, for each rank.
    b_s: list[float]
    # Seconds per sample, for each rank; empty: 0.
    c_s: list[float] = []
    # Seconds added to the loading of a batch, for each rank; empty: 0.
    data_s: list[float] = []
    cost: Cost = SUM
    slowdowns: list[Slowdown] = []
    # Bounds, in seconds, of a uniformly distributed delay that is added to each rank's step.
    delay_s: tuple[float, float] = (0.0, 0.0)
    # Relative standard deviation of each rank's step time.
    noise: float = 0.0
    # Fraction of the compute time that more threads do not shorten, 0 … 1.
    serial: float = 1.0
    seed: int = 0
    # The device that each rank reports; empty: ranks report their real devices.
    devices: list[EmulatedDevice] = []

    @staticmethod
    def parse(text: str, world: int) -> Emulation:
        """Parse the value of PACELINE_EMULATE for `world` ranks.

        Raises:
            ValueError: the text is no JSON of an `Emulation`, or a value is out of range; the
                message names the field.
        """
        try:
            emulation = msgspec.json.decode(text, type=Emulation)
        except msgspec.DecodeError as error:
            raise ValueError(
                f"PACELINE_EMULATE: {error}; expected a JSON object with a number for each rank in "
                '"a_s" (seconds per size unit) and in "b_s" (seconds per step)'
            ) from error
        if defect := emulation.defect(world):
            raise ValueError(f"PACELINE_EMULATE: {defect}")
        return emulation

    def defect(self, world: int) -> str | None:
        """Return the first defect for `world` ranks, naming the field; None if there is none."""
        for name in _PER_RANK:
            values = getattr(self, name)
            if not values and name in ("c_s", "data_s"):
                continue
            if len(values) != world:
                return f"{name} = {len(values)} numbers: give one for each of {world} ranks"
            for rank, value in enumerate(values):
                if not 0 <= value < math.inf:
                    return f"{name}[{rank}] = {value}: give numbers ≥ 0"
        low, high = self.delay_s
        if not 0 <= low <= high < math.inf:
            return f"delay_s = {[low, high]}: give two numbers, 0 ≤ low ≤ high"
        for name, value, most in (
            ("noise", self.noise, 1.0),
            ("serial", self.serial, 1.0),
            ("cost.kappa", self.cost.kappa, math.inf),
        ):
            if not 0 <= value <= most or value == math.inf:
                return f"{name} = {value}: give a number from 0 to {most:g}"
        if len(self.devices) not in (0, world):
            return f"devices = {len(self.devices)} devices: give one for each of {world} ranks"
        for rank, device in enumerate(self.devices):
            if wrong := device.of(_ANY_DEVICE).defect():
                return f"devices[{rank}].{wrong}"
        if self.seed < 0:
            return f"seed = {self.seed}: give a whole number ≥ 0"
        for k, slow in enumerate(self.slowdowns):
            where = f"slowdowns[{k}]"
            for rank in slow.ranks:
                if not 0 <= rank < world:
                    return f"{where}.ranks contains {rank}: ranks are 0 … {world - 1}"
            if not 0 < slow.factor < math.inf:
                return f"{where}.factor = {slow.factor}: give a number above 0"
            if slow.first_step < 0 or slow.every < 0 or (slow.steps is not None and slow.steps < 1):
                return f"{where}: first_step and every must be 0 or more, steps 1 or more"
            if not 0 <= slow.chance <= 1:
                return f"{where}.chance = {slow.chance}: give a number from 0 to 1"
        return None

    def compute_s(self, step: int, batch: Features, threads: Any = 1) -> Floats:
        """Return the seconds that the forward and backward pass of each rank take in a step.

        `batch` and `threads` (CPU threads) have a value for each rank; `threads` may also be one
        number for all ranks.
        """
        return np.asarray(self._compute_s(None, step, batch, threads))

    def rank_s(self, rank: int, step: int, batch: Features, threads: int = 1) -> float:
        """Return one rank's element of `compute_s`, without computing the other ranks' elements.

        Each rank calls this before each step, so it must be fast. The features in `batch` are
        numbers, not arrays. If `threads` is 0, it counts as 1.
        """
        return float(self._compute_s(rank, step, batch, threads))

    def rates(self, step: int, threads: Any = 1) -> Rates:
        """Return each rank's rates in a step, to compute the times of many batches quickly."""
        nothing, world = np.zeros(len(self.a_s)), len(self.a_s)
        by_threads = self.serial + (1 - self.serial) / np.maximum(threads, 1)
        draw = self._draw(step)
        factor, delay_s = self._factor(None, step, draw), nothing
        if self.delay_s[1]:
            delay_s = draw().uniform(*self.delay_s, world)
        noise = np.maximum(1 + self.noise * draw().standard_normal(world), 0.1) if self.noise else 1
        factor = np.broadcast_to(factor * noise, world)
        sample_s = np.asarray(self.c_s) if self.c_s else nothing
        return Rates(
            np.asarray(self.a_s) * by_threads * factor,
            sample_s * by_threads * factor,
            np.asarray(self.b_s) * factor + delay_s * noise,
        )

    def factors(self, step: int) -> Floats:
        """Return the factor by which slowdowns multiply each rank's compute time in a step."""
        factor = self._factor(None, step, self._draw(step))
        return np.asarray(np.broadcast_to(factor, len(self.a_s)))

    def _compute_s(self, rank: int | None, step: int, batch: Features, threads: Any) -> Any:
        time_s = _of(self.a_s, rank) * self.cost.load(batch)
        if self.c_s:
            time_s = time_s + _of(self.c_s, rank) * batch.samples
        if self.serial < 1:
            time_s = time_s * (self.serial + (1 - self.serial) / np.maximum(threads, 1))
        time_s = time_s + _of(self.b_s, rank)
        draw = self._draw(step)
        time_s = time_s * self._factor(rank, step, draw)
        if self.delay_s[1]:
            time_s = time_s + _of(draw().uniform(*self.delay_s, len(self.a_s)), rank)
        if self.noise:
            normal = _of(draw().standard_normal(len(self.a_s)), rank)
            time_s = time_s * np.maximum(1 + self.noise * normal, 0.1)
        return np.where(batch.samples > 0, time_s, 0.0)

    def _factor(self, rank: int | None, step: int, draw: Callable[[], np.random.Generator]) -> Any:
        factor: Any = 1.0
        world = len(self.a_s)
        for slow in self.slowdowns:
            if slow.covers(step):
                drawn = _of(draw().random(world), rank) if slow.chance < 1 else 0.0
                factor = factor * np.where(slow.hits(rank, world, drawn), slow.factor, 1.0)
        return factor

    def _draw(self, step: int) -> Callable[[], np.random.Generator]:
        """Return a function that returns a step's random generator, made at the first call.

        The generator draws the same numbers on every rank.
        """
        return cache(lambda: np.random.default_rng([self.seed, step]))

    def as_dict(self) -> dict[str, Any]:
        """Return `a_s`, `b_s` and all fields that differ from their defaults.

        The result is the value of `wire.Hello.emulated`.
        """
        made = msgspec.to_builtins(self)
        plain = msgspec.to_builtins(Emulation(a_s=[], b_s=[]))
        return {k: v for k, v in made.items() if k in ("a_s", "b_s") or v != plain[k]}


def _of(values: Any, rank: int | None) -> Any:
    return np.asarray(values) if rank is None else values[rank]
