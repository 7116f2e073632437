"""LBB: 7 figures, 3 tables."""

from __future__ import annotations

from figures.row import How, Row

ROWS = (
    Row("lbb-fig-1", "Equal batches on unequal devices: who waits for whom", How.VIRTUAL),
    Row("lbb-fig-2", "The same picture again, beside the related work", How.VIRTUAL),
    Row(
        "lbb-fig-3",
        "Computing time over batch size of four GPUs, and the fitted models",
        How.VIRTUAL,
    ),
    Row("lbb-fig-4", "Time of an epoch: SSGD, Local SGD, OSA, n-soft, LBB", How.VIRTUAL),
    Row("lbb-fig-5", "Accuracy by epoch of SSGD and LBB, four models, two data sets", How.LEARNING),
    Row("lbb-fig-6", "Accuracy and loss over time by algorithm", How.REAL),
    Row(
        "lbb-fig-7",
        "Times, batch sizes and straggler effect while workers are disturbed in turn",
        How.VIRTUAL,
    ),
    Row("lbb-table-1", "The four GPUs of the machine", How.NOT),
    Row("lbb-table-2", "Batch sizes and times of four workers, equal and balanced", How.VIRTUAL),
    Row(
        "lbb-table-3",
        "Batch sizes and expected times by profile and by rapid tuning, and their errors",
        How.VIRTUAL,
    ),
)
