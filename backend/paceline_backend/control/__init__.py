"""The worker process: it stores the reports of ranks and plans the next segment of each run.

`Ingest` moves telemetry from the bus into the store, in its own process. `ControllerManager` takes
the `Lease` of each active run and starts a `Controller` for it, which offers the leader its next
segment. The `Advisor` in `advice` decides on policy switches of runs whose `auto` is on.
`paceline server` calls `worker.run`, which starts ingest as a child process and everything else as
threads. The API never imports this package.

Common parameters: `store` is the database, `bus_url` the ``redis://…`` URL of the bus, `owner` the
unique name of this worker, and `clock` returns monotonic seconds. The modules `advice`, `hangs` and
`slow_nodes` skip runs that another worker plans. Functions that use the database raise `StoreError`
when it fails, and functions that use the bus raise `redis.RedisError`. `Periodic` handles both
errors.
"""

from paceline_backend.control.controller import Controller
from paceline_backend.control.leases import Lease
from paceline_backend.control.manager import ControllerManager

__all__ = ["Controller", "ControllerManager", "Lease"]
