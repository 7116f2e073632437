"""Dynamic batching: 7 figures, and a claim that has none."""

from __future__ import annotations

from figures.row import How, Row

ROWS = (
    Row(
        "dynamic-batching-fig-1",
        "Training time on uneven clusters over that on an even one of the same cores; three workloads",
        How.VIRTUAL,
    ),
    Row("dynamic-batching-fig-2", "Variable batches: no worker waits", How.VIRTUAL),
    Row(
        "dynamic-batching-fig-3",
        "Distribution of iteration times of three workers, uniform and variable",
        How.VIRTUAL,
    ),
    Row(
        "dynamic-batching-fig-4",
        "Batch sizes while they are adjusted, with and without the dead band",
        How.VIRTUAL,
    ),
    Row("dynamic-batching-fig-5", "Throughput over batch size, on a GPU and on a CPU", How.HERE),
    Row(
        "dynamic-batching-fig-6",
        "Time to accuracy by heterogeneity level, three workloads, uniform and variable",
        How.VIRTUAL,
    ),
    Row(
        "dynamic-batching-fig-7",
        "A GPU beside a CPU, and two types of GPUs: uniform, variable, dynamic",
        How.VIRTUAL,
    ),
    Row(
        "dynamic-batching-asp",
        "Asynchronous training gains from variable batches, too, less than BSP (Sec. III-B)",
        How.VIRTUAL,
    ),
)
