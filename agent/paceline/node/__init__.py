"""The processes of a node other than the ranks. Only the package `node.elastic` imports torch.

`agent.Agent` receives the control plane's commands and passes each attempt of a run to its
`supervisor.Supervisor`, which starts the ranks through TorchElastic (`elastic.launcher`). Logs of
ranks are in the run's directory (`rundir`), and `answering` sends them to the control plane on
request. With a `duty.Duty`, the agent serves a single run. `starting.foreground.train` runs ranks
in the foreground. A rank writes into its `spool.Spool` while the bus is unavailable;
`delivery.Delivery` sends the spooled entries once the bus is back. `client.Client` calls the
server's REST API. The command line calls all of these; the control plane imports only `client`,
`tokens`, `private` and `processes`, and its demo also `starting`::

    Agent(link, name, directory, find_session).run()  # paceline agent
    foreground.train(...)                             # paceline run --nproc 4 train.py
"""
