"""From what a run has done to its next segment, for controller, simulator, what-if and replay.

`History` is the state of an attempt: what is left of its epoch, and who holds which sample.
`Window` keeps the newest measurements of its ranks. `offer` asks a policy for a plan and wraps it
as a segment. `load` rebuilds history and window from the store; the simulator feeds its own.

    history, window = load(connection, key)
    made = offer(history, window, policies.make("paceline"), version=0)
    history.adopt(made.segment)
"""
