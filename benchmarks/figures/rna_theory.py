"""RNA's Theorems 5.1 and 5.2, on a problem whose constants are known.

A single layer learns scikit-learn's digits. For softmax regression the gradient's Lipschitz
constant is at most half the largest eigenvalue of XᵀX/n. The variance of a worker's gradient is
measured, and the largest delay η is that of RNA's simulated rounds. `𝔹` is taken as the mean number
of workers that contribute to a round, because the paper's table of notation only calls it the
weights.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from figures.learning import digits
from figures.rna_runs import random_delays
from figures.row import Chart, Line, Measured
from figures.simulated import Ints, run

BATCH, SEED = 16, 0


def largest_step(lipschitz: float, givers: float, delay: int) -> float:
    """Return the largest constant step length that satisfies Theorem 5.1's condition (Eq. 1).

    γ² (L/2 + L² 𝔹 η² γ) − γ / (2𝔹) ≤ 0, a quadratic in γ.
    """
    square, linear, rest = lipschitz**2 * givers * delay**2, lipschitz / 2, 1 / (2 * givers)
    if not square:
        return rest / linear
    return (-linear + math.sqrt(linear**2 + 4 * square * rest)) / (2 * square)


def fewest_rounds(
    lipschitz: float, givers: float, delay: int, gap: float, variance: float
) -> float:
    """Return the number of rounds from which Theorem 5.2 holds (Eq. 3)."""
    return 4 * givers * lipschitz * gap / variance * (delay + 1) ** 2


def constant_step(
    lipschitz: float, givers: float, rounds: int, gap: float, variance: float
) -> float:
    """Return Theorem 5.2's step length (Eq. 4)."""
    return math.sqrt(gap / (givers * lipschitz * rounds * variance))


def bound(lipschitz: float, givers: float, rounds: int, gap: float, variance: float) -> float:
    """Return the upper bound of the mean squared norm of the gradient (Eq. 9)."""
    return 4 * math.sqrt(gap * lipschitz * variance / (givers * rounds))


class _Problem:
    """Mean loss over all digits, as a function of a single layer's weights."""

    def __init__(self) -> None:
        images, self._classes = digits()
        self._images = torch.cat([images, torch.ones(len(images), 1)], 1).double()

    @property
    def lipschitz(self) -> float:
        """Upper bound of the gradient's Lipschitz constant: ½ λ_max(XᵀX / n)."""
        gram = self._images.T @ self._images / len(self._images)
        return float(torch.linalg.eigvalsh(gram)[-1]) / 2

    def loss(self, weights: torch.Tensor) -> float:
        """Return the mean loss."""
        return float(cross_entropy(self._images @ weights, self._classes))

    def gradient(self, weights: torch.Tensor, which: torch.Tensor | None = None) -> torch.Tensor:
        """Return the gradient on some digits, or on all."""
        images = self._images if which is None else self._images[which]
        classes = self._classes if which is None else self._classes[which]
        probabilities = torch.softmax(images @ weights, 1)
        probabilities[torch.arange(len(classes)), classes] -= 1
        return images.T @ probabilities / len(classes)

    def draw(self, generator: torch.Generator) -> torch.Tensor:
        """Draw a worker's batch."""
        return torch.randint(len(self._classes), (BATCH,), generator=generator)

    def variance(self, weights: torch.Tensor, generator: torch.Generator) -> float:
        """Return the mean squared distance of a batch's gradient from the full gradient."""
        whole = self.gradient(weights)
        drawn = (self.gradient(weights, self.draw(generator)) - whole for _ in range(200))
        return float(np.mean([float((each**2).sum()) for each in drawn]))


def theorems() -> Measured:
    """Compute step lengths, rounds and the bound, and train RNA's rounds with the step of Eq. 4."""
    torch.set_num_threads(1)
    problem, generator = _Problem(), torch.Generator().manual_seed(SEED)
    ran = run(random_delays(800), "rna")
    ages = [np.repeat(np.arange(len(r.staleness)), r.staleness) for r in ran.rounds]
    givers = float(np.mean([len(each) for each in ages]))
    delay = int(max(each.max() for each in ages if len(each)))
    start = torch.zeros(65, 10, dtype=torch.float64)
    # f(x*) ≥ 0, so the loss is at least f(x₁) − f(x*).
    gap = problem.loss(start)
    variance = problem.variance(start, generator)
    lipschitz, rounds = problem.lipschitz, len(ages)
    step = constant_step(lipschitz, givers, rounds, gap, variance)
    norms = _train(problem, ages, givers, step, generator)
    most = bound(lipschitz, givers, rounds, gap, variance)
    values = {
        "L, at most": lipschitz,
        "σ² of a worker's batch of 16": variance,
        "𝔹, workers that give to a round": givers,
        "η, rounds": float(delay),
        "largest γ by Eq. 1": largest_step(lipschitz, givers, delay),
        "rounds needed by Eq. 3": fewest_rounds(lipschitz, givers, delay, gap, variance),
        "rounds trained": float(rounds),
        "γ by Eq. 4": step,
        "bound of the mean ‖∇f‖² (Eq. 9)": most,
        "mean ‖∇f‖² of RNA's rounds": float(np.mean(norms)),
    }
    at = list(range(0, rounds, 20))
    running = (np.cumsum(norms) / np.arange(1, rounds + 1))[at].round(5).tolist()
    lines = [Line("mean ‖∇f‖² so far", at, running), Line("bound (Eq. 9)", [0, rounds], [most] * 2)]
    return Measured(values, Chart("round", "mean ‖∇f‖²", lines, log_y=True))


def _train(
    problem: _Problem, ages: list[Ints], givers: float, step: float, generator: torch.Generator
) -> list[float]:
    """Return squared norms of the full gradient before each round.

    A contributor's gradient is computed with the weights from as many rounds ago as its age. γ is
    the step of a round with the mean number of contributors. Linear scaling (Sec. 3.3) makes the
    step proportional to their number.
    """
    weights = [torch.zeros(65, 10, dtype=torch.float64)]
    norms = []
    for of_round in ages:
        norms.append(float((problem.gradient(weights[-1]) ** 2).sum()))
        given = [
            problem.gradient(weights[max(0, len(weights) - 1 - int(age))], problem.draw(generator))
            for age in of_round
        ]
        change = (
            torch.stack(given).sum(0) * step / givers if given else torch.zeros_like(weights[0])
        )
        weights.append(weights[-1] - change)
    return norms
