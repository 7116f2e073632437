"""Read all details of one run: records, assignments of samples, and totals of epochs.

- `rows`: a run's tables in chunks, for exports with bounded memory.
- `samples`: the assignment of samples to ranks and steps.
- `epochs`: totals of each epoch, and of each worker and node in it.
"""
