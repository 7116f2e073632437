"""Processes of the control plane, and the modules that they share.

`Settings` has the database, the bus and the address to listen on. The `ServerSupervisor` in
`supervisor` starts the web and worker processes and restarts those that end. `embedded` runs an
embedded bus, and `heartbeat` reports on the bus that a worker is alive. `stack` starts a control
plane with an agent for `paceline up`, `paceline demo` and tests.
"""
