"""What changing shapes of batches cost a compiled model, with and without `Session(shapes=…)`.

Batches are those that `paceline` plans for two ranks of unequal speed, which drift, on a virtual
clock: each rank's number of samples, and the length to which its batch is padded. Then this process
trains a model that torch.compile has compiled on one rank's batches after the other's, for real.
Recompilations are counted as a rank counts them for its telemetry. A step's time is the sum of the
ranks' mean times after the warm-up, recompilations included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from harness import Check, finish, parser
from msgspec.structs import replace
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

from paceline.core.amounts.shapes import Shapes, raised
from paceline.core.emulation import Emulation, Slowdown
from paceline.train.telling.compiling import recompilations
from paceline_backend import policies
from paceline_backend.simulator import Simulation
from paceline_backend.simulator.hello import hello_of

WORLD, BATCH, WARM = 2, 64, 40
WIDTH, HEADS, VOCABULARY, LONGEST = 64, 4, 100, 256
SHAPES = Shapes(samples=8, length=64)
MOST_RECOMPILATIONS = 8
SLOWER = 1.05  # at most so many times the time without a grid: what else the machine does


@dataclass(frozen=True)
class Case:
    """A model, and how it is compiled."""

    name: str
    model: Callable[[], nn.Module]
    lengths: bool  # batches are padded sequences
    dynamic: bool | None  # of torch.compile


class Encoder(nn.Module):
    """A transformer layer over padded sequences, and a classifier of their means."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits, [n, 10], of tokens, [n, L]."""
        return self.out(self.layer(self.embedding(tokens)).mean(dim=1))


def perceptron() -> nn.Module:
    """Three layers on vectors of `LONGEST` numbers."""
    return nn.Sequential(
        nn.Linear(LONGEST, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


CASES = (
    Case("perceptron, dynamic=False", perceptron, lengths=False, dynamic=False),
    Case("perceptron, as torch.compile does", perceptron, lengths=False, dynamic=None),
    Case("transformer, as torch.compile does", Encoder, lengths=True, dynamic=None),
)


def planned(steps: int, lengths: bool, shapes: Shapes) -> tuple[Any, Any]:
    """Samples and padded length of each rank's batches, [S, W] each, as `paceline` plans them."""
    rng = np.random.default_rng(1)
    sizes = np.ones(8 * BATCH)
    if lengths:
        sizes = np.clip(rng.lognormal(4.2, 0.6, 8 * BATCH).round(), 8, LONGEST)
    waves = [Slowdown([0], 1.4, start, 12) for start in range(16, steps, 36)]
    devices = Emulation([1e-3, 1.6e-3], [2e-3, 2e-3], noise=0.04, seed=1, slowdowns=waves)
    hello = hello_of(
        sizes,
        WORLD,
        BATCH,
        seed=1,
        grid=shapes.samples,
        length_grid=float(shapes.length),
    )
    devices = replace(devices, cost=replace(devices.cost, padded=lengths))
    policy = policies.make("paceline", {"cost": "padded" if lengths else "sum"})
    simulation = Simulation(hello, devices, policy)
    samples: list[Any] = []
    longest: list[Any] = []
    while len(samples) < steps:
        of = simulation.advance().features
        samples += list(of.samples)
        longest += list(raised(of.longest, float(shapes.length)))
    return np.array(samples[:steps]), np.array(longest[:steps])


def batch_of(samples: int, longest: int, case: Case) -> tuple[Tensor, Tensor]:
    """Made-up inputs and labels."""
    labels = torch.zeros(samples, dtype=torch.int64)
    if case.lengths:
        return torch.ones(samples, longest, dtype=torch.int64), labels
    return torch.ones(samples, LONGEST), labels


def trained(case: Case, shapes: Shapes, steps: int, backend: str) -> dict[str, float]:
    """Trains on each rank's batches; figures after the warm-up."""
    counts, longest = planned(steps, case.lengths, shapes)
    row = {"recompilations": 0.0, "warm_up_recompilations": 0.0, "step_s": 0.0, "median_s": 0.0}
    row["shapes"] = len({*zip(counts.ravel(), longest.ravel() * case.lengths, strict=True)})
    for rank in range(WORLD):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = torch.compile(case.model(), dynamic=case.dynamic, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        took_s, warm = [], 0
        for step in range(steps):
            samples = int(counts[step, rank]) or shapes.samples  # a filler, as the loader's
            inputs, labels = batch_of(samples, max(int(longest[step, rank]), 1), case)
            began = time.perf_counter()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            took_s.append(time.perf_counter() - began)
            if step == WARM - 1:
                warm = recompilations()
        row["recompilations"] = max(row["recompilations"], recompilations() - warm)
        row["warm_up_recompilations"] += warm
        row["step_s"] += statistics.fmean(took_s[WARM:])
        row["median_s"] += statistics.median(took_s[WARM:])
    return row


def compiled_anew(case: Case, shapes: Shapes, steps: int, backend: str) -> dict[str, float]:
    """As `trained`, without what inductor keeps on disk: a cached compilation costs no time."""
    with fresh_cache():
        return trained(case, shapes, steps, backend)


def compiles(backend: str) -> bool:
    """Whether a backend of torch.compile works here: inductor needs a C++ compiler."""
    try:
        torch.compile(nn.Linear(2, 2), backend=backend)(torch.ones(3, 2)).sum().backward()
    except Exception as error:  # whatever it is, this backend compiles nothing here
        print(f"{backend} does not work here, so aot_eager compiles: {error}", file=sys.stderr)
        return False
    return True


def main() -> None:
    """Runs the benchmark."""
    made: argparse.ArgumentParser = parser(__doc__)
    made.add_argument("--backend", help="of torch.compile; without it inductor, if that works here")
    options = made.parse_args()
    torch.set_num_threads(1)  # of so small models, more threads mostly wait for each other
    backend = options.backend or ("inductor" if compiles("inductor") else "aot_eager")
    cases, steps = (CASES[:1], WARM + 60) if options.quick else (CASES, WARM + 200)
    results: dict[str, Any] = {}
    checks = []
    lines = [f"{'':<38}{'recompilations':>16}{'shapes':>8}{'step':>10}{'median':>10}"]
    for case in cases:
        rows = {
            "without": compiled_anew(case, Shapes(), steps, backend),
            "shapes": compiled_anew(case, SHAPES, steps, backend),
        }
        results[case.name] = rows
        for kind, row in rows.items():
            name = case.name if kind == "without" else f"  with {SHAPES.samples} × {SHAPES.length}"
            lines.append(
                f"{name:<38}{row['recompilations']:>16.0f}{row['shapes']:>8.0f}"
                f"{1e3 * row['step_s']:>7.2f} ms{1e3 * row['median_s']:>7.2f} ms"
            )
        with_s, without_s = rows["shapes"]["step_s"], rows["without"]["step_s"]
        recompiled = rows["shapes"]["recompilations"]
        checks += [
            Check(f"{case.name}: recompilations", recompiled, MOST_RECOMPILATIONS, "<="),
            Check(f"{case.name}: time over that without", with_s / without_s, SLOWER, "<="),
        ]
    config = {"ranks": WORLD, "batch": BATCH, "warm": WARM, "steps": steps, "backend": backend}
    finish(options, config, results, checks, "\n".join(lines))


if __name__ == "__main__":
    main()
