"""Dynamic batching: 7 figures, and a claim that has none."""

from __future__ import annotations

from figures.row import How, Row

LEVELS = (
    "Three workers with 39 cores in all; time is in proportion to samples over cores. "
    "Workloads differ in computing's share of an even step: 97, 70 "
    "and 10 %, which are assumed."
)

ROWS = (
    Row(
        "dynamic-batching-fig-1",
        "Training time on uneven clusters over that on an even one of the same cores; three "
        "workloads",
        How.VIRTUAL,
        LEVELS,
        unit="times the even cluster's",
        why="the text has no numbers.",
        measure="dynamic_batching_runs:figure_1",
    ),
    Row(
        "dynamic-batching-fig-2",
        "Variable batches: no worker waits",
        How.VIRTUAL,
        "Two workers with 5 and 15 cores.",
        why="a diagram without numbers.",
        measure="dynamic_batching_runs:figure_2",
    ),
    Row(
        "dynamic-batching-fig-3",
        "Distribution of iteration times of three workers, uniform and variable",
        How.VIRTUAL,
        "Workers with 3, 5 and 12 cores as in the text, 5 % noise, batches by cores.",
        unit="s",
        why="the text has no numbers; it says that the distributions come to lie on each "
        "other, as here.",
        measure="dynamic_batching_runs:figure_3",
    ),
    Row(
        "dynamic-batching-fig-4",
        "Batch sizes while they are adjusted, with and without the dead band",
        How.VIRTUAL,
        "Workers with 3, 5 and 12 cores from equal batches, 5 % noise, measured times.",
        {"dead band of 0.05: adjustments until within 10 %": 2},
        why="One adjustment is enough here, because time is in proportion to samples. With "
        "the dead band noise still moves batches now and then; "
        "without, at most steps that allow it.",
        measure="dynamic_batching_runs:figure_4",
    ),
    Row(
        "dynamic-batching-fig-5",
        "Throughput over batch size, on a GPU and on a CPU",
        How.HERE,
        "A small convolution network on one thread of this machine's CPU.",
        why="the text has no numbers. On a CPU throughput rises and then falls gradually, as "
        "in the paper; the GPU's sharp end at its memory is not "
        "measured, because there is no GPU here.",
        measure="dynamic_batching_runs:figure_5",
    ),
    Row(
        "dynamic-batching-fig-6",
        "Time to accuracy by heterogeneity level, three workloads, uniform and variable",
        How.VIRTUAL,
        f"{LEVELS} Global batches are the same, so steps to an accuracy are.",
        {
            "ResNet-50, gain at H 2": 2,
            "ResNet-50, gain at H 10": 2.4,
            "ResNet-50, variable at H 6 over even": 2,
            "MNIST CNN, variable at H 6 over even": 4,
            "Linear regression, variable at H 6 over even": 1.05,
        },
        "times",
        "With times in proportion to samples over cores, balance gains at most 1.4 at level "
        "2, and nothing is lost with variable batches. The paper says "
        "itself that few cores do not scale like many, which makes level 6 twice as slow and "
        "level 10's gain smaller. What more than 1.4 at level 2 comes "
        "from it does not say. MNIST's 2 to 4 and linear regression's 15 % are not given by level.",
        "dynamic_batching_runs:figure_6",
    ),
    Row(
        "dynamic-batching-fig-7",
        "A GPU beside a CPU, and two types of GPUs: uniform, variable, dynamic",
        How.VIRTUAL,
        "A P100 and a Xeon as 0.813 : 0.187 (the text's FLOPs); two T4 and two P4 as 8.1 : "
        "5.5 (single-precision peaks).",
        {
            "GPU and CPU, ResNet-50, variable": 4,
            "GPU and CPU, MNIST CNN, variable": 1.2,
            "GPU and CPU, MNIST CNN, dynamic over variable": 1.03,
            "two T4, two P4, ResNet-50, variable": 4.5,
        },
        "times uniform batches",
        "With 0.813 : 0.187 balance gains 2.67 at most, and with 8.1 : 5.5 1.24: more must "
        "come from elsewhere, such as a GPU that is less than "
        "busy with small batches, or T4's tensor cores in half precision (65 TFLOPS). MNIST's "
        "computing share is assumed, and larger here.",
        "dynamic_batching_runs:figure_7",
    ),
    Row(
        "dynamic-batching-asp",
        "Asynchronous training gains from variable batches, too, less than BSP (Sec. III-B)",
        How.VIRTUAL,
        "Level 6, `n-soft` with n of 3: each worker's gradient is an update.",
        why="no numbers in the text. Asynchronous workers do not wait, so throughput stays. "
        "Fast workers take over batches of slow ones here, with either "
        "kind of batches, so staleness hardly changes either.",
        measure="dynamic_batching_runs:asp",
    ),
)
