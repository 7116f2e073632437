"""Roll-ups: what each 100 steps in a row come to, so that long ranges are read quickly.

A block is 100 steps that begin at a multiple of 100. A block of which all steps are complete has
one row in ``step_rollups`` and one for each rank in ``rank_rollups``. Both are written in the
transaction that completes the block, and written again in each transaction that changes one of its
steps. **A roll-up that is there is true; a block without one is read step by step.** So nothing
depends on roll-ups but time: blocks with lost records and the newest steps need no special case.
`fill` adds the roll-ups of what was stored without them.

`tables` declares the two tables, `metrics` what is rolled up, `writing` and `fill` write, and
`reading` gives ranges of steps in buckets, and sums over whole runs.
"""
