"""Data sets and virtual training that the simulated benchmarks share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.cost import Features
from paceline.emulation import Emulation
from paceline.wire import Hello
from paceline_backend import policies
from paceline_backend.simulator import Simulation

Floats = npt.NDArray[np.float64]

MEAN = 45.0  # frames: CHRONICA's data sets


def draw_sizes(dif: float, samples: int, distribution: str = "lognormal", seed: int = 0) -> Floats:
    """Sizes, [N] whole numbers above 0, of mean 45 and about this standard deviation.

    Args:
        dif: data imbalance factor.
        samples: N.
        distribution: "lognormal", "gamma", or CHRONICA's "normal" (what is below 1 becomes 1).
        seed: of the draw.
    """
    rng = np.random.default_rng([seed, int(dif)])
    if dif == 0:
        return np.full(samples, MEAN)
    spread = (dif / MEAN) ** 2
    if distribution == "lognormal":
        sigma = np.sqrt(np.log(1 + spread))
        drawn = rng.lognormal(np.log(MEAN) - sigma**2 / 2, sigma, samples)
    elif distribution == "gamma":
        drawn = rng.gamma(1 / spread, MEAN * spread, samples)
    elif distribution == "normal":
        drawn = rng.normal(MEAN, dif, samples)
    else:
        raise ValueError(f"distribution: {distribution!r}; give lognormal, gamma or normal")
    return np.maximum(1.0, np.round(drawn))


def introduction(sizes: Floats, world: int, global_batch: int, epochs: int, seed: int = 0) -> Hello:
    """What a leader would introduce such a run with."""
    return Hello(
        attempt=0,
        world=world,
        global_batch=global_batch,
        seed=seed,
        sizes=sizes.astype("<f8").tobytes(),
        loss_mean="samples",
        drop_last=False,
        epochs=epochs,
        lookahead=2,
        started_at=0.0,
        paceline="",
        torch="",
        device="cpu",
    )


@dataclass(frozen=True)
class Trained:
    """What was trained: S steps, and what planning cost."""

    epoch: npt.NDArray[np.int64]  # [S]
    features: Features  # [S, W]
    compute_s: Floats  # [S, W]
    plan_s: float  # mean per step

    def since(self, epoch: int) -> Trained:
        """The steps from an epoch on."""
        keep = self.epoch >= epoch
        of = Features(*(column[keep] for column in self.features))
        return Trained(self.epoch[keep], of, self.compute_s[keep], self.plan_s)

    @property
    def step_s(self) -> Floats:
        """How long each step took, without communication, [S]."""
        return np.asarray(self.compute_s.max(axis=1))


def train(
    hello: Hello, devices: Emulation, policy: str, parameters: Mapping[str, Any] | None = None
) -> Trained:
    """Trains all epochs on emulated devices, planned as a controller plans real training.

    The policy learns the devices' speeds from the steps as they run; it is told nothing.
    """
    simulation = Simulation(hello, devices, policies.make(policy, parameters or {}))
    ran = []
    begun = time.process_time()
    while not simulation.finished:
        ran.append(simulation.advance())
    spent = time.process_time() - begun
    columns = (np.concatenate(column) for column in zip(*(r.features for r in ran), strict=True))
    epoch = np.repeat([r.segment.epoch for r in ran], [r.segment.steps for r in ran])
    return Trained(
        epoch,
        Features(*columns),
        np.concatenate([r.compute_s for r in ran]),
        spent / len(epoch),
    )
