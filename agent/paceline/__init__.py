"""Removes stragglers from data-parallel PyTorch training: the library and the node agent."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.session import Batch, Session

__version__ = version("paceline")
__all__ = ["Batch", "PacelineError", "Session", "__version__"]


def __getattr__(name: str) -> Any:
    # What needs torch loads when first used: agents and servers import paceline without it.
    if name in ("Batch", "Session"):
        from paceline import session

        return getattr(session, name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
