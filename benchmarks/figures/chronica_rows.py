"""CHRONICA: 14 figures, 6 tables."""

from __future__ import annotations

from figures.row import How, Row

TABLE_4 = {
    0: (234, 232, 235, 231),
    4: (263, 242, 260, 235),
    8: (295, 251, 289, 236),
    16: (334, 283, 338, 237),
    32: (423, 343, 431, 243),
    64: (578, 426, 584, 247),
}
TABLE_5 = {
    "VGG16": (628, 440, 630, 249),
    "ResNet-50": (578, 426, 584, 247),
    "MobileNetV1": (139, 113, 143, 85),
    "EfficientNet-B0": (143, 115, 148, 86),
}
SYSTEMS = ("TensorFlow", "BOA", "EP4DDL", "CHRONICA")

ROWS = (
    Row(
        "chronica-fig-1",
        "Job time and peak device memory as sizes spread, against equal sizes; four models, two clusters",
        How.VIRTUAL,
    ),
    Row("chronica-fig-2", "ResNet-50 converges more slowly, the more sizes spread", How.LEARNING),
    Row(
        "chronica-fig-3",
        "The four parts at work: loads of 234 and 244 for two workers",
        How.EXAMPLE,
    ),
    Row(
        "chronica-fig-4",
        "The prophet's regression: a sample's expected time after new feedback",
        How.EXAMPLE,
    ),
    Row("chronica-fig-5", "The scheduler's picks for two workers and a batch of four", How.EXAMPLE),
    Row(
        "chronica-fig-6",
        "The shuffler moves two samples from the loaded worker to the other",
        How.EXAMPLE,
    ),
    Row("chronica-fig-7", "Spread of the workers' loads in each step, by system", How.VIRTUAL),
    Row(
        "chronica-fig-8",
        "Normalised job time by spread of sizes, four systems, two clusters",
        How.VIRTUAL,
    ),
    Row("chronica-fig-9", "Error of the expected times in each step, three systems", How.VIRTUAL),
    Row("chronica-fig-10", "Loss over time by spread of sizes, four systems", How.LEARNING),
    Row("chronica-fig-11", "Loss over time for four models at DIF 64, four systems", How.LEARNING),
    Row(
        "chronica-fig-12",
        "Normalised job time for four models, four systems, two clusters",
        How.VIRTUAL,
    ),
    Row(
        "chronica-fig-13",
        "Convergence with and without the learning-rate compensator, two clusters",
        How.LEARNING,
    ),
    Row(
        "chronica-fig-14", "Speed-up from 1 to 32 workers, four systems, two clusters", How.VIRTUAL
    ),
    Row("chronica-table-1", "Number of videos and DIF of seven data sets", How.VIRTUAL),
    Row("chronica-table-2", "Hardware of the two instance types", How.NOT),
    Row(
        "chronica-table-3",
        "Parameters, operations and published accuracy of the four models",
        How.NOT,
    ),
    Row(
        "chronica-table-4",
        "Seconds per epoch by DIF, four systems, eight equal workers",
        How.VIRTUAL,
    ),
    Row(
        "chronica-table-5", "Seconds per epoch for four models at DIF 64, four systems", How.VIRTUAL
    ),
    Row(
        "chronica-table-6",
        "Where the time goes: feedback, schedule, shuffle, lock, training; 8 and 32 workers",
        How.VIRTUAL,
    ),
)
