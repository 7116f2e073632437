"""All stored details of one run, in the form in which they are stored.

- `rows`: a run's tables in chunks, for exports with bounded memory.
- `samples`: the assignment of samples to ranks and steps.
- `epochs`: totals of each epoch.
- `epoch_workers`: totals of each worker in an epoch.
- `moments`: the steps that ended in a range of wall-clock time.
"""
