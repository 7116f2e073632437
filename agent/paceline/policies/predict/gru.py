"""EP4DDL's predictor: a GRU forecasts each worker's next step. Only this predictor needs torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from paceline.policies.values import Feedback, Floats, Models, StepTable

if TYPE_CHECKING:
    import torch

# Number of past steps from which the GRU predicts the next step.
PAST = 8
_HIDDEN = 4
# Number of sequences of `PAST` + 1 step times on which the network is trained.
_SEQUENCES = 64
# Number of Adam steps; each step uses all sequences.
_ADAM_STEPS = 24
_RATE = 0.05
# `Models.a` ÷ a step's time. Sizes are not used, but `Models.a` must be above 0.
_NO_SIZE = 1e-12

# Guards torch's number of threads, which is a setting of the whole process.
_threads_lock = threading.Lock()


@dataclass(frozen=True)
class GruPredictor:
    """EP4DDL's predictor: a GRU forecasts the time of each worker's next step from its last steps.

    All workers share one small network. It is trained from scratch for every plan, so that a plan
    depends on nothing but the feedback. The network predicts the next step's time relative to the
    mean of the eight steps before; an untrained network predicts 1. The network's only inputs are
    times, so `Models.b` is the whole prediction.
    """

    def fit(self, feedback: Feedback, world: int) -> Models:
        """See `Predictor.fit`."""
        if not len(feedback):
            return Models.unknown(world)
        table = StepTable.of(feedback, world, 0)
        times = [t[ok] for t, ok in zip(table.compute_s.T, table.usable.T, strict=True)]
        if not all(map(len, times)):
            return Models.unknown(world)
        level = np.array([t[-PAST:].mean() for t in times])
        long_ = [rank for rank, t in enumerate(times) if len(t) > PAST]
        if long_:
            windows = [sliding_window_view(times[rank], PAST + 1) for rank in long_]
            history = np.concatenate(windows)
            history = history[np.linspace(0, len(history) - 1, _SEQUENCES).astype(int)]
            last = np.stack([times[rank][-PAST:] for rank in long_])
            mean = history[:, :PAST].mean(axis=1, keepdims=True)
            level[long_] *= np.maximum(
                1 + _predict(history / mean - 1, last / last.mean(axis=1, keepdims=True) - 1), 0.1
            )
        return Models(_NO_SIZE * level, np.zeros(world), level)


def _predict(history: Floats, last: Floats) -> Floats:
    """Train on `history`, and predict the value that follows each row of `last`, [W].

    `history` has S sequences of P + 1 values, [S, P + 1]; `last` has W sequences of P values, [W,
    P].
    """
    import torch

    with _threads_lock:
        threads = torch.get_num_threads()
        # On tensors this small, two threads take ten times as long as one.
        torch.set_num_threads(1)
        try:
            with torch.enable_grad():
                forecast = _learned(torch.from_numpy(history))
            with torch.no_grad():
                return forecast(torch.from_numpy(last)).numpy()
        finally:
            torch.set_num_threads(threads)


def _learned(history: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Train a model to forecast the last column of `history`, [S, P + 1], from the other columns.

    Return a function from sequences of P values, [K, P], to the forecast next values, [K].
    torch.nn.Module and torch.optim are not used: they import the compiler, which takes half a
    minute on a busy machine.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    shapes = [(3 * _HIDDEN, 1), (3 * _HIDDEN, _HIDDEN), (3 * _HIDDEN,), (3 * _HIDDEN,)]
    gru = [torch.empty(s, dtype=torch.float64) for s in shapes]
    for values in gru:
        values.uniform_(-0.5, 0.5, generator=generator)
    weights, bias = torch.zeros(_HIDDEN, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    parameters = [p.requires_grad_() for p in (*gru, weights, bias)]

    def forecast(rows: torch.Tensor) -> torch.Tensor:
        start = torch.zeros(1, len(rows), _HIDDEN, dtype=torch.float64)
        out, _ = torch.gru(rows[..., None], start, gru, True, 1, 0.0, False, False, True)
        return out[:, -1] @ weights + bias

    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    for round_ in range(1, _ADAM_STEPS + 1):
        # A single change of speed must not dominate: errors above a tenth count linearly.
        error = torch.nn.functional.smooth_l1_loss(
            forecast(history[:, :-1]), history[:, -1], beta=0.1
        )
        gradients = torch.autograd.grad(error, parameters)
        with torch.no_grad():
            for p, g, (first, second) in zip(parameters, gradients, moments, strict=True):
                first.lerp_(g, 0.1)
                second.lerp_(g * g, 0.001)
                mean, square = first / (1 - 0.9**round_), second / (1 - 0.999**round_)
                p -= _RATE * mean / (square.sqrt() + 1e-8)
    return forecast
