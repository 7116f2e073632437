"""Library and node agent of Paceline, which removes stragglers from data-parallel training.

Training scripts import `Session` and the other names of `__all__` from this package. Names that
need torch are loaded on first use, so that agents and servers can import the package without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from paceline.core.errors import PacelineError
from paceline.core.version import __version__

if TYPE_CHECKING:
    from paceline import data
    from paceline.balancing import Speeds, partition
    from paceline.client import connect
    from paceline.core.batch_limits.shapes import Shapes
    from paceline.train.batch_limits.packing import Packed, packed
    from paceline.train.plan_shard import Batch
    from paceline.train.seeding import generator, numpy_generator, seeded
    from paceline.train.session import Session

__all__ = [
    "Batch",
    "PacelineError",
    "Packed",
    "Session",
    "Shapes",
    "Speeds",
    "__version__",
    "connect",
    "data",
    "generator",
    "numpy_generator",
    "packed",
    "partition",
    "seeded",
]


def __getattr__(name: str) -> Any:
    if name == "Batch":
        from paceline.train.plan_shard import Batch

        return Batch
    if name == "Session":
        from paceline.train.session import Session

        return Session
    if name == "Shapes":
        from paceline.core.batch_limits.shapes import Shapes

        return Shapes
    if name in ("Speeds", "partition"):
        return getattr(importlib.import_module("paceline.balancing"), name)
    if name in ("Packed", "packed"):
        return getattr(importlib.import_module("paceline.train.batch_limits.packing"), name)
    if name in ("generator", "numpy_generator", "seeded"):
        return getattr(importlib.import_module("paceline.train.seeding"), name)
    if name == "data":
        return importlib.import_module("paceline.data")
    if name == "connect":
        from paceline.client import connect

        return connect
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
