"""Training backends: where a run's processes come from.

`Backend` says what each of them does and when. `local` starts runs through the agents of nodes.
`simulated` starts nothing, since `paceline simulate` drives its runs. `adopted` launches on nodes
that somebody else started for the run. An `Engine`, such as `slurm`,
starts nodes that look after one run each. One file for each; they are in the entry-point group
``paceline.backends``, where packages of others may add theirs.

`requests.launch` checks a new run with its backend, records the run and lets the backend start it;
the controllers and ingest ask which runs they have to plan; `control.engines` sees to jobs:

    backend = backends.get(new.backend)
    backend.check(new, launch=True)
    [node] = backend.place(new, nodes)
    backend.start(bus, run, replace(new, node=node), credentials)
"""

from paceline_backend.backends.adopted import Adopted
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
    Engine,
    EngineAwayError,
    EngineOptions,
    EngineRefusedError,
    Facts,
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
    "Adopted",
    "Backend",
    "Credentials",
    "Engine",
    "EngineAwayError",
    "EngineOptions",
    "EngineRefusedError",
    "Facts",
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
