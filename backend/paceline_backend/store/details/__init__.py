"""All that is stored of one run, as it is stored.

- `rows`: tables of a run in parts, for exports with bounded memory.
- `samples`: which rank got which samples in which step.
- `epochs`: what each epoch came to.
- `moments`: which steps ended in a range of wall-clock time.
"""
