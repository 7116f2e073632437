"""REST: the logs of a run's ranks and launchers, read from the nodes that store them.

`Logs` requests logs from the nodes; `follow` streams a growing log as server-sent events. The
control plane never stores any part of a log. Functions that query nodes raise `redis.RedisError`
while the bus is away, and `StoreError` while the database is.
"""
