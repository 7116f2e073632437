"""SATA: 7 figures."""

from __future__ import annotations

from figures.row import How, Row

ROWS = (
    Row(
        "sata-fig-1",
        "How shares of one epoch follow from shares and times of the epoch before",
        How.EXAMPLE,
    ),
    Row(
        "sata-fig-2",
        "The procedure with three GPUs: data and batches are divided anew each epoch",
        How.VIRTUAL,
    ),
    Row(
        "sata-fig-3",
        "Computing time, share and epoch time by epoch; a 2080 Ti and a 1080 Ti in one machine",
        How.VIRTUAL,
    ),
    Row(
        "sata-fig-4",
        "The same on three machines with 2080 Ti and V100, from other initial shares",
        How.VIRTUAL,
    ),
    Row(
        "sata-fig-5",
        "Time of an epoch with equal and with adapted shares, three groups of GPUs",
        How.VIRTUAL,
    ),
    Row(
        "sata-fig-6",
        "Loss over time with a straggler 2 and 10 times slower: All-Reduce, AD-PSGD, SATA",
        How.REAL,
    ),
    Row(
        "sata-fig-7",
        "Speed-up with a straggler 2 and 5 times slower: All-Reduce, AD-PSGD, SATA",
        How.VIRTUAL,
    ),
)
