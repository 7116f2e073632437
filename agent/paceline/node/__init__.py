"""Everything that runs on a node beside the ranks. Only `node.elastic` imports torch.

`agent.Agent` takes the control plane's commands and hands each attempt of a run to its
`supervisor.Supervisor`, which starts the ranks through TorchElastic (`elastic.launcher`) and keeps
their logs (`rundir`); `answering` shows these to the control plane. With a `duty.Duty` it does so
for one run, on a node that an engine started. `run.train` does that in the foreground. A rank whose
bus is away writes into its `spool.Spool`; `delivery.Delivery` sends what lies there once the bus is
back. `client.Client` asks the server over REST. The command line calls all of these; the control
plane imports only `client`, `tokens`, `private` and `processes`::

    Agent(link, name, directory, find_session).run()  # paceline agent
    run.train(...)                                          # paceline run --nproc 4 train.py
"""
