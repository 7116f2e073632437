"""EP4DDL's predictor: a GRU foretells each worker's next step. It alone needs torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from paceline_backend.policies.base import Feedback, Floats, Models
from paceline_backend.policies.predict.table import StepTable

if TYPE_CHECKING:
    import torch

PAST = 8  # steps that a prediction looks back
_HIDDEN = 4
_SEQUENCES = 64  # that the GRU learns from
_ROUNDS = 24  # of Adam, on all of them at once
_RATE = 0.05
_NO_SIZE = 1e-12  # of the time: what a size unit costs, to a model that knows of none

_alone = threading.Lock()  # torch's number of threads is the process's, which plans several runs


@dataclass(frozen=True)
class GruPredictor:
    """EP4DDL's predictor: the time of each worker's next step from its last ones, by a GRU.

    One small network for all workers, trained anew on the window whenever a plan is made, so that
    the plan depends on nothing else. It predicts how far the next step's time lies from the mean of
    the eight before, and begins with "not at all". It sees times alone: `Models.b` is the whole of
    the prediction.
    """

    def fit(self, feedback: Feedback, world: int) -> Models:
        """See `Predictor.fit`. Known as soon as each rank has one usable row."""
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
            # From all of the window and all workers, evenly.
            history = history[np.linspace(0, len(history) - 1, _SEQUENCES).astype(int)]
            last = np.stack([times[rank][-PAST:] for rank in long_])
            mean = history[:, :PAST].mean(axis=1, keepdims=True)
            level[long_] *= np.maximum(
                1 + _predict(history / mean - 1, last / last.mean(axis=1, keepdims=True) - 1), 0.1
            )
        return Models(_NO_SIZE * level, np.zeros(world), level)


def _predict(history: Floats, last: Floats) -> Floats:
    """The value after each row of `last` [W, P], by a GRU that learned from `history` [S, P + 1].

    The same rows give the same values: one seed, one thread, float64.
    """
    import torch

    with _alone:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # with two, it takes ten times as long
        try:
            with torch.enable_grad():
                forecast = _learned(torch.from_numpy(history))
            with torch.no_grad():
                return forecast(torch.from_numpy(last)).numpy()
        finally:
            torch.set_num_threads(threads)


def _learned(history: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A forecast of the last column of `history` [S, P + 1] from those before, by Adam.

    Of torch only what ``import torch`` brings: its modules and optimisers would import its compiler
    too, which takes a busy machine half a minute.
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
    for round_ in range(1, _ROUNDS + 1):
        # One change of speed is no habit: errors above a tenth count linearly.
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
