"""Management of runs' jobs on engines (Slurm, Ray, Kubernetes) by the worker.

- `engines`: reconciles all runs on engines with the engines' jobs.
- `attending`: submits, stops and judges the jobs of a single run.
- `engine_jobs`: derives a run's state from its jobs.
- `claims`: ensures that only one worker acts for a run.
"""
