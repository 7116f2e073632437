"""What the worker does about jobs of engines.

- `engines`: compares all runs on engines with the engines' jobs, again and again;
- `attending`: does what a single run needs;
- `engine_jobs`: what the jobs of a run say;
- `claims`: which worker acts for which runs.
"""
