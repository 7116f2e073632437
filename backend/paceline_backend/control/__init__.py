"""Worker process: stores what ranks report and plans what they do next.

`Ingest` moves telemetry from the bus into the store, in its own process. `ControllerManager` takes
the `Lease` of each active run and starts a `Controller` for it, which offers the leader its next
segment. The `Advisor` in `advice.advisor` decides for runs whose `auto` is on. `worker.run` starts
ingest as a child process and everything else as threads. Nothing else calls this package, and the
API never imports it.

    with Store.open(url) as store:
        ControllerManager(store, "redis://127.0.0.1:6379/0", owner="host:8000").run(stop)
"""

from paceline_backend.control.controller import Controller
from paceline_backend.control.leases import Lease
from paceline_backend.control.manager import ControllerManager

__all__ = ["Controller", "ControllerManager", "Lease"]
