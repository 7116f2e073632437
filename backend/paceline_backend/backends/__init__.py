"""Training backends: where a run's processes come from.

`Backend` says what each of them does and when. `Local` starts runs through the agents of nodes;
`Simulated` starts nothing, since `paceline simulate` drives its runs. One file for each.

`requests.launch` checks a new run with its backend, records the run and lets the backend start it;
the controllers and ingest ask which runs they have to plan:

    backend = backends.get(new.backend)
    backend.check(new, launch=True)
    node = backend.place(new, nodes)
    backend.start(bus, run, replace(new, node=node))
"""

from paceline_backend.backends.base import Backend, NewRunError, NoNodeError
from paceline_backend.backends.local import Local
from paceline_backend.backends.simulated import Simulated

_ALL: dict[str, Backend] = {backend.name: backend for backend in (Local(), Simulated())}


def get(name: str) -> Backend:
    """The backend of this name. The API refuses other names, so that a run has one of these."""
    return _ALL[name]


def planned() -> list[str]:
    """The names of the backends whose runs controllers plan."""
    return [name for name, backend in _ALL.items() if not backend.plans_itself]


def plans_itself(name: str | None) -> bool:
    """Whether runs of this backend are planned by the backend; False for an unknown name."""
    backend = _ALL.get(name or "")
    return backend is not None and backend.plans_itself


__all__ = ["Backend", "NewRunError", "NoNodeError", "get", "planned", "plans_itself"]
