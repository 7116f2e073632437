"""REST: the logs of a run's ranks and launchers, wherever these are.

`Logs` asks the nodes that may have a log; `follow` makes server-sent events of a log that grows.
Nothing of a log is stored by the control plane.
"""
