"""Plan the next segment of a run from the run's history and feedback.

`History` is the state of an attempt: which samples are left of its epoch, and which rank holds each
sample. `Window` keeps the newest measurements of the attempt's ranks. `offer` requests the next
segment from a policy.

The controller and what-if load history and window from the store; rank 0, replay and the simulator
maintain their own.

    history, window = History(hello), Window(hello.world, hello.attempt)
    segment, shuffle = offer(history, window, policies.make("paceline"), version=0)
    history.shuffled(segment, shuffle)  # if the shuffler ran: `Plan.shuffled`
    history.adopt(segment)
"""
