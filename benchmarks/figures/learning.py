"""Real gradients of virtual workers: each trains the samples that a simulated run planned for it.

The data are scikit-learn's handwritten digits. If sizes differ, a sample of size λ is a video: λ
frames of a digit, each with its own noise. A worker's gradient is the mean over its frames (or
samples). The gradients of a step are combined with the product's own weights, and a single
optimiser applies the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from tasks import task_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from figures.simulated import Floats, Ints, Run
from paceline.policies.presets.chronica import compensate

# Standard deviation of a frame's noise. That of a pixel is 1.
NOISE = 0.7
# Number of steps between two evaluations of the held-out loss.
EVERY = 4
# Learning rate of Adam.
RATE = 3e-3

# Gradients [W, P], loads [W], samples [W] → gradient [P].
Weigh = Callable[[Floats, Floats, Floats], Floats]


def by_load(gradients: Floats, load: Floats, _: Floats) -> Floats:
    """Weigh gradients with CHRONICA's compensator, Eq. 7."""
    return compensate(gradients, load)


def by_samples(gradients: Floats, _: Floats, samples: Floats) -> Floats:
    """Weigh gradients by the number of samples, as every preset does by default."""
    return compensate(gradients, samples)


def plain(gradients: Floats, *_: Floats) -> Floats:
    """Return the mean over workers (CHRONICA, Eq. 3)."""
    return np.asarray(gradients.mean(axis=0))


def _convolution() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "one layer": lambda: nn.Linear(64, 10),
    "two layers": lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    "wide": lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)),
    "convolution": _convolution,
}


@dataclass(frozen=True)
class Learnt:
    """Result of a training.

    Args:
        steps: steps after which the model was evaluated, [N].
        loss: held-out loss at that time, [N].
        accuracy: held-out accuracy at that time, [N].
        gradient: squared norm of the steps' gradients, [S].
    """

    steps: Ints
    loss: Floats
    accuracy: Floats
    gradient: Floats

    def reached(self, target: float) -> float:
        """Return the first step with a loss of at most `target`, interpolated between evaluations.

        NaN if the loss never was that low.
        """
        for at, loss in enumerate(self.loss):
            if loss <= target:
                if at == 0:
                    return float(self.steps[0])
                over = (self.loss[at - 1] - target) / (self.loss[at - 1] - loss)
                return float(self.steps[at - 1] + over * (self.steps[at] - self.steps[at - 1]))
        return float("nan")


@cache
def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    task = task_of("digits")
    images = torch.stack([image for image, _ in task.samples])
    classes = torch.tensor([label for _, label in task.samples])
    held_out, their = task.held_out
    return images, classes, held_out, their


def digits() -> tuple[Tensor, Tensor]:
    """Return the digits to learn [N, 64], and their classes [N]."""
    images, classes, *_ = _digits()
    return images, classes


def frames(samples: Ints, sizes: Floats, noise: float, step: int) -> tuple[Tensor, Tensor]:
    """Return the frames of some samples, and their classes."""
    images, classes, *_ = _digits()
    counts = np.maximum(1, np.round(sizes[samples])).astype(int)
    which = torch.from_numpy(np.repeat(samples % len(images), counts))
    generator = torch.Generator().manual_seed(int(samples[0]) + 100_003 * step)
    moved = noise * torch.randn(len(which), images.shape[1], generator=generator)
    return images[which] + moved, classes[which]


def learn(
    ran: Run,
    weigh: Weigh,
    network: str = "two layers",
    seed: int = 0,
    noise: float = NOISE,
    steps: int | None = None,
) -> Learnt:
    """Train a network with the batches of a simulated run."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = NETWORKS[network]()
    optimiser = torch.optim.Adam(model.parameters(), RATE)
    looks: list[tuple[int, float, float]] = []
    norms = []
    for step, parts in enumerate(ran.parts[:steps]):
        if step % EVERY == 0:
            looks.append((step, *_look(model, noise)))
        gradient = weigh(*_gradients(model, parts, ran.sizes, noise, step))
        norms.append(float(gradient @ gradient))
        _give(model, gradient)
        optimiser.step()
    looks.append((len(norms), *_look(model, noise)))
    at, loss, accuracy = zip(*looks, strict=True)
    return Learnt(np.array(at), np.array(loss), np.array(accuracy), np.array(norms))


def _gradients(
    model: nn.Module, parts: list[Ints], sizes: Floats, noise: float, step: int
) -> tuple[Floats, Floats, Floats]:
    """Return each worker's gradient [W, P], number of frames [W] and number of samples [W]."""
    rows, load = [], []
    for mine in parts:
        model.zero_grad()
        if len(mine):
            inputs, classes = frames(mine, sizes, noise, step)
            torch.autograd.backward(cross_entropy(model(inputs), classes))
        load.append(float(len(inputs)) if len(mine) else 0.0)
        rows.append(_taken(model))
    return np.array(rows), np.array(load), np.array([float(len(mine)) for mine in parts])


def _taken(model: nn.Module) -> npt.NDArray[np.float64]:
    grads = [
        torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
        for p in model.parameters()
    ]
    return torch.cat(grads).double().numpy().copy()


def _give(model: nn.Module, gradient: Floats) -> None:
    start = 0
    for p in model.parameters():
        end = start + p.numel()
        p.grad = torch.from_numpy(gradient[start:end]).to(p.dtype).view_as(p)
        start = end


def _look(model: nn.Module, noise: float) -> tuple[float, float]:
    """Return held-out loss and accuracy, on a noisy frame of each digit."""
    _, _, images, classes = _digits()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        logits = model(images + noise * torch.randn(images.shape, generator=generator))
        accuracy = (logits.argmax(1) == classes).float().mean()
        return float(cross_entropy(logits, classes)), float(accuracy)
