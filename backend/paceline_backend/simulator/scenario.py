"""Description of a simulation: a `Scenario` is read from YAML or plain values, and checked.

``paceline simulate`` loads a file; the control plane receives the plain values when a run is
created. All functions that read or check a scenario raise `ScenarioError` if the scenario cannot be
simulated. After these checks, only `Scenario.hello`, which draws or reads the sizes, can still
fail.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import yaml

from paceline import policies
from paceline.core.cost import SUM, Cost, Features
from paceline.core.emulation import Emulation, Slowdown
from paceline.core.errors import InputError
from paceline.core.terms import MEANS
from paceline.core.trials import TIMINGS, most_samples, trial_sizes
from paceline.planning.policy_in_force import PolicyInForce
from paceline.policies.base import Floats
from paceline.wire import Hello
from paceline_backend.simulator.sizes import Sizes, SizesError
from paceline_backend.simulator.sync import Costs

MOST_WORKERS = 100_000

T = TypeVar("T")


class ScenarioError(InputError):
    """A scenario that cannot be simulated; the message names the field and the fix."""


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An item of `Devices.factors`: a number of consecutive workers with the same factor."""

    workers: int
    factor: float


class Devices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speeds of workers.

    Worker j computes a batch in f_j · (unit_s · Λ' + sample_s · n) + step_s seconds, where n is the
    number of samples of the batch and Λ' its effective load (see `Models`). A single number applies
    to every worker; a list has one number per worker. `factors` are the f_j; if the list is empty,
    all are 1. `data_s` is the time to load a batch. For the other fields see `Emulation`.
    """

    unit_s: float | list[float]  # s per size unit
    step_s: float | list[float] = 0.0  # s per step
    sample_s: float | list[float] = 0.0  # s per sample
    factors: list[float | Group] = []
    data_s: float | list[float] = 0.0  # s per batch
    cost: Cost = SUM
    slowdowns: list[Slowdown] = []
    delay_s: tuple[float, float] = (0.0, 0.0)
    noise: float = 0.0
    serial: float = 1.0


class Communication(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model of the time of an all-reduce: a fixed time, plus the time of a ring.

    W workers take fixed_s + 2(W−1) · latency_s + 2(W−1)/W · bytes / bandwidth seconds. A ring sends
    2(W−1) messages one after the other, and no all-reduce can send fewer bytes (Patarasuk and Yuan,
    "Bandwidth optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib.
    Comput. 69, 2009).
    """

    # Latency of one message, in seconds.
    latency_s: float = 0.0
    # Size of the gradients, in bytes.
    bytes: float = 0.0
    # Bandwidth of the slowest link.
    bandwidth: float | None = None  # bytes per second
    # Additional time in seconds of each all-reduce, independent of the number of workers.
    fixed_s: float = 0.0
    # Time in seconds of an exchange of relaxed synchronisation; None: the time of an all-reduce.
    round_s: float | None = None

    def defect(self) -> str | None:
        """Return a message about the first field with an illegal value; None if all are legal."""
        for name in ("latency_s", "bytes", "fixed_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                return f"communication.{name}: {value}; give a number ≥ 0"
        if self.round_s is not None and not 0 <= self.round_s < math.inf:
            return f"communication.round_s: {self.round_s}; give a number ≥ 0"
        if self.bandwidth is None and self.bytes:
            return "communication.bandwidth: give bytes per second, or omit communication.bytes"
        if self.bandwidth is not None and not 0 < self.bandwidth < math.inf:
            return f"communication.bandwidth: {self.bandwidth}; give bytes per second above 0"
        return None

    def seconds(self, world: int) -> float:
        """Return the time of one all-reduce among `world` workers."""
        rounds = 2 * (world - 1)
        moved = rounds / world * self.bytes
        return self.fixed_s + rounds * self.latency_s + moved / (self.bandwidth or math.inf)

    def all_reduce_s(self, step: int, batches: Features) -> Floats:
        """Return the time of a step's all-reduce on each worker, [W]; see `Network`."""
        world = len(batches.samples)
        return np.full(world, self.seconds(world))

    def costs(self, world: int) -> Costs:
        """Return the costs of exchanges of relaxed synchronisation among `world` workers.

        Two messages start an exchange: a message to the ranks' store, and its answer.
        """
        call_s, size = 2 * self.latency_s, round(self.bytes)
        if self.round_s is not None:
            return Costs(self.round_s, call_s, size)
        there_s = self.latency_s + self.bytes / (self.bandwidth or math.inf)
        pair_s = self.fixed_s + 2 * there_s
        return Costs(self.seconds(world), call_s, size, pair_s=pair_s, group_s=self.seconds)


class WorkerFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Failure of a worker in a step; the workers restart at this step, as if from a checkpoint."""

    rank: int
    step: int
    # Time in seconds from the failure to the next attempt's first step.
    restart_s: float = 5.0
    # Number of workers that continue. The failed worker is left out first, then the highest ranks.
    # None: all workers continue.
    world: int | None = None

    def alive(self, world: int) -> list[int]:
        """Return the ranks of the workers that continue, of `world` workers."""
        if self.world is None or self.world == world:
            return list(range(world))
        return [rank for rank in range(world) if rank != self.rank][: self.world]


class Change(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A switch of the policy in the first segment that begins at the step `step` or later."""

    step: int
    policy: str
    parameters: dict[str, Any] = {}


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A virtual cluster, its data and its events. Equal scenarios give equal simulated runs."""

    name: str
    workers: int
    global_batch: int
    sizes: Sizes
    devices: Devices
    # Number of steps to train; None: all steps of the epochs.
    steps: int | None = None
    epochs: int | None = None
    seed: int = 0
    drop_last: bool = False
    loss_mean: str = "samples"
    policy: str = "bsp"
    parameters: dict[str, Any] = {}
    switches: list[Change] = []
    failures: list[WorkerFailure] = []
    communication: Communication = Communication()
    # Number of samples that fit into a worker's memory, or one number per worker; None: no limit.
    limits: int | list[int] | None = None
    # True if workers measure the times of trial batches of 2, 4, 8, … samples before training; the
    # largest has twice an equal share of a step. None: like real ranks, they measure only in a run
    # that begins with `lbb`.
    profile: bool | None = None

    @staticmethod
    def load(path: Path) -> Scenario:
        """Read a scenario file; a relative path in `sizes.file` starts at the file's folder."""
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ScenarioError(f"{path}: {error}") from error
        try:
            return Scenario.parse(text).at(path.parent)
        except ScenarioError as error:
            raise ScenarioError(f"{path}: {error}") from error

    @staticmethod
    def parse(text: str) -> Scenario:
        """Read a scenario from YAML."""
        try:
            plain = yaml.load(text, _Loader)
        except yaml.YAMLError as error:
            raise ScenarioError(f"invalid YAML: {error}") from error
        if not isinstance(plain, dict):
            raise ScenarioError("give a mapping with the fields of a scenario: name, workers, …")
        return Scenario.of(plain)

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Scenario:
        """Read a scenario from plain values, for example from JSON."""
        try:
            scenario = msgspec.convert(plain, Scenario)
        except msgspec.ValidationError as error:
            what, _, where = str(error).partition(" - at `$.")
            field = where.removesuffix("`")
            raise ScenarioError(f"{field}: {what}" if field else what) from error
        scenario.check()
        return scenario

    def at(self, folder: Path) -> Scenario:
        """Return the scenario with a relative path in `sizes.file` taken relative to `folder`."""
        if self.sizes.file is None:
            return self
        sizes = msgspec.structs.replace(self.sizes, file=str(folder / self.sizes.file))
        return msgspec.structs.replace(self, sizes=sizes)

    def as_dict(self) -> dict[str, Any]:
        """Return the scenario as plain values, from which `of` makes an equal scenario."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def check(self) -> None:
        """Raise `ScenarioError` if the scenario cannot be simulated."""
        if not 1 <= self.workers <= MOST_WORKERS:
            raise ScenarioError(f"workers: {self.workers}; give a number from 1 to {MOST_WORKERS}")
        if self.global_batch < 1:
            raise ScenarioError(f"global_batch: {self.global_batch}; give 1 sample or more")
        if self.steps is None and self.epochs is None:
            raise ScenarioError("steps: give the number of steps to train, or epochs")
        for name in ("steps", "epochs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ScenarioError(f"{name}: {value}; give 1 or more, or leave it out")
        if self.seed < 0:
            raise ScenarioError(f"seed: {self.seed}; give 0 or more")
        if self.loss_mean not in MEANS:
            raise ScenarioError(f'loss_mean: {self.loss_mean!r}; give "samples", "size" or "ranks"')
        if defect := self.sizes.defect() or self.communication.defect():
            raise ScenarioError(defect)
        self._check_policies()
        self._check_numbers()
        if defect := self.emulation().defect(self.workers):
            raise ScenarioError(f"devices.{defect}")
        room = self.memory_limits()
        if room and min(room) < 0:
            raise ScenarioError(f"limits: {min(room)}; give each worker 0 samples or more")
        self._check_room("limits", room)
        self._check_failures()

    def _check_numbers(self) -> None:
        devices = self.devices
        for name in ("unit_s", "step_s", "sample_s", "data_s", "factors"):
            value = getattr(devices, name)
            for k, number in enumerate(value if isinstance(value, list) else [value]):
                where = f"devices.{name}[{k}]" if isinstance(value, list) else f"devices.{name}"
                if isinstance(number, Group):
                    if number.workers < 1:
                        raise ScenarioError(f"{where}.workers: {number.workers}; give 1 or more")
                    where, number = f"{where}.factor", number.factor
                if not 0 <= number < math.inf:
                    raise ScenarioError(f"{where}: {number}; give a number ≥ 0")

    def _check_room(self, where: str, room: list[int]) -> None:
        if room and sum(room) < self.global_batch:
            raise ScenarioError(
                f"{where}: limits allow {sum(room)} samples in total; "
                f"they must allow at least global_batch, {self.global_batch}"
            )

    def _check_step(self, where: str, step: int) -> None:
        end = math.inf if self.steps is None else self.steps
        if self.epochs is not None and self.sizes.file is None:
            whole, rest = divmod(self.sizes.samples, self.global_batch)
            end = min(end, self.epochs * (whole + (rest > 0 and not self.drop_last)))
        if step >= end:
            raise ScenarioError(f"{where}.step: {step}; the run ends before it, after {end} steps")

    def _check_policies(self) -> None:
        steps = [change.step for change in self.switches]
        if steps != sorted(steps) or any(step < 0 for step in steps):
            raise ScenarioError("switches: give them in the order of their steps, each step ≥ 0")
        for k, step in enumerate(steps):
            self._check_step(f"switches[{k}]", step)
        for where, name, parameters in (
            ("", self.policy, self.parameters),
            *((f"switches[{k}].", c.policy, c.parameters) for k, c in enumerate(self.switches)),
        ):
            try:
                policies.make(name, parameters, self.workers)
            except ValueError as error:
                raise ScenarioError(f"{where}{error}") from error

    def _check_failures(self) -> None:
        world, step, room = self.workers, 0, self.memory_limits()
        for k, failure in enumerate(self.failures):
            where = f"failures[{k}]"
            if not 0 <= failure.rank < world:
                raise ScenarioError(
                    f"{where}.rank: {failure.rank}; ranks are 0 … {world - 1} at that step"
                )
            if failure.step < step:
                raise ScenarioError(
                    f"{where}.step: {failure.step}; give failures in the order of their steps, "
                    "each step ≥ 0"
                )
            self._check_step(where, failure.step)
            if not 0 <= failure.restart_s < math.inf:
                raise ScenarioError(f"{where}.restart_s: {failure.restart_s}; give seconds, ≥ 0")
            after = world if failure.world is None else failure.world
            if not 1 <= after <= world:
                raise ScenarioError(f"{where}.world: {after}; give 1 … {world} workers")
            room = [room[rank] for rank in failure.alive(world)] if room else []
            self._check_room(f"{where}.world", room)
            world, step = after, failure.step

    def emulation(self) -> Emulation:
        """Return the devices of all workers."""
        devices = self.devices
        factors = self._factors()
        a_s = self._each("devices.unit_s", devices.unit_s)
        c_s = self._each("devices.sample_s", devices.sample_s)
        data_s = self._each("devices.data_s", devices.data_s)
        return Emulation(
            a_s=[factor * value for factor, value in zip(factors, a_s, strict=True)],
            b_s=self._each("devices.step_s", devices.step_s),
            c_s=[factor * value for factor, value in zip(factors, c_s, strict=True)]
            if any(c_s)
            else [],
            data_s=data_s if any(data_s) else [],
            cost=devices.cost,
            slowdowns=devices.slowdowns,
            delay_s=devices.delay_s,
            noise=devices.noise,
            serial=devices.serial,
            seed=self.seed,
        )

    def memory_limits(self) -> list[int]:
        """Return each worker's memory limit as a number of samples, [W]; empty: no limits."""
        return [] if self.limits is None else self._each("limits", self.limits)

    def hello(self) -> Hello:
        """Return the Hello message that a leader would send, with virtual time 0.

        Raises:
            ScenarioError: the file of sizes cannot be read, or with `drop_last` no step would run.
        """
        try:
            sizes = self.sizes.draw(self.seed)
        except SizesError as error:
            raise ScenarioError(str(error)) from error
        if self.drop_last and len(sizes) < self.global_batch:
            raise ScenarioError(
                f"drop_last: {len(sizes)} samples are fewer than a global batch, so no step would "
                "run; give more samples, or drop_last: false"
            )
        devices, profiles = self.emulation(), self.profile
        if profiles is None:
            profiles = PolicyInForce(self.policy, self.parameters).profiles
        return hello_of(
            sizes,
            self.workers,
            self.global_batch,
            seed=self.seed,
            epochs=self.epochs,
            loss_mean=self.loss_mean,
            drop_last=self.drop_last,
            profiles=self._profiles(devices, float(sizes.mean())) if profiles else [],
            limits=self.memory_limits(),
            uneven_steps=True,
            gradient_bytes=round(self.communication.bytes) or None,
        )

    def _profiles(self, devices: Emulation, size: float) -> list[list[tuple[int, float]]]:
        """Return the profile that each worker would report, [W].

        A profile is a list of pairs (samples, seconds), one for each trial batch; see
        `core.trials`. The scenario's slowdowns do not affect the trials, whose noise differs from
        that of the run's steps. If no sample fits into some worker's memory, there are no profiles.
        """
        world, room = self.workers, self.memory_limits() or [self.global_batch] * self.workers
        if min(room) < 1:
            return []
        most = [most_samples(self.global_batch, world, limit) for limit in room]
        trial = msgspec.structs.replace(devices, slowdowns=[], seed=devices.seed + 1)
        passes, timed = count(), dict[int, Floats]()
        for samples in sorted({n for each in most for n in trial_sizes(each)}):
            n = np.full(world, samples)
            batch = Features(n, n * size, n * size**2, np.full(world, size))
            times = [trial.compute_s(next(passes), batch) for _ in range(TIMINGS)]
            timed[samples] = np.median(times, axis=0)
        return [
            [(samples, float(timed[samples][rank])) for samples in trial_sizes(each)]
            for rank, each in enumerate(most)
        ]

    def _factors(self) -> list[float]:
        given = sum(part.workers if isinstance(part, Group) else 1 for part in self.devices.factors)
        # Check the number of factors before the list is made, because it could be far too long.
        if given not in (0, self.workers):
            raise ScenarioError(
                f"devices.factors: {given} values for {self.workers} workers; give one per worker"
            )
        factors: list[float] = []
        for part in self.devices.factors:
            factors += [part.factor] * part.workers if isinstance(part, Group) else [part]
        return factors or [1.0] * self.workers

    def _each(self, name: str, value: T | list[T]) -> list[T]:
        if not isinstance(value, list):
            return [value] * self.workers
        if len(value) != self.workers:
            raise ScenarioError(
                f"{name}: {len(value)} values for {self.workers} workers; give one per worker"
            )
        return value


class _Loader(yaml.SafeLoader):
    """A YAML loader that reads 1e-5 as a number; standard YAML 1.1 reads it as text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def hello_of(sizes: Floats, world: int, global_batch: int, **fields: Any) -> Hello:
    """Return the Hello that a leader would send at virtual time 0.

    `sizes` are the sizes of the data set's samples, [N]. `fields` are other fields of `Hello`. By
    default, the seed is 0, the number of epochs is unknown, and the loss is a mean over samples.
    """
    plain: dict[str, Any] = {"seed": 0, "epochs": None, "loss_mean": "samples", "drop_last": False}
    return Hello(
        attempt=0,
        world=world,
        global_batch=global_batch,
        sizes=sizes.astype("<f8").tobytes(),
        lookahead=0,
        started_at=0.0,
        paceline="simulated",
        torch="none",
        device="simulated",
        **{**plain, **fields},
    )
