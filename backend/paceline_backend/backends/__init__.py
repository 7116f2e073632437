"""Training backends, which start the processes of runs.

`local` starts a run through the agents of nodes. `simulated` starts no processes, because `paceline
simulate` drives its runs. `adopted` launches a run on nodes that a user has started for this run.
An `Engine`, such as `slurm`, submits jobs, each of which starts nodes for a single run. Each
backend has a module, and is registered in the entry-point group ``paceline.backends``, to which
other packages can add backends.

`requests.launch` validates a new run, records it and starts it, for example on one node:

    backend = backends.get(new.backend)
    backend.check(new, launch=True)
    [node] = backend.place(new, nodes)
    backend.start(bus, run, replace(new, node=node), credentials)
"""

from paceline_backend.backends.adopted import AdoptedBackend
from paceline_backend.backends.base import (
    Backend,
    Credentials,
    NewRunError,
    NoNodeError,
    NoOptions,
    check_nodes,
    check_path,
    launch_on,
    options_of,
)
from paceline_backend.backends.engine import (
    Availability,
    Engine,
    EngineAwayError,
    EngineOptions,
    EngineRefusedError,
    Job,
    Order,
    directory,
)
from paceline_backend.backends.registry import (
    UnknownBackendError,
    engine,
    engines,
    get,
    names,
    planned,
    plans_itself,
)

__all__ = [
    "AdoptedBackend",
    "Availability",
    "Backend",
    "Credentials",
    "Engine",
    "EngineAwayError",
    "EngineOptions",
    "EngineRefusedError",
    "Job",
    "NewRunError",
    "NoNodeError",
    "NoOptions",
    "Order",
    "UnknownBackendError",
    "check_nodes",
    "check_path",
    "directory",
    "engine",
    "engines",
    "get",
    "launch_on",
    "names",
    "options_of",
    "planned",
    "plans_itself",
]
