"""Plans the next segment of a run from what the run has done so far.

`History` is the state of an attempt: which samples are left of its epoch, and which rank holds each
sample. `Window` keeps the newest measurements of its ranks. `offer` asks a policy for a plan and
wraps the plan as a segment. `load` rebuilds history and window from the store.

The controller and what-if start with `load`; replay and the simulator feed a history of their own.

    history, window = load(connection, key)
    made = offer(history, window, policies.make("paceline"), version=0)
    history.adopt(made.segment)
"""
