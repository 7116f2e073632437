"""Starting the processes of the control plane, and what they share.

`Settings` says which database and bus to use and where to listen. The `Supervisor` in `supervisor`
starts web and worker processes and restarts those that end; `embedded` runs a bus of our own;
`heartbeat` tells on the bus that a worker works; `stack` starts a whole control plane for demo and
tests. Called by `paceline server`, and by `paceline demo`.

    settings = Settings(database, bus, port=8000)
    Supervisor(settings, listener, embedded=None, name="host:8000").run()
"""
