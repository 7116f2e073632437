"""Roll-ups: sums over blocks of 100 consecutive steps, so that long ranges are read quickly.

A block begins at a multiple of 100. A block whose steps are all complete has one row in
``step_rollups`` and one per rank in ``rank_rollups``. The transaction that completes the block
writes these rows, and each transaction that changes a step of the block writes them again. **A
roll-up that exists is correct; a block without a roll-up is read step by step.** `writing.fill`
adds roll-ups for steps that were stored without them.

`metrics` defines what is rolled up, and `writing` writes it. `reading` returns ranges of steps in
buckets, and sums over whole runs.
"""
